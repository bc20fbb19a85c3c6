"""Adapters beside a base in vLLM's own LoRA give the tokens of our engine, which computes them in layers of its own.

vLLM multiplies by alpha / rank before it multiplies by B, so log-probs may differ by roundings.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_fp8rl.commands.export.convert import export
from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.generation.interface import Sampling
from tests.conftest import RECIPES, SMALL
from tests.generation.pair import Pair

KEY = "policy.megatron_cfg"
LORA = (f"{KEY}.peft.enabled=true", f"{KEY}.optimizer.lr=0.01", f"{KEY}.peft.lora_B_init_method=kaiming")
TOKENS = 12
GREEDY = Sampling(num_generations=1, max_new_tokens=TOKENS, temperature=0.0, stop_token_ids=())
TOLERANCE = 0.02
"""Of log-probs."""


Answers = list[tuple[list[int], list[float]]]
"""Tokens and log-probs of each answer."""


class Trained:
    """Adapters that a trainer moved, saved, and what our engine answers with them."""

    def __init__(self, folder: Path, flow: str) -> None:
        make_tiny(folder / "tiny", "add", 0)
        paths = (f"policy.model_name={folder}/tiny/model", f"data.train.data_path={folder}/tiny/data.jsonl")
        cfg = load(RECIPES / "tiny_cpu.yaml", [*paths, *SMALL, *LORA, f"nemo_fp8rl.flow={flow}"])
        self.pair = Pair(cfg)
        self.pair.refit()
        self.pair.train(3)
        self.pair.refit()
        self.prompts = [list(prompt.token_ids) for prompt in self.pair.prompts]
        self.expected: Answers = [(list(c.token_ids), list(c.logprobs)) for (c,) in self.pair.generate(GREEDY)]
        self.pair.worker.save(str(folder / "saved"))
        self.base, self.adapter = folder / "tiny/model", folder / "saved/adapter"

    def answers(self, model: Path, adapter: Path | None, **extra: Any) -> Answers:
        """What plain vLLM answers, with an adapter of the request or without."""
        from vllm import LLM, SamplingParams
        from vllm.lora.request import LoRARequest

        llm = LLM(
            str(model),
            enable_lora=True,
            max_lora_rank=8,
            dtype="bfloat16",
            max_model_len=64,
            max_num_seqs=16,
            kv_cache_memory_bytes=1 << 28,
            enforce_eager=True,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            disable_log_stats=True,
            **extra,
        )
        request = LoRARequest("policy", 1, str(adapter)) if adapter else None
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, logprobs=0, ignore_eos=True)
        results = llm.generate(
            [{"prompt_token_ids": ids} for ids in self.prompts], params, lora_request=request, use_tqdm=False
        )
        outputs = [result.outputs[0] for result in results]
        return [
            (list(o.token_ids), [row[t].logprob for t, row in zip(o.token_ids, o.logprobs, strict=True)])
            for o in outputs
        ]

    def differences(self, answers: Answers) -> tuple[float, float]:
        """Return the share of other tokens, and the largest distance of log-probs where tokens are still the same."""
        others, tokens, gap = 0, 0, 0.0
        for (theirs, logprobs), (ours, our_logprobs) in zip(answers, self.expected, strict=True):
            same = next((n for n, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), len(ours))
            others, tokens = others + len(ours) - same, tokens + len(ours)
            pairs = zip(logprobs[:same], our_logprobs[:same], strict=True)
            gap = max([gap, *(abs(a - b) for a, b in pairs)])
        return others / tokens, gap


@pytest.fixture(scope="module", params=["bf16", "fp8_e2e"])
def trained(request, tmp_path_factory) -> Iterator[Trained]:
    trained = Trained(tmp_path_factory.mktemp("lora"), request.param)
    yield trained
    trained.pair.close()


def test_vllm_serves_adapters_beside_the_base(trained, tmp_path):
    """A bfloat16 base as it is, an FP8 base as it is exported."""
    base, adapter, arguments = trained.base, trained.adapter, {}
    if trained.pair.cfg.nemo_fp8rl.quantizes_rollout:
        base, adapter, arguments = tmp_path / "fp8", tmp_path / "fp8/adapter", {"quantization": "nemo_fp8rl"}
        assert export(trained.adapter, base)
    others, gap = trained.differences(trained.answers(base, adapter, **arguments))
    assert others < 0.05 and gap < TOLERANCE
    others, _ = trained.differences(trained.answers(base, None, **arguments))
    assert others > 0.5
