"""Every number format side by side: bytes on the wire, mismatch of trainer and engine, accuracy; and the wrong ways.

    python benchmarks/formats.py [--steps 20] [--seeds 5] [--dry-run] [--folder F] [--json FILE]

Each flow of `nemo_fp8rl.flow` trains the same warm tiny model, `--seeds` times, with deltas. Then the controls: an
engine answers from bytes of one rule, and a trainer that quantizes by another gives its log-probs of the same tokens.
A refit between such a pair would be refused by name. A dry run is as short as can be, for the sake of the tests: its
figures say nothing.
"""

import argparse
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from mismatch import RECIPES, make_warm, train
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from nemo_fp8rl.algorithms.mismatch import mismatch_metrics
from nemo_fp8rl.assemble import build_bridge
from nemo_fp8rl.batch import Prompt, RolloutBatch, collate
from nemo_fp8rl.commands.compare.statistics import interval
from nemo_fp8rl.config.fp8rl_schema import Flow
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.data.tokenizer import PromptTokenizer
from nemo_fp8rl.fp8 import NVFP4_A16, ScaleFormat, encode_scale, quantize_blockwise
from nemo_fp8rl.generation.engine_pool import EnginePool
from nemo_fp8rl.generation.interface import Sampling
from nemo_fp8rl.policy.rank_group import MegatronPolicy

SAMPLING = Sampling(num_generations=4, max_new_tokens=8, temperature=1.0, stop_token_ids=(1,))
TEXTS = [f"{a}+{b}=" for a in range(10, 90, 10) for b in (3, 57)]
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def measure(folder: Path, flow: str, steps: int, seeds: int) -> dict[str, Any]:
    """Return what runs of a flow measured; accuracy as (mean, half of the 95 % interval)."""
    rows, refits = list[dict[str, float]](), list[dict[str, float]]()
    accuracies = []
    for seed in range(seeds):
        run = folder / f"{flow}_{seed}"
        found = train(folder, run, "add", flow, steps, "nemo_fp8rl.refit.mode=delta", f"grpo.seed={seed}")
        rows += [row for row in found if row["step"] > 0]
        refits += [row for row in found if "refit/delta" in row]
        accuracies.append([row["validation/accuracy"] for row in found if "validation/accuracy" in row][-1])

    def wire(is_delta: float) -> float:
        return fmean(
            [row["refit/wire_over_bf16"] for row in refits if row["refit/delta"] == is_delta] or [float("nan")]
        )

    spread = interval(accuracies)
    return {
        "flow": flow,
        "wire_over_bf16": wire(0.0),
        "delta_over_bf16": wire(1.0),
        "token_mult_prob_error": fmean(row["train/token_mult_prob_error"] for row in rows),
        "worst_step": max(row["train/token_mult_prob_error"] for row in rows),
        "exact_logprob_fraction": fmean(row["train/exact_logprob_fraction"] for row in rows),
        "accuracy": fmean(accuracies),
        "accuracy_interval": [spread.low, spread.high] if seeds > 1 and spread else None,
    }


def answers(model: Path, data: Path, *keys: str) -> RolloutBatch:
    """Return answers of an engine that has the bytes of this flow."""
    cfg = load(RECIPES / "tiny_cpu.yaml", [f"policy.model_name={model}", f"data.train.data_path={data}", *keys])
    policy, generation = MegatronPolicy(cfg), EnginePool(cfg)
    try:
        build_bridge(cfg, policy, generation).refit()
        tokenizer = PromptTokenizer(cfg.policy).tokenizer
        prompts = [Prompt(i, text, "", tuple(tokenizer(text).input_ids)) for i, text in enumerate(TEXTS)]
        groups = generation.generate([p.token_ids for p in prompts], [100 + p.index for p in prompts], SAMPLING)
        repeated = [p for p in prompts for _ in range(SAMPLING.num_generations)]
        return collate(repeated, [completion for group in groups for completion in group], 0)
    finally:
        generation.shutdown()
        policy.shutdown()


def compare(batch: RolloutBatch, model: Path, data: Path, *keys: str) -> dict[str, float]:
    """Return the mismatch of a trainer with these keys on answers of an engine."""
    cfg = load(RECIPES / "tiny_cpu.yaml", [f"policy.model_name={model}", f"data.train.data_path={data}", *keys])
    policy = MegatronPolicy(cfg)
    try:
        logprobs, sampled = policy.logprobs(batch), batch.token_mask.bool()
    finally:
        policy.shutdown()
    error = mismatch_metrics(logprobs, batch.generation_logprobs, batch.token_mask)["token_mult_prob_error"]
    equal = (logprobs[sampled] == batch.generation_logprobs[sampled]).float().mean()
    return {"token_mult_prob_error": error, "exact_logprob_fraction": float(equal)}


