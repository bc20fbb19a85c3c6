"""Checks that trainer and engine compute in the same precision, layer by layer, and that a correction covers the rest.

Sources: docs/numerics.md for the cost of a disagreement; NeMo RL's own conditions on FP8 generation and on an FP8 KV
cache stand in `setup` of https://github.com/NVIDIA-NeMo/RL/blob/main/nemo_rl/algorithms/grpo.py.
"""

import re
from collections.abc import Iterator

from nemo_fp8rl.commands.doctor.finding import Finding
from nemo_fp8rl.commands.doctor.recipe_plan import ENGINE, Plan
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.fp8.layers import LAYER
from nemo_fp8rl.nemo_rl.recipe.gpu_division import is_asynchronous
from nemo_fp8rl.nemo_rl.recipe.precision import knows_quant_cfg, read_precision
from nemo_fp8rl.nemo_rl.recipe.recipe_checks import why_corrections_conflict
from nemo_fp8rl.nemo_rl.stock.stock_limits import why_kv_scales_unsupported

TOPIC = "precision"
FLOAT32_SCALES = (
    "float32 scales: quantizers of trainer and engine differ in a third of the activations' scales; power-of-two "
    "scales agree to the bit"
)
FLOAT32_GLOBALS = (
    "float32 global scales follow the largest value of a tensor, so that ranks which share one have different scales "
    f"and deltas are large; with {ENGINE}.pow2_weight_scaling_factors=true and pow2_activation_scaling_factors=true "
    "values do not depend on the global scale"
)


def check_format(plan: Plan) -> list[Finding]:
    """Return a finding if NeMo RL quantizes by a config of ModelOpt's that this package does not run; else [].

    `quant_cfg` takes other workers and engines (nemo_rl/modelopt/), whatever the FP8 keys state, so this finding
    replaces those on precision, memory and hardware.
    """
    sides = {"policy": plan.policy, "policy.generation": plan.generation}
    configs = {f"{side}.quant_cfg": block.get("quant_cfg") for side, block in sides.items()}
    keys = [f"{key}={config}" for key, config in configs.items() if config and not knows_quant_cfg(config)]
    if not keys:
        return []
    text = "one of ModelOpt's formats, none that the doctor knows: it says nothing of precision, memory and hardware"
    return [Finding("warn", TOPIC, f"{' and '.join(keys)}: {text}")]


def check_agreement(plan: Plan) -> Iterator[Finding]:
    try:
        precision = read_precision(plan.policy)
    except UserError as error:
        yield Finding("error", TOPIC, str(error))
    else:
        scales = f", {precision.scale_format} scales" if plan.quantizes_rollout else ""
        rest = plan.policy.get("precision") or "bfloat16"
        other = "" if rest == "bfloat16" else f", {rest} for the rest"
        cache = "FP8" if precision.kv_fp8 else rest
        yield Finding("ok", TOPIC, f"{precision.flow}{scales}{other}, {cache} KV cache")
        if precision.flow != "bf16" and precision.scale_format == "fp32":
            yield Finding("warn", TOPIC, FLOAT32_GLOBALS if plan.format.has_global else FLOAT32_SCALES)
    yield from _layers(plan)
    yield from _correction(plan)
    if plan.kv_fp8:
        yield from _cache(plan)


def _layers(plan: Plan) -> Iterator[Finding]:
    """Yield a finding on linears that are FP8 in the trainer alone."""
    if not (plan.quantizes_training and plan.quantizes_rollout):
        return
    weights = [weight for i in range(plan.shape.layers) for weight in plan.shape.layer(i)]
    differ = [w.name for w in weights if plan.is_fp8_in_trainer(w) and not plan.is_fp8_in_engine(w)]
    if differ:
        kinds = list(dict.fromkeys(re.sub(r".*?\.\d+\.", "", name).removesuffix(".weight") for name in differ))
        layers = sorted({int(number[1]) for name in differ if (number := LAYER.search(name))})
        yield Finding(
            "warn",
            TOPIC,
            f"{', '.join(kinds)} of layers {layers[0]} to {layers[-1]} are bfloat16 in the engine by {ENGINE}."
            "quantization_ignored_layer_kws and FP8 in NeMo RL's trainer, which has no such list",
        )
    else:
        yield Finding("ok", TOPIC, "the same linears are quantized in trainer and engine")


def _correction(plan: Plan) -> Iterator[Finding]:
    if not plan.quantizes_rollout:
        return
    loss, correction = plan.values["loss_fn"], plan.values["nemo_fp8rl"]["correction"]
    if correction is not None:
        if is_asynchronous(plan.values):  # the asynchronous loop needs the key: `recipe_checks.loss_keys`
            if refusal := why_corrections_conflict(plan.values):
                yield Finding("error", TOPIC, refusal)
        elif loss.get("use_importance_sampling_correction"):
            yield Finding(
                "error",
                TOPIC,
                "nemo_fp8rl.correction contradicts loss_fn.use_importance_sampling_correction: set that to false, and "
                "loss_fn.truncated_importance_sampling_type to null",
            )
    elif not loss.get("use_importance_sampling_correction"):
        yield _missing_correction(plan)
    elif not loss.get("truncated_importance_sampling_type"):
        yield Finding(
            "warn",
            TOPIC,
            "loss_fn.truncated_importance_sampling_type=null leaves weights without a bound: one unlucky token can "
            "rule a batch; set it to tis and truncated_importance_sampling_ratio=2",
        )


def _missing_correction(plan: Plan) -> Finding:
    """Return the finding on a run without correction, which NeMo RL's `setup` requires for an FP8 engine."""
    key = "loss_fn.use_importance_sampling_correction=false"
    asynchronous = is_asynchronous(plan.values)
    if plan.uses_package_workers or (plan.values["nemo_fp8rl"]["workers"] == "nemo_rl" and not asynchronous):
        return Finding(
            "warn",
            TOPIC,
            f"{key}: nothing weighs a token by how far trainer and engine disagree about it; set it to true",
        )
    return Finding(
        "error",
        TOPIC,
        f"{key}: NeMo RL does not start {'its asynchronous loop' if asynchronous else 'an FP8 engine'} without; set it "
        "to true, with truncated_importance_sampling_type=tis and truncated_importance_sampling_ratio=2",
    )


def _cache(plan: Plan) -> Iterator[Finding]:
    if not plan.uses_package_workers:
        yield from (Finding("error", TOPIC, refusal) for refusal in why_kv_scales_unsupported(plan.values))
    kv = plan.values["nemo_fp8rl"]["kv"]
    if not plan.quantizes_training or kv == "rollout":
        yield Finding(
            "warn",
            TOPIC,
            "the trainer's attention reads keys and values in bfloat16, the engine's in FP8; see nemo_fp8rl.kv",
        )
