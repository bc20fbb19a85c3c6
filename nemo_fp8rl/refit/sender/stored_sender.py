"""The sender of one engine rank: passes on the weights that lie in its memory, with the digests that came with them.

The trainer's digests travel with the bytes, so that an engine which gets its weights from another one verifies them
against what the trainer sent, and damage in the other one's memory is found as well. A delta is passed on as it came.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.common.region import Region
from nemo_fp8rl.refit.deferred_checks import PendingDigest
from nemo_fp8rl.refit.manifest import TensorPart
from nemo_fp8rl.refit.message import Content, Encoding
from nemo_fp8rl.refit.reports import LinkId, SendReport
from nemo_fp8rl.refit.sender.push import Link, Piece, Push, PushPlan

PieceKey = tuple[str, Region]
"""The name and the region of a piece."""


class StoredSender:
    """Sends what an engine rank stores to ranks that store the same. The weights must not change meanwhile."""

    owner = "engine"

    def __init__(self) -> None:
        self.plan = PushPlan()

    @torch.no_grad()
    def send(
        self,
        weights: Iterable[tuple[TensorPart, Content]],
        version: int,
        links: Mapping[LinkId, Link],
        *,
        digests: Mapping[PieceKey, str] = MappingProxyType({}),
        deltas: Mapping[PieceKey, tuple[Encoding, Tensor]] = MappingProxyType({}),
        with_frozen: bool = True,
        direct: bool = False,
        **_: Any,
    ) -> SendReport:
        """Send every link its pieces of these weights. A link that breaks is left out of the rest and reported.

        weights: the parts that the rank stores, and views of each in memory
        digests: by piece, what the trainer sent; empty where nothing is verified
        deltas:  by piece, (encoding, payload) of the delta as it came; every sink has the version before it
        with_frozen: send tensors that never change; every sink has them otherwise
        direct:  write pieces into the places that sinks open as they load the version; not with deltas
        """
        if not self.plan.serves(links, with_frozen):
            self.plan = PushPlan(links, with_frozen)
        push = Push(version, links, self.plan)
        try:
            if direct:
                push.wait_for_places()
            for part, content in weights:
                for piece in push.pieces.pop(part.name, ()):
                    key = part.name, piece.part.region
                    stored = content.cut(part, piece.part.region)
                    self._send_piece(push, piece, stored, PendingDigest(digests.get(key, "")), deltas.get(key))
            assert not push.pieces, f"the engine did not hand out {sorted(push.pieces)[0]}"
            push.finish()
        finally:
            push.writers.clear()  # they refer to `push`, and a closed link must not wait for Python's collector
        return push.report

    def _send_piece(
        self, push: Push, piece: Piece, stored: Content, digest: PendingDigest, delta: tuple[Encoding, Tensor] | None
    ) -> None:
        if delta is None:
            if (target := push.target(piece)) is not None:
                with push.report.time_stage("encode"):
                    target.content.copy_(stored)
                push.add_whole(piece, target, digest)
            return
        encoding, payload = delta
        if (entry := push.reserve(piece, payload.nbytes)) is not None:
            push.add(piece, entry.copy_(payload), encoding, digest)
