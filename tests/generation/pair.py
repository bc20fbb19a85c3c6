"""A trainer and an engine side by side, and how the tests ask the engine."""

import gc
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import Tensor

from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.algorithms.mismatch import mismatch_metrics
from nemo_fp8rl.assemble import build_bridge
from nemo_fp8rl.batch import Prompt, RolloutBatch, collate, collate_prompts
from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.data.tokenizer import PromptTokenizer
from nemo_fp8rl.generation.engine import VllmEngine
from nemo_fp8rl.generation.engine_pool import EnginePool
from nemo_fp8rl.generation.interface import Sampling
from nemo_fp8rl.policy.rank.worker import MegatronWorker
from nemo_fp8rl.policy.rank_group import MegatronPolicy
from nemo_fp8rl.refit.manifest import RefitError, Sources
from nemo_fp8rl.refit.reports import RefitReport
from tests.batches import loss_totals
from tests.conftest import ALIGNED, BATCH_INVARIANT, RECIPES, SMALL
from tests.policy.sent import sent_tensors

GREEDY = Sampling(num_generations=1, max_new_tokens=16, temperature=0.0, stop_token_ids=())
FREE = Sampling(num_generations=4, max_new_tokens=8, temperature=1.0, stop_token_ids=(1,))
TEXTS = [f"{a}+{b}=" for a in range(10, 90, 10) for b in (3, 57)]


class NearLogProbs(tuple):
    def __eq__(self, other):
        return tuple(self) == pytest.approx(other, abs=1e-3)

    __hash__ = None


def outputs(groups, same_batches: bool = True):
    """Tokens and log-probs, without the version. To be compared to the last bit; but where the clock decides what is
    answered together, only as far as the CPU allows.
    """
    logprobs = tuple if same_batches or BATCH_INVARIANT else NearLogProbs
    return [[(c.token_ids, logprobs(c.logprobs)) for c in group] for group in groups]


def apart(answers, others) -> str:
    """How far `outputs` of the same questions are from each other, for the message of an assertion."""
    pairs = [pair for a, b in zip(answers, others, strict=True) for pair in zip(a, b, strict=True)]
    tokens = sum(a != b for (a, _), (b, _) in pairs)
    gaps = [abs(x - y) for (_, a), (_, b) in pairs for x, y in zip(a, b, strict=False)]
    return f"{tokens} of {len(pairs)} answers have other tokens, log-probs are up to {max(gaps, default=0.0):.2g} apart"


