"""The refit bridge behind NeMo RL's WeightSynchronizer."""

from contextlib import nullcontext
from typing import Any

from nemo_rl.weight_sync.interfaces import WeightSynchronizer

from nemo_fp8rl.assemble import refitted
from nemo_fp8rl.nemo_rl.adapters.megatron_policy import MegatronFp8Policy
from nemo_fp8rl.nemo_rl.adapters.vllm_generation import VllmFp8Generation
from nemo_fp8rl.refit.bridge import RefitBridge


class Fp8WeightSynchronizer(WeightSynchronizer):
    """A version of the weights, quantized once, from the trainer's ranks to the engines', verified, then committed."""

    def __init__(self, policy: MegatronFp8Policy, generation: VllmFp8Generation, bridge: RefitBridge) -> None:
        self.policy, self.generation, self.bridge = policy, generation, bridge
        self.stale = True

    def sync_weights(self, *, timer: Any = None, kv_scales: Any = None) -> dict[str, float]:
        """What the refit cost, by our metric names without their prefix. kv_scales are not read: ours ride along.

        Raises UserError where it fails.
        """
        self.policy.offload_before_refit()
        self.generation.prepare_for_generation()
        timed = timer.time("prepare_for_generation/transfer_and_update_weights") if timer else nullcontext()
        with timed:
            report = refitted(self.bridge, "start the run again, which goes on from its last checkpoint")
        self.policy.offload_after_refit()
        self.stale = False
        return {name.removeprefix("refit/"): value for name, value in report.metrics().items()}

    @property
    def is_stale(self) -> bool:
        return self.stale

    def mark_stale(self) -> None:
        self.stale = True

    def init_communicator(self) -> None:
        """Nothing: the bridge links trainer and engine at its first refit."""

    def shutdown(self) -> None:
        """Nothing: links end with the ranks and engines that hold them."""
