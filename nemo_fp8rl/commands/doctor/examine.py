"""Examines one recipe: all findings, as a table or as JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from nemo_fp8rl.commands.doctor.alignment.block_alignment import check_alignment
from nemo_fp8rl.commands.doctor.batch_sizes import check_batches
from nemo_fp8rl.commands.doctor.finding import Finding
from nemo_fp8rl.commands.doctor.hardware import Gpu, check_hardware, gpu_by_name
from nemo_fp8rl.commands.doctor.known_models import DEEPSEEK_GUIDE
from nemo_fp8rl.commands.doctor.memory.adapter_memory import check_adapters
from nemo_fp8rl.commands.doctor.memory.phases import GIB, Memory, check_memory, memory_of
from nemo_fp8rl.commands.doctor.model_shapes import shape_of
from nemo_fp8rl.commands.doctor.precision_agreement import check_agreement, check_format
from nemo_fp8rl.commands.doctor.recipe_plan import TRAINER, Plan
from nemo_fp8rl.commands.doctor.worker_limits import check_workers
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.nemo_rl.recipe.keys import at
from nemo_fp8rl.nemo_rl.recipe.read_recipe import read_recipe
from nemo_fp8rl.nemo_rl.recipe.value_types import require

SMALLEST_ADAPTER_RATE = 2e-6
"""Learning rate of adapters below which the doctor warns; recipes for all parameters have 3e-7 to 1e-6."""
COLOURS = {"ok": "green", "warn": "yellow", "error": "red"}


@dataclass(frozen=True)
class Report:
    recipe: str
    model: str
    parameters: int
    nemo_rl: str
    gpu: Gpu
    memory: Memory
    findings: list[Finding]

    @property
    def is_sound(self) -> bool:
        return not any(finding.level == "error" for finding in self.findings)


def examine(
    path: Path, overrides: Sequence[str], gpu_name: str, model_config: Path | None = None, fingerprint: bool = False
) -> Report:
    """Return the findings on a recipe.

    model_config: the model's config.json, for a model that the doctor does not know
    fingerprint:  compare the operations of trainer and engine on this node's GPU
    Raises: UserError for an unreadable recipe, an unknown model or GPU
    """
    gpu = gpu_by_name(gpu_name)
    recipe = read_recipe(path, overrides, needs_data=False)
    policy = recipe.values["policy"]
    model = str(policy["model_name"])
    if not at(policy, "megatron_cfg.enabled", False) or policy["generation"].get("backend") != "vllm":
        raise UserError(
            f"{path}: the doctor knows Megatron trainers (policy.megatron_cfg.enabled=true) with vLLM engines "
            "(policy.generation.backend=vllm) alone"
        )
    require(recipe.values, "policy.generation.vllm_cfg")
    plan = Plan(recipe.values, shape_of(model, model_config))
    other_format = check_format(plan)
    memory = Memory() if other_format else memory_of(plan, gpu)
    findings = [
        *_check_name(model),
        *(other_format or check_agreement(plan)),
        *check_alignment(plan),
        *check_batches(plan),
        *([] if other_format else check_memory(plan, gpu, memory)),
        *([] if other_format else check_adapters(plan)),
        *check_learning_rate(plan),
        *([] if other_format else check_hardware(plan, gpu)),
        *check_workers(plan, recipe.checkout.engines_survive_fp8_refit),
        *(_check_fingerprints(plan) if fingerprint else ()),
    ]
    return Report(str(path), model, plan.shape.parameters, recipe.checkout.version, gpu, memory, findings)


def _check_name(model: str) -> Iterator[Finding]:
    if model == DEEPSEEK_GUIDE:
        text = (
            "policy.model_name is a sentence on DeepSeek-V3, whose sizes stand here; set it to the folder it speaks of"
        )
        yield Finding("warn", "model", text)


def check_learning_rate(plan: Plan) -> Iterator[Finding]:
    """Warn of a rate for all parameters where adapters alone are trained.

    They need about ten times as much (https://thinkingmachines.ai/blog/lora/); QeRL has 1e-5 or 5e-6 (arXiv 2510.11696,
    table 4), NeMo RL's own recipes 5e-6.
    """
    rate = plan.megatron["optimizer"].get("lr")
    if plan.peft.enabled and isinstance(rate, int | float) and rate < SMALLEST_ADAPTER_RATE:
        text = (
            f"{TRAINER}.optimizer.lr={rate:g} is one for all parameters; adapters need about ten times as much, and "
            "hardly move with less: set it to 5e-6 or more"
        )
        yield Finding("warn", "adapters", text)


def _check_fingerprints(plan: Plan) -> Iterator[Finding]:
    from nemo_fp8rl.commands.doctor.fingerprints import check_fingerprints  # it loads torch

    return check_fingerprints(plan)


def as_json(report: Report) -> str:
    return json.dumps(asdict(report), indent=2)


def show(report: Report) -> None:
    from rich.table import Table
    from rich.text import Text

    from nemo_fp8rl.common.display import Screen

    console = Screen()
    console.print(
        f"{report.recipe}: {report.model}, {report.parameters / 1e9:.2f} B parameters, NeMo RL {report.nemo_rl}",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
    phases = Table(title=f"GiB on the fullest {report.gpu.name}", title_justify="left")
    phases.add_column("phase")
    phases.add_column("total", justify="right")
    phases.add_column("of which")
    for phase in report.memory.phases:
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in phase.parts.items())
        phases.add_row(phase.name, f"{phase.total / GIB:.1f}", parts)
    if report.memory.phases:
        console.print(phases)
        console.print(str(report.memory.parameter), soft_wrap=True, highlight=False, markup=False)
    table = Table(show_header=False)
    for finding in report.findings:
        table.add_row(Text(finding.level, COLOURS[finding.level]), Text(finding.topic), Text(finding.text))
    console.print(table, highlight=False)
