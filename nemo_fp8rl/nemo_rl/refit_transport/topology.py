"""Which policy rank sends to which rollout rank, from the metadata that NeMo RL collects from every `prepare`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nemo_fp8rl.refit.manifest import RefitError


@dataclass(frozen=True)
class Peer:
    """What a rank tells the others.

    host, port: where it listens; only policy ranks are called
    token:      what a caller must prove to know
    domain:     its machine (`shared_memory.domain`)
    version:    name of the version that it stores; empty for none
    """

    host: str
    port: int
    token: str
    domain: str
    version: str

    def to_metadata(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, metadata: Any) -> "Peer":
        """Raises RefitError for what is not the metadata of this class."""
        try:
            return cls(**{name: metadata[name] for name in cls.__dataclass_fields__})
        except (TypeError, KeyError) as error:
            raise RefitError(
                f"the other side's metadata is not of this checkpoint engine ({error!r}): both sides need the same one"
            ) from None


def split_peers(metadata: Sequence[Any], policy_ranks: int, rollout_ranks: int) -> tuple[list[Peer], list[Peer]]:
    """Return the peers of the policy and of the rollout, in the order of their ranks.

    Raises: RefitError unless there are as many as NeMo RL says, and at least one of each
    """
    if len(metadata) != policy_ranks + rollout_ranks or not policy_ranks or not rollout_ranks:
        raise RefitError(f"{len(metadata)} ranks instead of {policy_ranks} policy and {rollout_ranks} rollout ranks")
    peers = [Peer.of(entry) for entry in metadata]
    return peers[:policy_ranks], peers[policy_ranks:]


def choose_sources(policy: Sequence[Peer], rollout: Sequence[Peer]) -> list[int]:
    """Return the policy rank that sends to each rollout rank.

    It is one of the same machine if there is one there. Rollout ranks with the same candidates share them out.
    """
    counts: dict[tuple[int, ...], int] = {}
    sources = []
    for peer in rollout:
        near = tuple(rank for rank, source in enumerate(policy) if source.domain == peer.domain)
        candidates = near or tuple(range(len(policy)))
        turn = counts[candidates] = counts.get(candidates, -1) + 1
        sources.append(candidates[turn % len(candidates)])
    return sources
