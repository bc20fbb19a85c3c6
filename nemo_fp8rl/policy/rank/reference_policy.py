"""The reference policy of a rank: the log-probs under the weights of policy.model_name."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from nemo_fp8rl.batch import SequenceBatch
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.policy.layers.kv_cache import TrainerKvCache
from nemo_fp8rl.policy.layers.low_rank import AdapterState
from nemo_fp8rl.policy.rank.offload import Offload, copy_to_host
from nemo_fp8rl.policy.weights.rank_weights import RankWeights


class ReferencePolicy:
    """The first weights of a rank, kept on the host; with adapters they are the base, which is there.

    Neither the engine's choice of experts nor its FP8 cache has a part in it, because both follow the policy. A KV
    window has: it says what a token sees, and the KL term compares two policies of one context.

    adapters:  None without
    kv_cache:  None without an FP8 cache
    """

    def __init__(
        self,
        cfg: Config,
        weights: RankWeights,
        offload: Offload,
        adapters: AdapterState | None,
        kv_cache: TrainerKvCache | None,
    ) -> None:
        self.weights, self.offload, self.adapters, self.kv_cache = weights, offload, adapters, kv_cache
        self.first_weights: list[Tensor] = []
        # where gradients and optimizer state are not offloaded, a GPU may have no room for a second copy
        self.backup_device = None if cfg.policy.megatron_cfg.offload_between_phases else "cpu"
        if cfg.loss_fn.reference_policy_kl_penalty and adapters is None:  # on the host: it is read only once per step
            self.first_weights = [copy_to_host(tensor) for tensor in weights.storage_tensors()]

    def logprobs(self, batch: SequenceBatch, compute: Callable[[SequenceBatch], Tensor]) -> Tensor:
        """Return the log-probs of the tokens, float32 [B, T].

        compute:  computes them with the weights that the rank then has
        """
        tokens = SequenceBatch(
            input_ids=batch.input_ids, input_lengths=batch.input_lengths, prompt_lengths=batch.prompt_lengths
        )
        with self._cache_in_full_precision(), self._base_alone() if self.adapters else self._first_weights():
            return compute(tokens)

    def _cache_in_full_precision(self) -> AbstractContextManager[None]:
        return self.kv_cache.without_rounding() if self.kv_cache is not None else nullcontext()

    @contextmanager
    def _base_alone(self) -> Iterator[None]:
        assert self.adapters is not None
        self.adapters.is_enabled = False
        try:
            yield
        finally:
            self.adapters.is_enabled = True

    @contextmanager
    def _first_weights(self) -> Iterator[None]:
        self.offload.restore_parameters()
        present = self.weights.storage_tensors()
        backup = [tensor.to(self.backup_device, copy=True) for tensor in present]
        try:
            torch._foreach_copy_(present, self.first_weights)  # in place: they are views of Megatron's buffers
            yield
        finally:
            torch._foreach_copy_(present, backup)
