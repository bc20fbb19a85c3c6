"""The class that NeMo RL builds on both sides of a refit: `policy.generation.refit_transport` names it.

NeMo RL's main has the interface (`nemo_rl/utils/checkpoint_engines/base.py`); v0.7.x has not.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Generator, Iterator
from dataclasses import asdict
from typing import Any

import torch
from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine
from torch import Tensor

from nemo_fp8rl.nemo_rl.refit_transport.policy_side import PolicySide
from nemo_fp8rl.nemo_rl.refit_transport.rollout_side import RolloutSide
from nemo_fp8rl.nemo_rl.refit_transport.settings import read_settings
from nemo_fp8rl.nemo_rl.refit_transport.topology import Peer, choose_sources, split_peers
from nemo_fp8rl.refit.transport.handshake import Listener
from nemo_fp8rl.refit.transport.shared_memory import domain


class Fp8CheckpointEngine(CheckpointEngine):
    """FP8 bytes and scales with digests, versions, deltas and retries, between NeMo RL's own workers.

    bucket_size: bytes that NeMo RL grants for a bucket
    settings:    the block of the recipe (`settings.Settings`)
    Raises:      UserError for a setting that is unknown or out of range
    """

    def __init__(self, bucket_size: int, **settings: Any) -> None:
        self.settings = read_settings(settings)
        self.policy = PolicySide(self.settings, min(bucket_size, self.settings.bucket_bytes))
        self.rollout = RolloutSide(self.settings)
        self.token = secrets.token_hex(16)
        self.listener: Listener | None = None

    def prepare(self) -> dict[str, Any]:
        """Listen, and return what the other ranks must know of this one; the side is not known yet."""
        if self.listener is None:
            self.listener = Listener(
                self.settings.transport,
                self.settings.host or _node_address(),
                self.token,
                self.settings.timeout_seconds,
                torch.device(self.settings.device),
            )
        version = self.rollout.store.version
        return Peer(*self.listener.address, self.token, domain(), version).to_metadata()

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Take the rollout ranks to which this policy rank sends; there may be none."""
        policy, rollout = split_peers(metadata, train_world_size, rollout_world_size)
        sources = choose_sources(policy, rollout)
        assert self.listener is not None, "prepare() comes first"
        self.policy.connect(
            self.listener, [(i, peer.version) for i, peer in enumerate(rollout) if sources[i] == worker_rank]
        )

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Take the policy rank that sends to this rollout rank, and stop to listen."""
        self._stop_listening()
        policy, rollout = split_peers(metadata, train_world_size, rollout_world_size)
        self.rollout.connect(rollout_rank, policy[choose_sources(policy, rollout)[rollout_rank]])

    def finalize(self) -> None:
        """Close the links. The stored bytes stay, so that the next refit may be a delta."""
        self.policy.disconnect()
        self.rollout.disconnect()
        self._stop_listening()

    async def send_weights(self, weights: Generator[tuple[str, Tensor], None, None]) -> None:
        """Send a version; returns when every receiver of this rank has verified it. Raises as `PolicySide.send`.

        This blocks the caller's thread, in which the iterator's collectives belong.
        """
        self.policy.send(weights)

    async def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, Tensor]], None]:
        """Yield the verified tensors of a version. Raises as `RolloutSide.receive`, before the first batch."""
        batches, gpu = self.rollout.receive(), _current_gpu()
        while (batch := await asyncio.to_thread(_next_batch, batches, gpu)) is not None:
            yield batch

    def policy_metrics(self) -> dict[str, Any]:
        """Return the numbers of this rank's last refit; NeMo RL's `checkpoint_engine_rpc` reaches this method."""
        return asdict(self.policy.metrics) | {"stored_bytes": self.policy.store.nbytes}

    def _stop_listening(self) -> None:
        if self.listener is not None:
            self.listener.close()
        self.listener = None


Batch = list[tuple[str, Tensor]]


def _current_gpu() -> int | None:
    """Return this thread's GPU; other threads begin with the first one."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def _next_batch(batches: Iterator[Batch], gpu: int | None) -> Batch | None:
    """Return the next batch, None after the last one. It runs in a thread, so that the caller's event loop goes on."""
    if gpu is not None:
        torch.cuda.set_device(gpu)
    return next(batches, None)


def _node_address() -> str:
    """Return the address of this Ray node, or the loopback without Ray."""
    import ray

    return str(ray.util.get_node_ip_address()) if ray.is_initialized() else "127.0.0.1"
