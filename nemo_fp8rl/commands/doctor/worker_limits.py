"""Checks that the workers which `nemo_fp8rl.workers` names, the package's or NeMo RL's, accept a recipe."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from nemo_fp8rl.commands.doctor.finding import Finding, Level
from nemo_fp8rl.commands.doctor.recipe_plan import ENGINE, Plan
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.hf.model_config import FAMILIES, HfConfig, read_hf_config
from nemo_fp8rl.hf.shared_operations import check_shared_operations
from nemo_fp8rl.nemo_rl.recipe.keys import describe_ignored_values
from nemo_fp8rl.nemo_rl.recipe.precision import read_precision
from nemo_fp8rl.nemo_rl.recipe.recipe_checks import check_loop
from nemo_fp8rl.nemo_rl.stock.bf16_layers import add_bf16_layers
from nemo_fp8rl.nemo_rl.stock.stock_limits import (
    why_correction_unsupported,
    why_gradients_unsupported,
    why_policy_unsupported,
)

TOPIC = "workers"


def check_workers(plan: Plan, survives_refit: bool) -> Iterator[Finding]:
    """Yield findings by the functions that also build the workers; those of the package's workers load torch.

    Under `auto` a recipe may also be for NeMo RL without this package.

    survives_refit: as `Checkout.engines_survive_fp8_refit`
    """
    workers = plan.values["nemo_fp8rl"]["workers"]
    if refusal := _loop(plan):
        yield Finding("warn" if workers == "auto" else "error", TOPIC, f"`nemo-fp8rl nemo` refuses it: {refusal}")
    if plan.uses_package_workers:
        level: Level = "error" if workers == "ours" else "warn"
        yield from _package_workers(plan, survives_refit, refusal, level)
    elif refusal := _stock(plan, survives_refit):
        if workers == "auto":
            yield Finding("warn", TOPIC, f"nemo_fp8rl.workers=auto takes NeMo RL's own on GPUs and ends: {refusal}")
        else:
            yield Finding("error", TOPIC, refusal)


def _loop(plan: Plan) -> str:
    try:
        check_loop(plan.values)
    except UserError as error:
        return str(error)
    return ""


def _stock(plan: Plan, survives_refit: bool) -> str:
    if refusal := why_correction_unsupported(plan.values) or why_gradients_unsupported(plan.values):
        return refusal
    try:
        refusal = why_policy_unsupported(plan.policy, survives_refit)
        flow = read_precision(plan.policy).flow
    except UserError:
        return ""  # `check_agreement` reports it
    if refusal := refusal or _why_not_streamed(plan):
        return refusal
    try:
        if flow == "fp8_e2e":
            add_bf16_layers(plan.megatron, plan.engine_layers, plan.shape.layers)
    except UserError as error:
        return str(error)
    return ""


def _why_not_streamed(plan: Plan) -> str:
    """Return why FP8 on the wire does not carry this family's weights; empty if it does, or if nothing is FP8.

    The trainer's half goes by the names of weights (`nemo_rl/stock/fp8_stream.py`), and the engine compares them with
    its own (`nemo_rl/stock/layer_agreement.py`).
    """
    names = plan.shape.names
    if not plan.quantizes_rollout:
        return ""
    if names.root != names.engine_root:
        return (
            f"FP8 on the wire compares layers by name, and this family's are {names.root}layers in the checkpoint and "
            f"{names.engine_root}layers in vLLM: set {ENGINE}.precision=bfloat16, or run it by NeMo RL alone"
        )
    weights = (weight for i in range(plan.shape.layers) for weight in plan.shape.layer(i))
    differ = [weight.name for weight in weights if plan.is_fp8_in_engine(weight) != plan.is_fp8_on_the_wire(weight)]
    if not differ:
        return ""
    words = dict.fromkeys(name.removesuffix(".weight").rpartition(".")[2] for name in differ)
    return (
        f"vLLM and FP8 on the wire differ in whether {', '.join(words)} are FP8: add these words to {ENGINE}."
        "quantization_ignored_layer_kws"
    )


def _package_workers(plan: Plan, survives_refit: bool, loop_refusal: str, level: Level) -> Iterator[Finding]:
    for sentence in describe_ignored_values(plan.values):
        yield Finding("warn", TOPIC, sentence)
    refusal = _refusal(plan)
    if refusal and refusal != loop_refusal:
        yield Finding(level, TOPIC, f"{refusal}{_other_workers(plan, survives_refit)}")
    if not refusal:
        yield Finding("ok", TOPIC, "our own trainer and engines take this recipe")


def _other_workers(plan: Plan, survives_refit: bool) -> str:
    """Return what to add to a refusal: for a family that the package's trainer lacks, whether NeMo RL's own take it."""
    if plan.shape.config.get("model_type") in FAMILIES:
        return ""
    if refusal := _stock(plan, survives_refit):
        return f"; nor does nemo_fp8rl.workers=nemo_rl take it: {refusal}"
    with_fp8 = ", with FP8 on the wire" if plan.quantizes_rollout else ""
    return f"; NeMo RL's own workers have this family{with_fp8}: set nemo_fp8rl.workers=nemo_rl"


def _refusal(plan: Plan) -> str:
    """Return the first reason why the package's workers refuse the recipe, or an empty text."""
    try:
        with package_config(plan) as (hf, cfg):
            if cfg.nemo_fp8rl.align == "vllm":
                check_shared_operations(hf, cfg)
    except UserError as error:
        return str(error)
    return ""


@contextmanager
def package_config(plan: Plan) -> Iterator[tuple[HfConfig, Config]]:
    """Yield the model's sizes and the recipe as the package's workers read it; a folder stands for the model.

    Raises: UserError, of the block as well, with the model's name in the place of that folder
    """
    from nemo_fp8rl.nemo_rl.recipe.config_from_recipe import convert_recipe

    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(plan.shape.config))
        tokenizer = {**plan.policy["tokenizer"], "name": folder}
        policy = {**plan.policy, "model_name": folder, "tokenizer": tokenizer}
        try:
            yield read_hf_config(folder), convert_recipe({**plan.values, "policy": policy})
        except UserError as error:
            raise UserError(str(error).replace(folder, plan.policy["model_name"])) from None
