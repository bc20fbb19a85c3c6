"""NeMo RL's synchronizer with reports of the checkpoint engine: its loop logs what `sync_weights` returns."""

from collections.abc import Sequence
from typing import Any

import ray
from nemo_rl.weight_sync.interfaces import WeightSynchronizer

from nemo_fp8rl.nemo_rl.refit_transport.settings import ENGINE


def report_refits(policy: Any, generation: Any) -> None:
    """Make the refits of a generation whose refit_transport is ENGINE report; any other is left as it is."""
    if generation.cfg.get("refit_transport") == ENGINE:
        generation.weight_synchronizer = ReportingSynchronizer(generation.weight_synchronizer, policy)


class ReportingSynchronizer(WeightSynchronizer):
    """Does what NeMo RL's synchronizer does, and adds the numbers of the policy ranks to what a refit returns.

    synchronizer:  NeMo RL's
    policy:        NeMo RL's policy
    """

    def __init__(self, synchronizer: Any, policy: Any) -> None:
        self.synchronizer, self.policy = synchronizer, policy

    def sync_weights(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Refit, and return the metrics of the refit, named as those of `Fp8WeightSynchronizer`."""
        metrics = self.synchronizer.sync_weights(*args, **kwargs) or {}
        futures = self.policy.worker_group.run_all_workers_single_data(
            "checkpoint_engine_rpc", checkpoint_method="policy_metrics", method_kwargs={}
        )
        return {**metrics, **merge_ranks(ray.get(futures))}

    @property
    def is_stale(self) -> bool:
        return self.synchronizer.is_stale

    def mark_stale(self) -> None:
        self.synchronizer.mark_stale()

    def init_communicator(self) -> None:
        self.synchronizer.init_communicator()

    def shutdown(self) -> None:
        self.synchronizer.shutdown()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "synchronizer":  # else a copy without state would ask for ever
            raise AttributeError(name)
        return getattr(self.synchronizer, name)


def merge_ranks(ranks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the metrics of a refit from the `policy_metrics` of all policy ranks.

    bytes, wire_over_bf16 and retries are of all links together, kept_bytes of the rank with most, delta is the share of
    receivers that got a delta, timing/refit the seconds of the slowest rank.
    """
    senders = [rank for rank in ranks if rank["deltas"] + rank["whole"]]
    reports = [rank["report"] for rank in senders]
    quantized = sum(report["quantized_bf16_nbytes"] for report in reports)
    receivers = sum(rank["deltas"] + rank["whole"] for rank in senders)
    return {
        "bytes": sum(report["nbytes"] for report in reports),
        "version": max((int(rank["version"].rpartition(":")[2]) for rank in senders), default=0),
        "delta": sum(rank["deltas"] for rank in senders) / max(receivers, 1),
        "wire_over_bf16": sum(report["quantized_nbytes"] for report in reports) / quantized if quantized else 0.0,
        "kept_bytes": max((rank["stored_bytes"] for rank in senders), default=0),
        "retries": sum(rank["retries"] for rank in senders),
        "timing/refit": max((rank["seconds"] for rank in ranks), default=0.0),
    }
