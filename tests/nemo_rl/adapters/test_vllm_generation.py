"""The seeds by which our engines answer NeMo RL's calls, with a fake in place of the engines."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_fp8rl.batch import Completion
from tests.nemo_rl import runs

pytestmark = [pytest.mark.nemo_rl, runs.needs_checkout]
PROMPTS = {"input_ids": torch.arange(8).view(4, 2) + 1, "input_lengths": torch.full((4,), 2)}


class FakeVllmGeneration:
    def __init__(self) -> None:
        self.seeds: list[list[int]] = []
        self.restarts = 0

    def metrics(self) -> dict[str, float]:
        return {"generation/engine_restarts": self.restarts}

    def generate(self, asked: Any, seeds: list[int], sampling: Any) -> list[list[Completion]]:
        self.seeds.append(seeds)
        return [[Completion((9, seed % 97), (0.0, 0.0), "stop", 0)] for seed in seeds]


def generation(engines: FakeVllmGeneration, version: int) -> Any:
    from nemo_fp8rl.nemo_rl.compat import prepare

    prepare()
    from nemo_fp8rl.nemo_rl.adapters.vllm_generation import VllmFp8Generation

    how = SimpleNamespace(stop_strings=(), max_new_tokens=4, temperature=1.0, stop_token_ids=(), top_p=1.0, top_k=None)
    how.vllm_cfg = SimpleNamespace(kv_window=None)
    cfg: Any = SimpleNamespace(
        updates_in_flight=False, grpo=SimpleNamespace(seed=42), policy=SimpleNamespace(generation=how)
    )
    made = VllmFp8Generation(engines, cfg, {}, 0)  # type: ignore[arg-type]
    made.connect_bridge(SimpleNamespace(version=version), None)  # type: ignore[arg-type]
    return made


def test_a_prompt_that_is_asked_again_of_the_same_weights_has_another_seed():
    """A validation set that repeats its prompts, in a batch a call: each repetition is a sample of its own."""
    engines = FakeVllmGeneration()
    made = generation(engines, version=3)
    for _ in range(3):
        made.generate(PROMPTS)
    made.bridge.version = 4
    made.generate(PROMPTS)
    assert len({seed for seeds in engines.seeds for seed in seeds}) == 16
    resumed = FakeVllmGeneration()
    generation(resumed, version=4).generate(PROMPTS)
    assert resumed.seeds == engines.seeds[3:]


def test_what_a_refit_counts_is_of_the_step_after_it():
    """NeMo RL refits between the metrics of one step and the snapshot of the next."""
    engines = FakeVllmGeneration()
    made, seen = generation(engines, version=0), []
    for in_refit, in_step in ((1, 0), (0, 2), (0, 0)):
        engines.restarts += in_refit
        made.snapshot_step_metrics()
        engines.restarts += in_step
        seen.append(made.get_step_metrics())
    assert seen == [{"generation/engine_restarts": count} for count in (1, 2, 0)]
