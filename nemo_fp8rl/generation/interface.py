"""What the loop asks of a generation backend."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from nemo_fp8rl.batch import Completion
from nemo_fp8rl.config.generation_schema import GenerationConfig
from nemo_fp8rl.refit.bridge import WeightSink

SECONDS_A_TOKEN = 0.1
"""Seconds a token of a full batch, beyond cluster.engine_timeout_seconds, before an engine counts as hung."""


@dataclass(frozen=True)
class Sampling:
    """How to sample. temperature 0 is greedy. Log-probs are of the distribution sampled from, at this temperature and
    of the tokens that top_p and top_k leave. Each sample of a prompt has a seed of its own, from the prompt's.
    """

    num_generations: int
    max_new_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...] = ()
    top_p: float = 1.0
    top_k: int | None = None
    logprobs: bool = True

    @classmethod
    def of_recipe(cls, cfg: GenerationConfig, num_generations: int) -> Self:
        """The sampling that policy.generation says."""
        return cls(
            num_generations=num_generations,
            max_new_tokens=cfg.max_new_tokens,
            temperature=cfg.temperature,
            stop_token_ids=cfg.stop_token_ids,
            stop_strings=cfg.stop_strings,
            top_p=cfg.top_p,
            top_k=cfg.top_k,
        )


def sample_seed(seed: int, step: int | str, position: int | str) -> int:
    """The engine's seed for a prompt of a step: the same in every process and resumed run.

    By position, not by prompt: a step across an epoch's border may hold a prompt twice, with other samples.
    """
    return random.Random(f"{seed}/{step}/{position}").getrandbits(31)


@dataclass(frozen=True)
class EngineDescription:
    """What engines chose for their machines, in words for people. Each field has the engines' distinct values.

    kernels:           what multiplies FP8 layers, vLLM's attention backend and the mode of its CUDA graphs
    instruction_sets:  `machine.instructions` of the engines' machines
    """

    kernels: frozenset[str]
    instruction_sets: frozenset[str]

    @classmethod
    def union(cls, engines: Iterable[Self]) -> Self:
        """Return the values of all engines, field by field."""
        descriptions = list(engines)
        return cls(
            frozenset().union(*(description.kernels for description in descriptions)),
            frozenset().union(*(description.instruction_sets for description in descriptions)),
        )


class Generation(WeightSink, Protocol):
    def generate(
        self,
        prompts: Sequence[tuple[int, ...]],
        seeds: Sequence[int],
        sampling: Sampling,
        answered: Callable[[int], None] = ...,
    ) -> list[list[Completion]]:
        """Each prompt's completions, in order. Equal seeds, prompts and weights give equal completions.

        answered: told after each prompt how many are answered.
        """
        ...

    def finish_generation(self) -> None:
        """Give memory back between phases, as policy.generation.vllm_cfg.sleep_level says."""
        ...

    def prepare_for_generation(self) -> None:
        """Take that memory again, before a refit or a generation."""
        ...

    def metrics(self) -> dict[str, float]:
        """Counts, since the start, of what went wrong and was made good."""
        ...

    def describe(self) -> EngineDescription:
        """Return what the engines chose for their machines."""
        ...

    def shutdown(self) -> None: ...
