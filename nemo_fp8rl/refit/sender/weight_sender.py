"""The sender of one trainer rank: quantizes the rank's weights once and sends every engine rank the pieces it stores.

Blocks are quantized independently of each other, so a piece has the same bytes whichever region of its tensor is cut
out. A piece is quantized, or copied where the rank has FP8, directly into one link's bucket, and copied from there into
the buckets of other engines. For deltas a rank keeps the bytes that it sent last.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.common.region import Region
from nemo_fp8rl.fp8 import BlockScaled, NonFiniteError, ScaleFormat, quantize_blockwise, quantize_delta
from nemo_fp8rl.fp8.block_scaled import scale_values
from nemo_fp8rl.fp8.delta import Delta
from nemo_fp8rl.refit.deferred_checks import PendingDigest, on_gpu
from nemo_fp8rl.refit.digest import bytes_of
from nemo_fp8rl.refit.expert_stacks import Weight, expert_name
from nemo_fp8rl.refit.manifest import RefitError, TensorPart
from nemo_fp8rl.refit.message import Content
from nemo_fp8rl.refit.reports import LinkId, SendReport
from nemo_fp8rl.refit.sender.push import Link, Piece, Push
from nemo_fp8rl.refit.sender.tile_deltas import TileDeltas, can_pack, empty_payload
from nemo_fp8rl.refit.sender.weight_regions import as_block_scaled, cut_weight

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
        encodes: by name, float32 [], the factors of weights whose format has a global scale; see `quantize_blockwise`
        Raises:  RefitError, with the tensor's name, on a weight that is not finite; the sinks then receive an abort
        """
        assert not delta or self.base_version >= 0
        self.base_version, self.encodes = -1, encodes
        push = Push(version, links, with_frozen)
        tiles = TileDeltas(push)
        if delta or keep:
            regions = {(name, piece.part.region) for name, pieces in push.pieces.items() for piece in pieces}
            self.base = {key: base for key, base in self.base.items() if key in regions}
        else:
            self.base = {}
        try:
            for name, weight in push.time_export(weights):
                for piece in push.pieces.pop(name, ()):
                    values = cut_weight(weight, self.parts[name], piece.part.region)
                    if delta and not piece.full_only and (piece.part.name, piece.part.region) in self.base:
                        self._send_delta(push, tiles, piece, values, digests)
                    else:
                        self._send_full(push, piece, values, keep, digests)
            assert not push.pieces, f"the trainer did not hand out {sorted(push.pieces)[0]}"
            tiles.flush()
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

    def _send_full(self, push: Push, piece: Piece, values: Weight, keep: bool, digests: bool) -> None:
        part = piece.part
        if (entry := push.reserve(piece, part.nbytes)) is None:
            return
        device = _device_of(values)
        payload = entry if device == entry.device else torch.empty_like(entry, device=device)
        content = Content.of(part, payload)
        with push.time_quantization(part):
            self._quantize(push, part, values, content)
            if payload is not entry:
                entry.copy_(payload)
        with push.report.time_stage("encode"):
            digest = push.checks.take_digest(content) if digests else PendingDigest()
            if keep and part.data_bytes >= MIN_DELTA_BYTES and not part.is_frozen:
                self._base_of(part, device).copy_(payload)
        push.add(piece, entry, "full", digest)

    def _send_delta(self, push: Push, tiles: TileDeltas, piece: Piece, values: Weight, digests: bool) -> None:
        part, base = piece.part, self._base_of(piece.part, _device_of(values))
        if can_pack(part, base):
            self._pack_delta(push, tiles, piece, values, digests)
            return
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

    def _pack_delta(self, push: Push, tiles: TileDeltas, piece: Piece, values: Weight, digests: bool) -> None:
        """Have the GPU pack what changed; the new bytes become the base, whose memory is free for the next piece."""
        part, base = piece.part, self._base_of(piece.part, _device_of(values))
        payload = empty_payload(part, base.device)
        content = Content.of(part, payload)
        with push.time_quantization(part):
            self._quantize(push, part, values, content)
        with push.report.time_stage("encode"):
            digest = push.checks.take_digest(content) if digests else PendingDigest()
            tiles.add(piece, base, payload, digest)
        self.base[part.name, part.region] = payload
        if tiles.is_full:
            tiles.flush()

    def _quantize(self, push: Push, part: TensorPart, values: Weight, content: Content) -> None:
        """Write the values to the content: FP8 is copied, a part that is FP8 is quantized, others are converted."""
        matrices = values if isinstance(values, list) else [values]
        if content.scale_inv is None:
            targets = list(content.data) if isinstance(values, list) else [content.data]
            for target, tensor in zip(targets, matrices, strict=True):
                assert isinstance(tensor, Tensor)
                target.view(tensor.shape).copy_(tensor)
            push.check_finite(part, content.data)
            return
        places = zip(matrices, _matrices(part, content), strict=True)
        outs = [as_block_scaled(tuple(matrix.shape), *place) for matrix, place in places]
        if isinstance(matrices[0], BlockScaled):
            for out, matrix in zip(outs, matrices, strict=True):
                assert isinstance(matrix, BlockScaled)
                out.data.view(torch.uint8).copy_(matrix.data.view(torch.uint8))
                out.scale_inv.view(torch.uint8).copy_(matrix.scale_inv.view(torch.uint8))
                if out.global_scale is not None and matrix.global_scale is not None:
                    out.global_scale.copy_(matrix.global_scale)
            push.check_codes(part, content.as_block_scaled(part))
            return
        deferred = on_gpu(content.scale_inv)
        for i, (out, matrix) in enumerate(zip(outs, matrices, strict=True)):
            assert isinstance(matrix, Tensor)
            quantize_blockwise(matrix, out=out, check=not deferred, **self._rule_of(part, i))
        if not isinstance(values, list):
            _keep_global_scale(content, outs[0])
        if deferred:
            push.check_finite(part, scale_values(content.scale_inv, outs[0].format))

    def _update(self, push: Push, part: TensorPart, values: Weight, content: Content) -> Delta | None:
        """Quantize over the content that was sent last, and return the changes; None if they are too many."""
        if isinstance(values, list):
            old = bytes_of(content.data).clone()
            self._quantize(push, part, values, content)
            return Delta.between(old, bytes_of(content.data))
        if content.scale_inv is not None and not isinstance(values, BlockScaled):
            out = as_block_scaled(tuple(values.shape), part, content)
            delta = quantize_delta(values, out.data, out=out, **self._rule_of(part))[1]
            _keep_global_scale(content, out)
            return delta
        new = values.data if isinstance(values, BlockScaled) else values.to(content.data.dtype)
        delta = Delta.between(bytes_of(content.data), bytes_of(new))
        self._quantize(push, part, values, content)
        return delta

    def _rule_of(self, part: TensorPart, matrix: int = 0) -> dict[str, Any]:
        """Return the arguments by which the quantizer treats a part, or a matrix of a part of a stack."""
        name = expert_name(part.name, part.region[0][0] + matrix) if part.is_stack else part.name
        return {"format": part.format, "scale_format": self.scale_format, "encode": self.encodes.get(name)}

    def _base_of(self, part: TensorPart, device: torch.device) -> Tensor:
        """Return the memory, uint8 [part.nbytes] on the weights' device, for the bytes that are sent of a piece."""
        key = part.name, part.region
        if key not in self.base:
            self.base[key] = empty_payload(part, device)
        return self.base[key]


def _device_of(values: Weight) -> torch.device:
    return (values[0] if isinstance(values, list) else values).device


def _matrices(part: TensorPart, content: Content) -> list[tuple[TensorPart, Content]]:
    """Return (part, content) of each matrix of a part of a stack; of any other part, of itself."""
    if not part.is_stack:
        return [(part, content)]
    scales, factors = content.scale_inv, content.global_scale
    assert scales is not None
    return [
        (part.matrix, Content(data, scales[i], None if factors is None else factors[i : i + 1]))
        for i, data in enumerate(content.data)
    ]


def _keep_global_scale(content: Content, quantized: BlockScaled) -> None:
    """Store the global scale of a stack, which `as_block_scaled` does not view."""
    if content.global_scale is not None and quantized.global_scale is not None and quantized.data.dim() > 2:
        content.global_scale.copy_(quantized.global_scale[:1])
