"""The refit bridge with the interface of NeMo RL's WeightSynchronizer."""

from contextlib import nullcontext
from typing import Any

from nemo_rl.weight_sync.interfaces import WeightSynchronizer

from nemo_fp8rl.assemble import refit_or_stop
from nemo_fp8rl.nemo_rl.adapters.megatron_policy import MegatronFp8Policy
from nemo_fp8rl.nemo_rl.adapters.vllm_generation import VllmFp8Generation
from nemo_fp8rl.refit.bridge import RefitBridge


class Fp8WeightSynchronizer(WeightSynchronizer):
    """Refit the engines: quantize the weights once, send them from trainer ranks to engines, verify, then commit."""

    def __init__(self, policy: MegatronFp8Policy, generation: VllmFp8Generation, bridge: RefitBridge) -> None:
        self.policy, self.generation, self.bridge = policy, generation, bridge
        self.stale = True

    def sync_weights(self, *, timer: Any = None, kv_scales: Any = None) -> dict[str, float]:
        """Refit, and return the metrics of the refit without their prefix `refit/`.

        kv_scales is not read: the trainer's ranks send the scales of the KV cache with the weights.
        Raises: UserError if the refit fails
        """
        self.policy.offload_before_refit()
        self.generation.prepare_for_generation()
        timed = timer.time("prepare_for_generation/transfer_and_update_weights") if timer else nullcontext()
        with timed:
            report = refit_or_stop(self.bridge, "start the run again, which goes on from its last checkpoint")
        self.policy.offload_after_refit()
        self.stale = False
        return {name.removeprefix("refit/"): value for name, value in report.metrics().items()}

    @property
    def is_stale(self) -> bool:
        return self.stale

    def mark_stale(self) -> None:
        self.stale = True

    def init_communicator(self) -> None:
        """Do nothing: the bridge links trainer and engine at its first refit."""

    def shutdown(self) -> None:
        """Do nothing: links end with their ranks and engines."""
