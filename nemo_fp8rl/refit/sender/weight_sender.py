"""The sender of one trainer rank: quantizes the rank's weights once and sends every engine rank the pieces it stores.

Blocks are quantized independently of each other, so a piece has the same bytes whichever region of its tensor is cut
out. A piece is quantized, or copied where the rank has FP8, directly into its place in one engine's memory or into one
link's bucket, and copied from there for other engines. For deltas a rank keeps the bytes that it sent last.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.common.region import Region
from nemo_fp8rl.fp8 import BlockScaled, Matrices, NonFiniteError, ScaleFormat, quantize_blockwise, quantize_delta
from nemo_fp8rl.fp8.block_scaled import scale_values
from nemo_fp8rl.fp8.delta import Delta
from nemo_fp8rl.refit.deferred_checks import PendingDigest, on_gpu
from nemo_fp8rl.refit.digest import bytes_of
from nemo_fp8rl.refit.expert_stacks import Weight, expert_name
from nemo_fp8rl.refit.manifest import RefitError, TensorPart
from nemo_fp8rl.refit.message import Content
from nemo_fp8rl.refit.reports import LinkId, SendReport
from nemo_fp8rl.refit.sender.piece_cut import QuantizedMatrices, Values, copy_matrices
from nemo_fp8rl.refit.sender.push import Link, Piece, Push, PushPlan, Target
from nemo_fp8rl.refit.sender.weight_regions import as_block_scaled

MIN_DELTA_BYTES = 1 << 14
"""Bytes of the smallest piece that is sent as a delta; below this a delta would hardly be smaller."""


class WeightSender:
    """Sends one rank's weights.

    parts:        the parts of this rank
    stack_sizes:  matrices of each part of a stack of experts, by its name
    base_version: the version whose bytes the rank has kept for the next delta, or -1
    """

    def __init__(self, parts: Sequence[TensorPart], scale_format: ScaleFormat) -> None:
        self.parts = {part.name: part for part in parts}
        self.stack_sizes = {part.name: part.size[0] for part in parts if part.is_stack}
        self.encodes: Mapping[str, Tensor] = {}
        self.plan = PushPlan()
        self.scale_format = scale_format
        self.base_version = -1
        self.base: dict[tuple[str, Region], Tensor] = {}
        """uint8 [part.nbytes], scales and data, of each piece that was sent last."""

    @torch.no_grad()
    def send(
        self,
        weights: Iterable[tuple[str, Weight]],
        version: int,
        links: Mapping[LinkId, Link],
        *,
        delta: bool = False,
        keep: bool = False,
        digests: bool = True,
        with_frozen: bool = True,
        direct: bool = False,
        encodes: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> SendReport:
        """Send every link its pieces of these weights. A link that breaks is left out of the rest and reported.

        weights: (name, values) of this rank's parts, in an order that all ranks share (`module_order`). The values may
                 be a stack [count, rows, K] of matrices that lie one below the other in the part, or a list of the
                 matrices of experts. FP8 values are sent as they are.
        delta:   every sink has the bytes that this rank kept: send the changes
        keep:    keep the bytes of this version for the next delta
        digests: send a digest of each piece
        with_frozen: send tensors that never change as well; every sink has them otherwise
        direct:  write pieces into the places that sinks open as they load the version; not with `delta`
        encodes: by name, float32 [], the factors of weights whose format has a global scale; see `quantize_blockwise`
        Raises:  RefitError, with the tensor's name, on a weight that is not finite; the sinks then receive an abort
        """
        assert not delta or (self.base_version >= 0 and not direct)
        self.base_version, self.encodes = -1, encodes
        if not self.plan.serves(links, with_frozen):
            self.plan = PushPlan(links, with_frozen)
        push = Push(version, links, self.plan)
        if delta or keep:
            regions = {(name, piece.part.region) for name, pieces in push.pieces.items() for piece in pieces}
            self.base = {key: base for key, base in self.base.items() if key in regions}
        else:
            self.base = {}
        try:
            if direct:
                push.wait_for_places()
            for name, weight in push.time_export(weights):
                for piece in push.pieces.pop(name, ()):
                    values = piece.cut.values(weight, self.parts[name], piece.part.region)
                    if delta and push.takes_delta(piece) and (piece.part.name, piece.part.region) in self.base:
                        self._send_delta(push, piece, values, digests)
                    else:
                        self._send_full(push, piece, values, keep, digests)
            assert not push.pieces, f"the trainer did not hand out {sorted(push.pieces)[0]}"
            push.finish()
            if keep and not push.report.failed:
                self.base_version = version
        except NonFiniteError as error:
            reason = f"refit {version}: {error}; training diverged"
            push.finish(reason)
            raise RefitError(reason) from None
        finally:
            push.writers.clear()  # they refer to `push`, and a closed link must not wait for Python's collector
            if self.base_version < 0:
                self.base = {}
        push.report.base_nbytes = sum(base.nbytes for base in self.base.values())
        return push.report

    def _send_full(self, push: Push, piece: Piece, values: Values, keep: bool, digests: bool) -> None:
        part = piece.part
        if (target := push.target(piece)) is None:
            return
        device, filled = values.device, target
        if device != target.content.data.device:
            payload = torch.empty(part.nbytes, dtype=torch.uint8, device=device)
            filled = Target(target.link, Content.of(part, payload), payload)
        with push.time_quantization(part):
            self._quantize(push, part, values, filled.content)
            if filled is not target:
                target.copy_(filled)
        with push.report.time_stage("encode"):
            digest = push.checks.take_digest(filled.content) if digests else PendingDigest()
            if keep and part.data_bytes >= MIN_DELTA_BYTES and not part.is_frozen:
                base = self._base_of(part, device)
                Target(target.link, Content.of(part, base), base).copy_(filled)
        push.add_whole(piece, target, digest)

    def _send_delta(self, push: Push, piece: Piece, values: Values, digests: bool) -> None:
        part, base = piece.part, self._base_of(piece.part, values.device)
        content = Content.of(part, base)
        with push.time_quantization(part):
            delta = self._update(push, part, values, content)
        with push.report.time_stage("encode"):
            digest = push.checks.take_digest(content) if digests else PendingDigest()
            message = delta.encode() if delta is not None else b""
        if delta is None or len(message) >= part.data_bytes // 2:
            if (entry := push.reserve(piece, part.nbytes)) is not None:
                push.add(piece, entry.copy_(base), "full", digest)
        elif (entry := push.reserve(piece, part.scale_bytes + len(message))) is not None:
            entry[: part.scale_bytes] = base[: part.scale_bytes]
            entry[part.scale_bytes :] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            push.add(piece, entry, "delta", digest)

    def _quantize(self, push: Push, part: TensorPart, values: Values, content: Content) -> None:
        """Write the values to the content: FP8 is copied, a part that is FP8 is quantized, others are converted."""
        if content.scale_inv is None:
            if isinstance(values, Matrices):
                copy_matrices(content.data, values.tensors)
            else:
                assert isinstance(values, Tensor)
                content.data.view(values.shape).copy_(values)
            push.check_finite(part, content.data)
            return
        if isinstance(values, QuantizedMatrices):
            values.copy_to(content.as_block_scaled(part))
            push.check_codes(part, content.as_block_scaled(part))
            return
        out = as_block_scaled(tuple(values.shape), part, content)
        if isinstance(values, BlockScaled):
            out.data.view(torch.uint8).copy_(values.data.view(torch.uint8))
            out.scale_inv.view(torch.uint8).copy_(values.scale_inv.view(torch.uint8))
            if out.global_scale is not None and values.global_scale is not None:
                out.global_scale.copy_(values.global_scale)
            push.check_codes(part, content.as_block_scaled(part))
            return
        deferred = on_gpu(content.scale_inv)
        quantize_blockwise(values, out=out, check=not deferred, **self._rule_of(part))
        _keep_global_scale(content, out, part)
        if deferred:
            push.check_finite(part, scale_values(content.scale_inv, out.format))

    def _update(self, push: Push, part: TensorPart, values: Values, content: Content) -> Delta | None:
        """Quantize over the content that was sent last, and return the changes; None if they are too many."""
        if content.scale_inv is not None and isinstance(values, Tensor | Matrices):
            out = as_block_scaled(tuple(values.shape), part, content)
            delta = quantize_delta(values, out.data, out=out, **self._rule_of(part))[1]
            _keep_global_scale(content, out, part)
            return delta
        if isinstance(values, Tensor | BlockScaled):
            new = values.data if isinstance(values, BlockScaled) else values.to(content.data.dtype)
            delta = Delta.between(bytes_of(content.data), bytes_of(new))
            self._quantize(push, part, values, content)
            return delta
        old = bytes_of(content.data).clone()
        self._quantize(push, part, values, content)
        return Delta.between(old, bytes_of(content.data))

    def _rule_of(self, part: TensorPart) -> dict[str, Any]:
        """Return the arguments by which the quantizer treats a part."""
        return {"format": part.format, "scale_format": self.scale_format, "encode": self._encode_of(part)}

    def _encode_of(self, part: TensorPart) -> Tensor | None:
        """Return the factor of the part's global scale, of each matrix of a part of a stack; None for the default."""
        if not self.encodes or part.format is None or not part.format.has_global:
            return None
        if not part.is_stack:
            return self.encodes.get(part.name)
        names = (expert_name(part.name, expert) for expert in range(*part.region[0]))
        factors = [self.encodes.get(name) for name in names]
        known = [factor for factor in factors if factor is not None]
        return torch.stack(known) if len(known) == len(factors) else None

    def _base_of(self, part: TensorPart, device: torch.device) -> Tensor:
        """Return the memory, uint8 [part.nbytes] on the weights' device, for the bytes that are sent of a piece."""
        key = part.name, part.region
        if key not in self.base:
            self.base[key] = torch.empty(part.nbytes, dtype=torch.uint8, device=device)
        return self.base[key]


def _keep_global_scale(content: Content, quantized: BlockScaled, part: TensorPart) -> None:
    """Store the global scale of a stack that is one matrix of HF's, which `as_block_scaled` does not view."""
    scale, stored = quantized.global_scale, content.global_scale
    if scale is not None and stored is not None and quantized.data.dim() > len(part.size):
        stored.copy_(scale[:1])
