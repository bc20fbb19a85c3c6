"""Read the precision of trainer, engine and KV cache from the keys of a NeMo RL recipe.

The trainer's keys are in policy.megatron_cfg, the engine's in policy.generation.vllm_cfg. A recipe whose two FP8
formats differ is refused: their results differ more than those of a bfloat16 trainer and an FP8 engine
(docs/numerics.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.fp8rl_schema import Flow
from nemo_fp8rl.fp8 import ScaleFormat
from nemo_fp8rl.fp8.layers import Fp8Layers

FP8_CFG = "policy.megatron_cfg.fp8_cfg"
SCALES_VARIABLE = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
SCALES_KEY = f"policy.megatron_cfg.env_vars.{SCALES_VARIABLE}"
VLLM_CFG = "policy.generation.vllm_cfg"
POW2_KEYS = ("pow2_weight_scaling_factors", "pow2_activation_scaling_factors")
KV_DTYPES = ("auto", "fp8", "fp8_e4m3")

UNDECLARED_KEYS = (*(f"{VLLM_CFG}.{key}" for key in POW2_KEYS), f"{VLLM_CFG}.quantization_ignored_layer_kws")
"""Keys that NeMo RL reads, but that its config classes lack, and in some versions its examples, too."""


@dataclass(frozen=True)
class Precision:
    """The precision of a run.

    flow:          bf16, fp8_rollout (engine in FP8) or fp8_e2e (engine and trainer)
    scale_format:  of the scales of FP8 blocks; pow2 if nothing is FP8
    kv_fp8:        whether the KV cache is FP8
    fp8_param:     whether the trainer stores FP8 weights in FP8 alone
    """

    flow: Flow
    scale_format: ScaleFormat
    kv_fp8: bool
    fp8_param: bool = False


def read_precision(policy: Mapping[str, Any]) -> Precision:
    """Read the precision from a recipe's block `policy`.

    Raises: UserError, with the key and the fix, if trainer and engine do not agree, or for a format outside the
        contract (docs/numerics.md)
    """
    megatron = policy.get("megatron_cfg") or {}
    vllm = (policy.get("generation") or {}).get("vllm_cfg") or {}
    trainer_fp8, engine_fp8 = _trainer_fp8(megatron), vllm.get("precision") == "fp8"
    if trainer_fp8 and not engine_fp8:
        raise UserError(
            f"{FP8_CFG}.enabled=true trains in FP8 and {VLLM_CFG}.precision={vllm.get('precision')} samples in another "
            f"precision; set {VLLM_CFG}.precision=fp8, or {FP8_CFG}.enabled=false"
        )
    _check_engine(vllm, engine_fp8)
    of_trainer, of_engine = policy.get("precision") or "bfloat16", vllm.get("precision") or "auto"
    if of_engine not in ("fp8", "auto", of_trainer):
        raise UserError(
            f"{VLLM_CFG}.precision={of_engine} samples in another precision than policy.precision={of_trainer}, in "
            f"which the trainer computes; set {VLLM_CFG}.precision={of_trainer}"
        )
    kv_fp8 = vllm.get("kv_cache_dtype", "auto") != "auto"
    if not engine_fp8:
        return Precision("bf16", "pow2", kv_fp8)
    engine_scales = _engine_scales(vllm)
    if trainer_fp8 and (trainer_scales := _trainer_scales(megatron)) != engine_scales:
        raise UserError(
            f"{SCALES_KEY}={_scales_variable(megatron)!r} gives the trainer {_describe_scales(trainer_scales)} and "
            f"{VLLM_CFG}.{POW2_KEYS[0]}={str(engine_scales == 'pow2').lower()} the engine "
            f"{_describe_scales(engine_scales)}; set {SCALES_KEY}='0', "
            f"{VLLM_CFG}.{POW2_KEYS[0]}=true and {VLLM_CFG}.{POW2_KEYS[1]}=true"
        )
    fp8_param = trainer_fp8 and bool(megatron["fp8_cfg"].get("fp8_param"))
    return Precision("fp8_e2e" if trainer_fp8 else "fp8_rollout", engine_scales, kv_fp8, fp8_param)


def engine_fp8_layers(vllm_cfg: Mapping[str, Any], num_hidden_layers: int) -> Fp8Layers:
    """Return the layers that the block policy.generation.vllm_cfg makes FP8 in the engine."""
    if vllm_cfg.get("precision") != "fp8":
        return Fp8Layers.none()
    first, last = (vllm_cfg.get(f"num_{side}_layers_in_bf16") or 0 for side in ("first", "last"))
    words = tuple(vllm_cfg.get("quantization_ignored_layer_kws") or ())
    return Fp8Layers(first, num_hidden_layers - last, words)


def _trainer_fp8(megatron: Mapping[str, Any]) -> bool:
    fp8 = megatron.get("fp8_cfg") or {}
    if not fp8.get("enabled"):
        return False
    if not megatron.get("enabled"):
        raise UserError(f"{FP8_CFG}.enabled=true needs the Megatron trainer; set policy.megatron_cfg.enabled=true")
    for key, expected in (("fp8", "e4m3"), ("fp8_recipe", "blockwise")):
        if fp8.get(key, expected) != expected:
            raise UserError(
                f"{FP8_CFG}.{key}={fp8[key]} is not the format of the engine's weights; set it to {expected}"
            )
    return True


def _check_engine(vllm: Mapping[str, Any], engine_fp8: bool) -> None:
    if vllm.get("is_mx"):
        raise UserError(f"{VLLM_CFG}.is_mx=true (MXFP8) has one scale for 32 values, not for 128; set it to false")
    kv = vllm.get("kv_cache_dtype", "auto")
    if kv not in KV_DTYPES:
        raise UserError(f"{VLLM_CFG}.kv_cache_dtype={kv} is not supported; set it to {' or '.join(KV_DTYPES[:2])}")
    if kv != "auto" and not engine_fp8:
        raise UserError(
            f"{VLLM_CFG}.kv_cache_dtype={kv} needs {VLLM_CFG}.precision=fp8 in NeMo RL; set that, or "
            "kv_cache_dtype=auto"
        )
    for key in ("num_first_layers_in_bf16", "num_last_layers_in_bf16"):
        if not isinstance(vllm.get(key, 0), int) or vllm.get(key, 0) < 0:
            raise UserError(f"{VLLM_CFG}.{key}={vllm[key]!r} must be a whole number, 0 or more")
    words = vllm.get("quantization_ignored_layer_kws") or []
    if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) and word for word in words):
        raise UserError(f"{VLLM_CFG}.quantization_ignored_layer_kws={words!r} must be a list of words")


def _engine_scales(vllm: Mapping[str, Any]) -> ScaleFormat:
    weight, activation = (bool(vllm.get(key, False)) for key in POW2_KEYS)
    if weight != activation:
        raise UserError(
            f"{VLLM_CFG}.{POW2_KEYS[0]}={str(weight).lower()} and {VLLM_CFG}.{POW2_KEYS[1]}={str(activation).lower()} "
            "give weights and activations different scales; set both to true"
        )
    return "pow2" if weight else "fp32"


def _scales_variable(megatron: Mapping[str, Any]) -> str:
    return str((megatron.get("env_vars") or {}).get(SCALES_VARIABLE, "0"))


def _trainer_scales(megatron: Mapping[str, Any]) -> ScaleFormat:
    """Return the format that the variable chooses.

    Transformer Engine reads "1" as yes and every other text as no (common/recipe/__init__.py).
    """
    value = _scales_variable(megatron)
    if value not in ("0", "1"):
        raise UserError(f"{SCALES_KEY}={value!r} must be '0' (powers of two) or '1' (float32)")
    return "fp32" if value == "1" else "pow2"


def _describe_scales(scales: ScaleFormat) -> str:
    return "power-of-two scales" if scales == "pow2" else "float32 scales"