def dequantized(model: Path, folder: Path, scale_format: ScaleFormat, merges: bool) -> Path:
    """Write the model with the values of NVFP4 weights in bfloat16, and return its folder.

    merges:  projections that engines fuse take the largest of their global scales, as loaders of engines do that have
             one for a fused matrix; the block scales are those of each projection's own
    """
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    values = {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        leaf = name.split(".")[-2]
        fused = next((group for group in FUSED if leaf in group), (leaf,))
        largest = torch.stack([tensors[name.replace(leaf, part)].abs().amax() for part in fused]).amax()
        encode = encode_scale(tensors[name].abs().amax() if merges else largest, scale_format)
        stored = quantize_blockwise(tensors[name], format=NVFP4_A16, scale_format=scale_format, encode=encode)
        if merges:
            stored = replace(stored, global_scale=1 / encode_scale(largest, scale_format))
        values[name] = stored.dequantize(torch.bfloat16)
    save_file(tensors | values, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def controls(folder: Path, engines: int) -> list[dict[str, Any]]:
    """Return the mismatch of pairs that do not have one rule, and of the pair that does, for so many engines."""
    model, data = folder / "warm", folder / "data.jsonl"
    a16, a4 = "nemo_fp8rl.flow=nvfp4_a16_e2e", "nemo_fp8rl.flow=nvfp4_e2e"
    line, fp32 = "nemo_fp8rl.weight_block=line", "nemo_fp8rl.scale_format=fp32"
    mxfp8 = "nemo_fp8rl.flow=mxfp8_e2e"
    found = []

    def add(name: str, engine: Sequence[str], trainers: Mapping[str, tuple[Path, Sequence[str]]]) -> None:
        if len({row["engine"] for row in found}) == engines:
            return
        batch = answers(model, data, *engine)
        for trainer, (weights, keys) in trainers.items():
            found.append({"engine": name, "trainer": trainer, **compare(batch, weights, data, *keys)})

    merged = dequantized(model, folder / "merged", "fp32", merges=True)
    unmerged = dequantized(model, folder / "unmerged", "pow2", merges=False)
    bf16 = ["nemo_fp8rl.flow=bf16"]
    add(
        "nvfp4_a16, 16x16, pow2 global",
        [a16],
        {
            "the same": (model, [a16]),
            "its values in bf16": (unmerged, bf16),
            "1x16": (model, [a16, line]),
            "fp32 global": (model, [a16, fp32]),
            "globals of q, k, v and of gate, up merged by the largest": (merged, bf16),
            "bf16": (model, bf16),
        },
    )
    add("nvfp4, 16x16", [a4], {"the same": (model, [a4]), "1x16": (model, [a4, line]), "nvfp4_a16": (model, [a16])})
    add("mxfp8, 32x32", [mxfp8], {"the same": (model, [mxfp8]), "1x32": (model, [mxfp8, line])})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("runs/formats"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = arguments.folder
    make_warm(folder, "add", 2 if arguments.dry_run else None)

    flows = ("nvfp4_e2e",) if arguments.dry_run else get_args(Flow)
    steps, seeds = (1, 1) if arguments.dry_run else (arguments.steps, arguments.seeds)
    results = [measure(folder, flow, steps, seeds) for flow in flows]
    wrong_ways = controls(folder, 1 if arguments.dry_run else 3)
    if arguments.json:
        settings = {"steps": steps, "seeds": seeds}
        record = {"settings": settings, "flows": results, "controls": wrong_ways}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")

    table = Table("flow", "wire / bf16", "delta / bf16", "token_mult_prob_error", "worst step", "bit-equal", "accuracy")
    for r in results:
        low, high = r["accuracy_interval"] or (r["accuracy"], r["accuracy"])
        numbers = f"{r['wire_over_bf16']:.4f}", f"{r['delta_over_bf16']:.4f}", f"{r['token_mult_prob_error']:.6f}"
        spread = f"{r['accuracy']:.3f} ({low:.3f} to {high:.3f})"
        table.add_row(r["flow"], *numbers, f"{r['worst_step']:.6f}", f"{r['exact_logprob_fraction']:.1%}", spread)
    Console(width=120).print(table)
    table = Table("engine", "trainer", "token_mult_prob_error", "bit-equal")
    for r in wrong_ways:
        error, equal = f"{r['token_mult_prob_error']:.6f}", f"{r['exact_logprob_fraction']:.1%}"
        table.add_row(r["engine"], r["trainer"], error, equal)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
