"""A real vLLM engine on a CPU whose cache keeps the prompt and a window of generated tokens."""

import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nemo_fp8rl.batch import Completion
from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.generation.engine import VllmEngine
from nemo_fp8rl.generation.engine_checks import CACHE_BLOCK
from nemo_fp8rl.generation.interface import Sampling
from tests.conftest import RECIPES, SMALL
from tests.generation.pair import outputs

WINDOW, TOKENS = 48, 400
SAMPLES = Sampling(num_generations=2, max_new_tokens=TOKENS, temperature=1.0, stop_token_ids=())
PROMPTS = [(3, 4, 5, 6, 7, 8), (9,) * 40, (10, 11, 12) * 50]
ROOM = {"kv_cache_memory_gib": 0.25}
TIGHT = {"kv_cache_memory_gib": 0.0073}
"""Blocks for one context of 640 tokens, which vLLM requires, and three more: six answers do not fit."""


class Engines:
    """Engines on one model that never ends an answer, in float32; each is started at its first use."""

    def __init__(self, folder: Path) -> None:
        make_tiny(folder, "add", 0, "qwen3", max_position_embeddings=1024)
        config = folder / "model" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": None}))
        paths = f"policy.model_name={folder}/model", f"data.train.data_path={folder}/data.jsonl"
        lengths = "policy.max_total_sequence_length=640", f"policy.generation.max_new_tokens={TOKENS}"
        own = "nemo_fp8rl.flow=bf16", "policy.precision=float32"
        self.cfg = load(RECIPES / "tiny_cpu.yaml", [*SMALL, *paths, *lengths, *own])
        self.model = folder / "model"
        self.started: dict[tuple, VllmEngine] = {}

    def get(self, window: int | None, **vllm_cfg) -> VllmEngine:
        key = window, *sorted(vllm_cfg.items())
        if key not in self.started:
            generation = self.cfg.policy.generation
            vllm_cfg = replace(generation.vllm_cfg, kv_window=window, **ROOM | vllm_cfg)
            policy = replace(self.cfg.policy, generation=replace(generation, vllm_cfg=vllm_cfg))
            self.started[key] = VllmEngine()
            self.started[key].setup(replace(self.cfg, policy=policy), load_format="auto")
        return self.started[key]

    def answers(self, window: int | None, prompts=PROMPTS, sampling=SAMPLES, **vllm_cfg) -> list[list[Completion]]:
        engine = self.get(window, **vllm_cfg)
        engine.core.reset_prefix_cache()
        return engine.generate(prompts, [7 + i for i in range(len(prompts))], sampling)

    def close(self) -> None:
        for engine in self.started.values():
            engine.shutdown()
        self.started.clear()
        gc.collect()


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> Iterator[Engines]:
    engines = Engines(tmp_path_factory.mktemp("windows") / "tiny")
    yield engines
    engines.close()


def blocks(tokens: int) -> int:
    return -(-tokens // CACHE_BLOCK)


def test_a_request_keeps_the_blocks_of_its_prompt_and_its_window(engines):
    for prompt in PROMPTS:
        counts = {}
        for window in (WINDOW, TOKENS):
            engines.get(window).take_block_counts()
            engines.answers(window, [prompt])
            counts[window] = engines.get(window).take_block_counts()
        peak, kept, dense = counts[WINDOW]
        whole = blocks(len(prompt) + TOKENS - 1)  # the last token is not read
        assert peak <= blocks(len(prompt) + WINDOW) + 2
        assert peak < whole
        assert (kept, dense) == (2 * peak, 2 * whole)  # two answers, alike in length
        assert counts[TOKENS] == (whole, 2 * whole, 2 * whole)


def test_a_window_as_long_as_the_answer_changes_no_bit(engines):
    assert outputs(engines.answers(TOKENS)) == outputs(engines.answers(None))


def test_log_probs_are_those_of_the_mask(engines):
    """Against transformers in float64 with the mask written out: the engine's rounding is far below what it hides."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(engines.model, dtype=torch.float64, attn_implementation="sdpa").eval()

    def logprobs(ids: torch.Tensor, prompt: int, is_visible: torch.Tensor) -> torch.Tensor:
        bias = torch.where(is_visible, 0.0, -torch.inf).double()[None, None]
        with torch.no_grad():
            logits = model(ids[None], attention_mask=bias).logits[0]
        return logits.log_softmax(-1)[prompt - 1 : -1].gather(1, ids[prompt:, None])[:, 0]

    for prompt, group in zip(PROMPTS, engines.answers(WINDOW), strict=True):
        for answer in group:
            ids = torch.tensor(prompt + answer.token_ids)
            query, key = torch.arange(len(ids))[:, None], torch.arange(len(ids))
            before = key <= query
            seen = before & ((key < len(prompt)) | (query - key < WINDOW))
            found = torch.tensor(answer.logprobs, dtype=torch.float64)
            assert (found - logprobs(ids, len(prompt), seen)).abs().max() < 1e-5
            beyond = (found - logprobs(ids, len(prompt), before)).abs()
            assert beyond[:WINDOW].max() < 1e-5
            assert beyond[WINDOW:].max() > 0.1


def test_an_answer_that_is_preempted_and_resumed_is_the_same(engines):
    undisturbed = outputs(engines.answers(WINDOW))
    engines.get(WINDOW, **TIGHT).take_block_counts()
    disturbed = engines.answers(WINDOW, **TIGHT)
    _, _, dense = engines.get(WINDOW, **TIGHT).take_block_counts()
    assert dense > sum(2 * blocks(len(prompt) + TOKENS - 1) for prompt in PROMPTS)  # some were counted twice
    assert outputs(disturbed) == undisturbed


def test_a_prompt_takes_no_block_that_another_prompt_generated(engines):
    """The next turn of a conversation sees all of the turn before it, whose keys come from a window."""
    first = PROMPTS[0]
    ((answer, *_),) = engines.answers(WINDOW, [first])
    turns = [first + answer.token_ids[:count] for count in (200, 300)]
    short = replace(SAMPLES, max_new_tokens=8)
    fresh = [outputs(engines.answers(WINDOW, [turn], short)) for turn in turns]
    engines.answers(WINDOW, [first])
    engine = engines.get(WINDOW)
    assert [outputs(engine.generate([turn], [7], short)) for turn in turns] == fresh


@pytest.mark.long
def test_an_engine_with_a_core_of_its_own_answers_the_same(engines):
    assert outputs(engines.answers(WINDOW, async_engine=True)) == outputs(engines.answers(WINDOW))
