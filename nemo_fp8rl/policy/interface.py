"""What the loop asks of a training policy."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol, Self

from torch import Tensor

from nemo_fp8rl.batch import TrainBatch
from nemo_fp8rl.common.errors import StepRefused
from nemo_fp8rl.refit.bridge import WeightSource

Loss = Callable[[Tensor, TrainBatch, Tensor, Tensor], tuple[Tensor, dict[str, float]]]
"""(next_token_logprobs [B, T-1], batch, global_valid_seqs, global_valid_toks) -> (loss, metrics)."""

SHARED = "checkpoints need a folder that all nodes share (checkpointing.checkpoint_dir)"


class Diverged(StepRefused):
    """An optimizer step's gradient or loss is not finite."""


@dataclass(frozen=True)
class PolicyDescription:
    """What the training ranks chose for their machines, in words for people. Each field has the ranks' distinct values.

    kernels:           the kernels that multiply FP8 layers; empty without FP8 layers
    quantizers:        what quantizes weights for a refit; empty without FP8 engines
    alignments:        `nemo_fp8rl.align` as resolved: where the non-linear parts of the model round
    cache_roundings:   how attention rounds the keys and values of an FP8 KV cache; empty where it does not
    instruction_sets:  `machine.instructions` of the ranks' machines; "" for a CPU without AVX-512
    """

    kernels: frozenset[str]
    quantizers: frozenset[str]
    alignments: frozenset[str]
    cache_roundings: frozenset[str]
    instruction_sets: frozenset[str]

    @classmethod
    def union(cls, ranks: Iterable[Self]) -> Self:
        """Return the values of all ranks, field by field."""
        descriptions = list(ranks)
        names = [field.name for field in fields(cls)]
        return cls(**{name: frozenset().union(*(getattr(d, name) for d in descriptions)) for name in names})


class Policy(WeightSource, Protocol):
    def logprobs(self, batch: TrainBatch) -> Tensor:
        """float32 [B, T]: log-probability of input_ids[:, t] given what is before it, position 0 is 0."""
        ...

    def reference_logprobs(self, batch: TrainBatch) -> Tensor:
        """The same under the weights that the run began with; only where loss_fn.reference_policy_kl_penalty is set."""
        ...

    def train_step(self, batch: TrainBatch, loss: Loss, schedules: bool = True) -> dict[str, float]:
        """One optimizer step on the whole batch; the loss's metrics, grad_norm and lr.

        schedules: the learning rate's schedule goes on before it, so that it has the rate of its number, from 1; else
        `step_schedule` says when. Raises Diverged, with weights, optimizer and schedule as before.
        """
        ...

    def step_schedule(self) -> None:
        """The next learning rate."""
        ...

    def prepare_for_training(self) -> None:
        """Bring back what the two below gave away."""
        ...

    def offload_before_refit(self) -> None:
        """Give memory back that only training needs, gradients and the optimizer's state, until it is prepared."""
        ...

    def offload_after_refit(self) -> int:
        """The parameters' as well, until something reads them; bytes on the rank that has given most."""
        ...

    def calibrate_kv(self, batch: TrainBatch) -> None:
        """Scales of the FP8 KV cache for the next refit, from the present weights on these sequences."""
        ...

    def weight_error(self) -> dict[str, float]:
        """How far the engine's weights are from the trainer's (`algorithms.quantization_error`)."""
        ...

    def describe(self) -> PolicyDescription:
        """Return what the ranks chose for their machines."""
        ...

    def save(self, folder: Path, optimizer: bool = True) -> None:
        """Write `weights/` (an HF checkpoint), `optimizer/`, and an FP8 cache's scales into an existing folder."""
        ...

    def load(self, folder: Path) -> None:
        """Continue from a folder that `save` wrote: weights, optimizer and schedule, to the bit."""
        ...

    def shutdown(self) -> None: ...