class Pair:
    """A trainer and an engine of one flow, in this process, and the bridge between them."""

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self.policy = MegatronPolicy(cfg)
        self.generation = EnginePool(cfg)
        self.worker: MegatronWorker = self.policy.ranks.worker
        self.engine: VllmEngine = self.generation.engines.worker
        self.bridge = build_bridge(cfg, self.policy, self.generation)
        self.tokenizer = PromptTokenizer(cfg.policy)
        tokens = [tuple(self.tokenizer.tokenizer(text).input_ids) for text in TEXTS]
        self.prompts = [Prompt(i, text, "", ids) for i, (text, ids) in enumerate(zip(TEXTS, tokens, strict=True))]
        self.others: list[VllmEngine] = []
        of_bf16_experts = self.worker.hf.family.experts and cfg.nemo_fp8rl.flow == "bf16"
        self.limit = 1.001 if of_bf16_experts else ALIGNED  # their sums are not in the order of vLLM's kernel

    def close(self) -> None:
        """All engines of a process share vLLM's groups, so they end together."""
        for engine in self.others:
            engine.shutdown()
        self.generation.shutdown()
        self.others.clear()
        gc.collect()
        self.policy.shutdown()

    def refit(self) -> RefitReport:
        if self.cfg.fp8_kv_cache:
            self.policy.calibrate_kv(collate_prompts(self.prompts, 0))
        return self.bridge.refit()

    def refit_without(self, name: str) -> None:
        """Try the next version without one tensor: refused by name, and the engine goes on from the last version."""
        self.bridge.links.disconnect(0)
        sources = self.policy.sources()
        (parts,) = sources.holdings
        self.policy._sources = Sources([[part for part in parts if part.name != name]])
        with pytest.raises(RefitError, match=f"lacks 1 tensors.*{name}"):
            self.bridge.refit()
        versions = {answer.policy_version for answers in self.generate(GREEDY) for answer in answers}
        assert versions == {self.bridge.version}
        self.policy._sources = sources

    def generate(self, sampling: Sampling, engine: VllmEngine | None = None, prompts: list[Prompt] | None = None):
        prompts = prompts or self.prompts
        ids = [p.token_ids for p in prompts]
        return (engine or self.engine).generate(ids, [100 + p.index for p in prompts], sampling)

    def samples(self, sampling: Sampling = FREE, engine: VllmEngine | None = None) -> RolloutBatch:
        """Four answers to each prompt, as the loop would train on them."""
        groups = self.generate(sampling, engine)
        return collate([p for p in self.prompts for _ in range(4)], [c for group in groups for c in group], 0)

    def mismatch(self, sampling: Sampling = FREE, engine: VllmEngine | None = None) -> float:
        """token_mult_prob_error on the engine's own samples."""
        batch = self.samples(sampling, engine)
        error = mismatch_metrics(self.worker.logprobs(batch), batch.generation_logprobs, batch.token_mask)
        return error["token_mult_prob_error"]

    def train(self, steps: int) -> None:
        """Move the weights, on the engine's own samples."""
        batch = self.samples()
        for _ in range(steps):
            self.worker.train_step(batch, NllLoss(), loss_totals(64.0, batch.token_mask.sum()))

    def is_fresh_after_refits(self, folder: Path) -> None:
        """Assert that after one and after ten refits the engine answers as one started from disk does. That one runs in
        this process, or on as many ranks where the engine has several.
        """
        vllm_cfg = self.cfg.policy.generation.vllm_cfg
        same_batches, in_process = not vllm_cfg.async_engine, vllm_cfg.tensor_parallel_size == 1
        other = {"async_engine": False} if in_process else {}

        def answers(*asked):
            return outputs(self.generate(*asked), same_batches)

        self.refit()
        earlier = answers(GREEDY)
        for refits in (1, 9):
            for _ in range(refits):
                self.train(1)
                self.refit()
            greedy, sampled = answers(GREEDY), answers(FREE)
            assert greedy != earlier  # the weights did move
            fresh = self.fresh_engine(sent_tensors(self.worker), folder / f"after_{refits}", **other)
            for answered, asked in ((greedy, GREEDY), (sampled, FREE)):
                again = answers(asked, fresh)
                assert answered == again, f"after {refits} more refits {apart(answered, again)}"
            earlier = greedy

    def fresh_engine(self, tensors: dict[str, Tensor], folder: Path, **vllm_cfg: Any) -> VllmEngine:
        """An engine started from disk with these very tensors. vllm_cfg: keys of it that are to differ."""
        shutil.copytree(self.cfg.policy.model_name, folder)
        scales = {n: t for n, t in tensors.items() if n.endswith((".k_scale", ".v_scale", ".q_scale"))}
        weights = {n: t for n, t in tensors.items() if n not in scales}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        if scales:  # in a file that the index leaves out: some versions of vLLM's loaders do not know these names
            save_file(scales, folder / "kv_scales.safetensors")
            index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "model.safetensors")}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        generation = self.cfg.policy.generation
        generation = replace(generation, vllm_cfg=replace(generation.vllm_cfg, **vllm_cfg))
        policy = replace(self.cfg.policy, model_name=str(folder), generation=generation)
        engine = VllmEngine()
        engine.setup(replace(self.cfg, policy=policy), load_format="auto")
        self.others.append(engine)
        return engine


def tiny_pair(folder: Path, family: str, *overrides: str, **sizes: Any) -> Pair:
    """A pair on a new tiny model in the folder, with steps that move weights at once; close it at the end."""
    make_tiny(folder, "add", 0, family, **sizes)
    paths = f"policy.model_name={folder}/model", f"data.train.data_path={folder}/data.jsonl"
    step = "policy.megatron_cfg.optimizer.lr=0.002", "policy.megatron_cfg.scheduler.lr_warmup_iters=0"
    return Pair(load(RECIPES / "tiny_cpu.yaml", [*SMALL, *paths, *step, *overrides]))
