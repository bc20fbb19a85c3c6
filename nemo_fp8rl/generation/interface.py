"""The interface of a generation backend to the training loop."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol, Self

from nemo_fp8rl.batch import Completion
from nemo_fp8rl.config.generation_schema import GenerationConfig
from nemo_fp8rl.refit.interface import WeightSink

SECONDS_A_TOKEN = 0.1
"""Seconds per token of a full batch. An engine counts as hung after these and cluster.engine_timeout_seconds."""


@dataclass(frozen=True)
class Sampling:
    """Parameters of sampling.

    Log-probs belong to the distribution that is sampled from: at this temperature, over the tokens that top_p and top_k
    leave. Each sample of a prompt has its own seed, derived from the prompt's seed.

    num_generations:  samples per prompt
    max_new_tokens:   tokens of an answer, at most
    temperature:      0 is greedy
    stop_token_ids:   tokens that end an answer
    stop_strings:     texts that end an answer; they need the engine's tokenizer
    top_k:            None: all tokens
    logprobs:         return log-probs with the tokens
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
        """Return the sampling of the block policy.generation."""
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
    """Return the seed of a prompt, which is the same in every process and in a resumed run.

    It depends on the position, not on the prompt: a step that crosses the border of an epoch may contain a prompt
    twice, and each occurrence has its own samples.
    """
    return random.Random(f"{seed}/{step}/{position}").getrandbits(31)


@dataclass(frozen=True)
class EngineDescription:
    """The choices of the engines for their machines, in words for people. Each field has the engines' distinct values.

    kernels:           what multiplies FP8 layers, vLLM's attention backend and the mode of its CUDA graphs
    instruction_sets:  `machine.instructions` of the engines' machines
    fingerprint:       digests of the operations shared with the trainer (`ops.fingerprint`); empty without such
    """

    kernels: frozenset[str]
    instruction_sets: frozenset[str]
    fingerprint: frozenset[tuple[str, str]] = frozenset()

    @classmethod
    def union(cls, engines: Iterable[Self]) -> Self:
        """Return the values of all engines, field by field."""
        descriptions = list(engines)
        names = [field.name for field in fields(cls)]
        return cls(**{name: frozenset().union(*(getattr(d, name) for d in descriptions)) for name in names})


class Generation(WeightSink, Protocol):
    def generate(
        self,
        prompts: Sequence[tuple[int, ...]],
        seeds: Sequence[int],
        sampling: Sampling,
        answered: Callable[[int], None] = ...,
    ) -> list[list[Completion]]:
        """Return the completions of each prompt, in order. Equal seeds, prompts and weights give equal completions.

        answered:  is called after each prompt with the number of prompts answered so far
        """
        ...

    def finish_generation(self) -> None:
        """Give memory back between phases, as much as policy.generation.vllm_cfg.sleep_level says."""
        ...

    def prepare_for_generation(self) -> None:
        """Take the memory again that `finish_generation` gave back; before a refit or a generation."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return how often, since the start, engines were started again and prompts asked again."""
        ...

    def take_cache_metrics(self) -> dict[str, float]:
        """Return the blocks of a windowed cache that requests took since the last call, where they are known."""
        ...

    def describe(self) -> EngineDescription:
        """Return what the engines chose for their machines."""
        ...

    def shutdown(self) -> None: ...
