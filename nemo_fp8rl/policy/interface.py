"""The interface of a training policy, as the loop uses it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, Self

from torch import Tensor

from nemo_fp8rl.batch import LossTotals, RolloutBatch, SequenceBatch
from nemo_fp8rl.common.errors import StepRefused
from nemo_fp8rl.ops.alignment import Alignment
from nemo_fp8rl.refit.interface import WeightSource

Loss = Callable[[Tensor, Any, LossTotals, Tensor | None], tuple[Tensor, dict[str, float]]]
"""(next_token_logprobs float32 [B, T-1], microbatch, totals of the optimizer step, the log-probs without top-k and
top-p or None) -> (loss, metrics). The microbatch is of the stage that `Policy.train_step` was given.
"""

SHARED_FOLDER_HINT = "checkpoints need a folder that all nodes share (checkpointing.checkpoint_dir)"


class DivergenceError(StepRefused):
    """The gradient or the loss of an optimizer step is not finite."""


@dataclass(frozen=True)
class PolicyDescription:
    """The ranks' choices for their machines, in words for people. Each field has the ranks' distinct values.

    kernels:           the kernels that multiply FP8 layers; empty without FP8 layers
    quantizers:        what quantizes weights for a refit; empty without FP8 engines
    alignments:        `nemo_fp8rl.align` as resolved (`ops.alignment.choose_alignment`)
    cache_roundings:   how attention rounds the keys and values of an FP8 KV cache; empty where it does not
    instruction_sets:  `machine.instructions` of the ranks' machines; "" for a CPU without AVX-512
    fingerprint:       digests of the operations shared with the engines (`ops.fingerprint`); empty without such
    optimizer_states:  dtypes of masters and moments; empty where all are float32 by default
    """

    kernels: frozenset[str]
    quantizers: frozenset[str]
    alignments: frozenset[Alignment]
    cache_roundings: frozenset[str]
    instruction_sets: frozenset[str]
    fingerprint: frozenset[tuple[str, str]] = frozenset()
    optimizer_states: frozenset[str] = frozenset()

    @property
    def is_aligned(self) -> bool:
        """True if every rank rounds as the engines do."""
        return "none" not in self.alignments

    @classmethod
    def union(cls, ranks: Iterable[Self]) -> Self:
        """Return the values of all ranks, field by field."""
        descriptions = list(ranks)
        names = [field.name for field in fields(cls)]
        return cls(**{name: frozenset().union(*(getattr(d, name) for d in descriptions)) for name in names})


class Policy(WeightSource, Protocol):
    def logprobs(self, batch: SequenceBatch) -> Tensor:
        """Return float32 [B, T]: the log-probability of input_ids[:, t] given the tokens before it; 0 at position 0."""
        ...

    def logprobs_and_sharpness(self, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        """Return `logprobs`, the same to the bit, and the sharpness of each token (`policy.sharpness`), alike [B, T].

        Its box has the size nemo_fp8rl.sharpness.epsilon.
        """
        ...

    def reference_logprobs(self, batch: SequenceBatch) -> Tensor:
        """Return `logprobs` under the weights of policy.model_name.

        Available only where loss_fn.reference_policy_kl_penalty is above 0.
        """
        ...

    def train_step(self, batch: RolloutBatch, loss: Loss, schedules: bool = True) -> dict[str, float]:
        """Take one optimizer step on the whole batch and return the loss's metrics, grad_norm, lr and grad_bytes.

        schedules:  True advances the learning-rate schedule before the step, so that step n (from 1) has rate n;
                    False leaves that to `step_schedule`
        Raises:     DivergenceError; weights, optimizer and schedule are then as before the call
        """
        ...

    def step_schedule(self) -> None:
        """Advance the learning-rate schedule by one step."""
        ...

    def prepare_for_training(self) -> None:
        """Bring back the memory that the two methods below gave away."""
        ...

    def offload_before_refit(self) -> None:
        """Free the memory that only training needs, until `prepare_for_training`: gradients and optimizer state."""
        ...

    def offload_after_refit(self) -> int:
        """Free the memory of the parameters as well, until something reads them.

        Returns the bytes that are away, on the rank with the most.
        """
        ...

    def calibrate_kv(self, batch: SequenceBatch) -> None:
        """Compute the FP8 KV cache's scales for the next refit, from the present weights on these sequences."""
        ...

    def weight_error(self) -> dict[str, float]:
        """Return the distance of the engine's weights from the trainer's (`algorithms.quantization_error`)."""
        ...

    def describe(self) -> PolicyDescription:
        """Return what the ranks chose for their machines."""
        ...

    def save(self, folder: Path, optimizer: bool = True) -> None:
        """Write `weights/` (an HF checkpoint), `optimizer/` and the FP8 cache's scales into an existing folder.

        A policy that trains adapters writes `adapter/` (the format of HF's `peft`) in place of `weights/`.
        """
        ...

    def load(self, folder: Path) -> None:
        """Restore weights, optimizer and schedule from a folder that `save` wrote, to the bit."""
        ...

    def shutdown(self) -> None: ...
