"""One engine rank as a source of weights for other engines: what it must keep of a load, and its links to them.

The bytes are those in vLLM's memory, so nothing is kept but digests, and, while other engines are linked, deltas. vLLM
may generate meanwhile, because it only reads its weights. A load, or sleep, ends a push first.
"""

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.refit.interface import Transport
from nemo_fp8rl.refit.manifest import RefitError, Route, TensorPart
from nemo_fp8rl.refit.message import Content, Encoding
from nemo_fp8rl.refit.receiver.piece_receiver import ReceivedPiece
from nemo_fp8rl.refit.reports import SendReport
from nemo_fp8rl.refit.sender.sending_rank import SendingRank
from nemo_fp8rl.refit.sender.stored_sender import PieceKey, StoredSender


class PeerSource:
    """The links of one engine rank to ranks of other engines, and what it passes on to them.

    device:  the device of the weights
    digests: by piece, the digest that came with it; empty where nothing is verified
    deltas:  by piece, (encoding, payload) of the delta that came with the last load, if other engines were linked then
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank: SendingRank[StoredSender] | None = None
        self.digests: dict[PieceKey, str] = {}
        self.deltas: dict[PieceKey, tuple[Encoding, Tensor]] = {}

    def begin_load(self, with_frozen: bool) -> None:
        """Forget what a load is about to replace."""
        self.stop()
        self.deltas.clear()
        if with_frozen:
            self.digests.clear()

    def record(self, item: ReceivedPiece) -> None:
        """Keep what another engine needs of a piece beyond its bytes."""
        key = item.part.name, item.part.region
        if item.digest:
            self.digests[key] = item.digest
        if item.entry is not None and self.rank is not None:
            encoding, payload = item.entry
            self.deltas[key] = encoding, payload.clone()

    def offer(
        self,
        engine: int,
        routes: Sequence[Route],
        capacities: Sequence[int],
        transport: Transport,
        host: str,
        token: str,
        timeout: float,
    ) -> list[Any]:
        """Get ready for links to an engine, and return their addresses; the arguments are those of `SendingRank`."""
        if self.rank is None:
            how: dict[str, Any] = {"transport": transport, "host": host, "token": token, "timeout": timeout}
            self.rank = SendingRank(StoredSender(), device=self.device, **how)
        self.rank.withdraw(engine)
        return self.rank.offer(engine, routes, capacities)

    def withdraw(self, engine: int) -> None:
        """Close the links to an engine; with the last one, all that links need."""
        if self.rank is None:
            return
        self.rank.withdraw(engine)
        self._close_if_unused()

    def start_push(
        self,
        contents: Sequence[tuple[TensorPart, Content]],
        version: int,
        engines: Collection[int],
        *,
        delta: bool,
        **how: Any,
    ) -> None:
        """Begin to send these weights to these engines. Raises RefitError for a piece whose digest is not known.

        delta:   the engines have the version before this one
        how:     direct and with_frozen, as in `StoredSender.send`
        """
        self.stop()
        if self.rank is None:
            raise RefitError("this engine has no link to another one")
        pieces = [part for (engine, _), route in self.rank.routes.items() if engine in engines for part in route]
        unknown = [part.name for part in pieces if (part.name, part.region) not in self.digests]
        if self.digests and unknown:
            raise RefitError(f"this engine has {unknown[0]} in other pieces than it is to pass on")
        passed: dict[str, Any] = {"digests": dict(self.digests), "deltas": self.deltas if delta else {}}
        self.rank.start(contents, version, engines, **passed, **how)

    def finish_push(self) -> SendReport:
        """Wait until everything is sent."""
        if self.rank is None or self.rank.push is None:
            raise RefitError("this engine has stopped to pass its weights on")
        try:
            return self.rank.finish()
        finally:
            self.deltas = {}
            self._close_if_unused()

    def end(self) -> None:
        """Close all links."""
        for engine in {engine for engine, _ in self.rank.routes} if self.rank is not None else ():
            self.withdraw(engine)

    def stop(self) -> None:
        """End a push in progress: its links are closed."""
        if self.rank is not None and self.rank.push is not None:
            for engine in {engine for engine, _ in self.rank.routes}:
                self.rank.withdraw(engine)
            with suppress(RefitError):
                self.rank.finish()
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self.rank is not None and not self.rank.routes and self.rank.push is None:
            self.rank.close()
            self.rank = None
