"""Read the precision of trainer, engine and KV cache from the keys of a NeMo RL recipe.

The trainer's keys are in policy.megatron_cfg, the engine's in policy.generation. A recipe whose two sides have
different quantized formats is refused: their results differ more than those of a bfloat16 trainer and a quantized
engine (docs/numerics.md). The formats, by the sources of NeMo RL:

    fp8         fp8_cfg.fp8_recipe=blockwise      vllm_cfg.precision=fp8
    mxfp8       fp8_cfg.fp8_recipe=mxfp8          the same with is_mx=true
    nvfp4       fp4_cfg, on main after 2026-08    nvfp4_pertoken_rollout, of routed experts alone, quantized in 1x16
    nvfp4_a16   policy.quant_cfg (ModelOpt)       quant_cfg with or without real_quant
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal, cast

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.fp8rl_schema import Flow
from nemo_fp8rl.fp8 import FLOW_FORMATS, Format, ScaleFormat
from nemo_fp8rl.fp8.layers import Fp8Layers
from nemo_fp8rl.fp8.names import Backward

FP8_CFG, FP4_CFG = "policy.megatron_cfg.fp8_cfg", "policy.megatron_cfg.fp4_cfg"
ENV_VARS = "policy.megatron_cfg.env_vars"
SCALES_VARIABLE = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
SCALES_KEY = f"{ENV_VARS}.{SCALES_VARIABLE}"
LINES_VARIABLE, TOKENS_VARIABLE = "NVTE_NVFP4_DISABLE_2D_QUANTIZATION", "NVTE_NVFP4_ROW_SCALED_ACTIVATION"
LINES_KEY, TOKENS_KEY = f"{ENV_VARS}.{LINES_VARIABLE}", f"{ENV_VARS}.{TOKENS_VARIABLE}"
CHOSEN_SCALES_VARIABLE, BACKWARD_VARIABLE = "NVTE_NVFP4_4OVER6", "NVTE_BACKWARD_OVERRIDE"
FP4_SWITCHES = ("NVTE_NVFP4_DISABLE_RHT", "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING")
VLLM_CFG, PER_TOKEN = "policy.generation.vllm_cfg", "policy.generation.nvfp4_pertoken_rollout"
POW2_KEYS = ("pow2_weight_scaling_factors", "pow2_activation_scaling_factors")
KV_DTYPES = ("auto", "fp8", "fp8_e4m3")
BF16_LAYERS = ("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
TE_FILE, TE_FILE_STEM = "te_precision_config_file", "attn_bf16_mlp_nvfp4"
ATTENTION = "self_attn"
WEIGHT_ONLY = {
    "W4A16_NVFP4_CFG": (),
    "nvfp4_a16": (),
    "NVFP4_MLP_WEIGHT_ONLY_CFG": (ATTENTION,),
    "nvfp4_a16_mlp_only": (ATTENTION,),
}
"""ModelOpt's configs of 4-bit weights and bfloat16 activations -> words in the names of linears they leave alone."""
REAL_QUANT_IGNORE = ("lm_head", "*output_layer*", "*mlp.gate*", "*router*", "*block_sparse_moe.gate*", "*self_attn*")
"""NeMo RL's default of real_quant_ignore, and, but for attention, the modules that are never quantized."""
RECIPES = {"blockwise": "fp8", "mxfp8": "mxfp8"}
"""fp8_cfg.fp8_recipe -> format."""
SPELLINGS = {
    "fp8": ("FP8", f"{FP8_CFG}.enabled=true with fp8_recipe=blockwise", f"{VLLM_CFG}.precision=fp8 and is_mx=false"),
    "mxfp8": ("MXFP8", f"{FP8_CFG}.enabled=true with fp8_recipe=mxfp8", f"{VLLM_CFG}.precision=fp8 and is_mx=true"),
    "nvfp4": ("NVFP4", f"{FP4_CFG}.enabled=true", f"{PER_TOKEN}.enabled=true"),
    "nvfp4_a16": ("NVFP4 weights", "policy.quant_cfg", "policy.generation.quant_cfg"),
}
"""Format -> its name, and the keys with which a recipe asks for it in trainer and engine."""
BF16_TRAINER = {"nvfp4": f"{FP4_CFG}.enabled=false", "nvfp4_a16": "policy.quant_cfg=null"}
"""Format -> how a trainer is left in bfloat16; else by fp8_cfg."""

UNDECLARED_KEYS = (
    *(f"{VLLM_CFG}.{key}" for key in (*POW2_KEYS, "quantization_ignored_layer_kws", "is_mx")),
    *(f"{FP4_CFG}.{key}" for key in ("enabled", "fp4", "fp4_recipe", "fp4_param")),
    *(f"policy.megatron_cfg.{key}" for key in (*BF16_LAYERS, TE_FILE)),
    *(f"{PER_TOKEN}.{key}" for key in ("enabled", "additional_ignore")),
    *(f"policy.generation.{key}" for key in ("quant_cfg", "real_quant", "real_quant_ignore")),
)
"""Keys that NeMo RL reads, but that its config classes lack, and in some versions its examples, too.

A version without a format does not know its keys; this package then runs the recipe with its own workers.
"""


@dataclass(frozen=True)
class Precision:
    """The precision of a run.

    flow:          as nemo_fp8rl.flow
    scale_format:  of the scales of FP8 blocks and of NVFP4's global scales; pow2 if nothing is quantized
    kv_fp8:        whether the KV cache is FP8
    fp8_param:     whether the trainer stores FP8 weights in FP8 alone
    weight_block:  as nemo_fp8rl.weight_block; None if no key of NeMo RL's says it, and that one decides
    backward:      likewise nemo_fp8rl.backward
    hadamard, stochastic_rounding: likewise of nemo_fp8rl.fp4
    """

    flow: Flow
    scale_format: ScaleFormat
    kv_fp8: bool
    fp8_param: bool = False
    weight_block: Literal["square", "line"] | None = None
    backward: Backward | None = None
    hadamard: bool | None = None
    stochastic_rounding: bool | None = None

    @property
    def format(self) -> Format | None:
        """The format of quantized weights, in blocks of squares; None if nothing is quantized."""
        return FLOW_FORMATS.get(self.flow.rpartition("_")[0])

    def complete(self, block: Mapping[str, Any]) -> dict[str, Any]:
        """Return the block nemo_fp8rl of a recipe with the keys that follow from the precision."""
        fp4 = {name: getattr(self, name) for name in ("hadamard", "stochastic_rounding")}
        keys = {name: getattr(self, name) for name in ("flow", "scale_format", "fp8_param", "weight_block", "backward")}
        keys["fp4"] = {**(block.get("fp4") or {}), **{name: value for name, value in fp4.items() if value is not None}}
        return {**block, **{name: value for name, value in keys.items() if value is not None}}


def read_precision(policy: Mapping[str, Any]) -> Precision:
    """Read the precision from a recipe's block `policy`.

    Raises: UserError, with the key and the fix, if trainer and engine do not agree, or for a format outside the
        contract (docs/numerics.md)
    """
    megatron, generation = policy.get("megatron_cfg") or {}, policy.get("generation") or {}
    vllm = generation.get("vllm_cfg") or {}
    trainer, engine = _trainer_format(policy, megatron), _engine_format(generation, vllm)
    if trainer and trainer != engine:
        name, trainer_keys, fix = SPELLINGS[trainer]
        bf16 = "another precision", "", f"{VLLM_CFG}.precision={vllm.get('precision')}"
        engine_name, _, engine_keys = SPELLINGS[engine] if engine else bf16
        raise UserError(
            f"{trainer_keys} trains in {name} and {engine_keys} samples in {engine_name}; set {fix}, or "
            f"{BF16_TRAINER.get(trainer, f'{FP8_CFG}.enabled=false')}"
        )
    _check_engine(vllm, engine in RECIPES.values())
    of_trainer, of_engine = policy.get("precision") or "bfloat16", vllm.get("precision") or "auto"
    if of_engine not in ("fp8", "auto", of_trainer):
        raise UserError(
            f"{VLLM_CFG}.precision={of_engine} samples in another precision than policy.precision={of_trainer}, in "
            f"which the trainer computes; set {VLLM_CFG}.precision={of_trainer}"
        )
    kv_fp8 = vllm.get("kv_cache_dtype", "auto") != "auto"
    if not engine:
        return Precision("bf16", "pow2", kv_fp8)
    scales = _engine_scales(vllm, engine)
    if trainer == "fp8" and (trainer_scales := _trainer_scales(megatron)) != scales:
        raise UserError(
            f"{SCALES_KEY}={_variable(megatron, SCALES_VARIABLE)!r} gives the trainer "
            f"{_describe_scales(trainer_scales)} and {VLLM_CFG}.{POW2_KEYS[0]}={str(scales == 'pow2').lower()} the "
            f"engine {_describe_scales(scales)}; set {SCALES_KEY}='0', {VLLM_CFG}.{POW2_KEYS[0]}=true and "
            f"{VLLM_CFG}.{POW2_KEYS[1]}=true"
        )
    flow = cast("Flow", f"{engine}_{'e2e' if trainer else 'rollout'}")
    if trainer:
        _check_bf16_layers(megatron, generation, vllm, engine)
    block = _weight_block(megatron, scales) if flow == "nvfp4_e2e" else None
    backward = _backward(megatron) if trainer not in ("", "fp8") else None
    is_off = [_switch(megatron, name) if flow == "nvfp4_e2e" else None for name in FP4_SWITCHES]
    fp8_param = trainer in RECIPES.values() and bool(megatron["fp8_cfg"].get("fp8_param"))
    if fp8_param and trainer != "fp8":
        raise UserError(
            f"{FP8_CFG}.fp8_param=true with fp8_recipe={megatron['fp8_cfg']['fp8_recipe']}: only blockwise FP8 weights "
            "can stand in the place of parameters; set it to false"
        )
    return Precision(flow, scales, kv_fp8, fp8_param, block, backward, *(None if o is None else not o for o in is_off))


def bf16_layer_keys(policy: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of vllm_cfg that say which linears of an engine stay in bfloat16, for any of NeMo RL's formats.

    policy: the recipe's block, which `read_precision` takes
    """
    megatron, generation = policy.get("megatron_cfg") or {}, policy.get("generation") or {}
    vllm = generation.get("vllm_cfg") or {}
    engine = _engine_format(generation, vllm)
    words = list(vllm.get("quantization_ignored_layer_kws") or ())
    first, last = (vllm.get(f"num_{side}_layers_in_bf16") or 0 for side in ("first", "last"))
    if engine == "nvfp4_a16":
        words += [word for word in WEIGHT_ONLY[_config_name(generation["quant_cfg"])] if word not in words]
    elif engine == "nvfp4":
        ignored = (generation["nvfp4_pertoken_rollout"] or {}).get("additional_ignore") or ()
        words += [word for word in (ATTENTION, *(pattern.strip("*.") for pattern in ignored)) if word not in words]
        if not ignored and _is_on(megatron.get("fp4_cfg")):
            first, last = _trainer_bf16_layers(megatron)
    counts = {"num_first_layers_in_bf16": first, "num_last_layers_in_bf16": last}
    return counts | {"quantization_ignored_layer_kws": words}


def engine_fp8_layers(policy: Mapping[str, Any], num_hidden_layers: int) -> Fp8Layers:
    """Return the layers that the block `policy` quantizes in the engine."""
    generation = policy.get("generation") or {}
    if not _engine_format(generation, generation.get("vllm_cfg") or {}):
        return Fp8Layers.none()
    first, last, words = bf16_layer_keys(policy).values()
    return Fp8Layers(first, num_hidden_layers - last, tuple(words))


def _is_on(block: Any) -> bool:
    return bool((block or {}).get("enabled"))


def _trainer_format(policy: Mapping[str, Any], megatron: Mapping[str, Any]) -> str:
    """Return the format in which the trainer multiplies, "" for bfloat16."""
    fp8, fp4, model_opt = megatron.get("fp8_cfg") or {}, megatron.get("fp4_cfg") or {}, policy.get("quant_cfg")
    switches = (f"{FP8_CFG}.enabled=true", _is_on(fp8)), (f"{FP4_CFG}.enabled=true", _is_on(fp4))
    keys = [key for key, is_on in (*switches, (f"policy.quant_cfg={model_opt}", model_opt)) if is_on]
    if not keys:
        return ""
    if len(keys) > 1:
        raise UserError(f"{keys[0]} and {keys[1]} ask for two formats of the trainer; remove one of them")
    if not megatron.get("enabled"):
        raise UserError(f"{keys[0]} needs the Megatron trainer; set policy.megatron_cfg.enabled=true")
    if model_opt:
        _check_weight_only("policy.quant_cfg", model_opt)
        return "nvfp4_a16"
    if _is_on(fp4):
        for key, expected in (("fp4", "e2m1"), ("fp4_recipe", "nvfp4"), ("fp4_param", False)):
            if fp4.get(key, expected) != expected:
                raise UserError(f"{FP4_CFG}.{key}={fp4[key]} is not supported; set it to {str(expected).lower()}")
        return "nvfp4"
    if fp8.get("fp8", "e4m3") != "e4m3":
        raise UserError(f"{FP8_CFG}.fp8={fp8['fp8']} is not the format of the engine's weights; set it to e4m3")
    recipe = fp8.get("fp8_recipe", "blockwise")
    if recipe not in RECIPES:
        raise UserError(
            f"{FP8_CFG}.fp8_recipe={recipe} is not the format of the engine's weights; set it to blockwise or mxfp8"
        )
    return RECIPES[recipe]


def _engine_format(generation: Mapping[str, Any], vllm: Mapping[str, Any]) -> str:
    """Return the format in which the engine multiplies, "" for none."""
    is_fp8, per_token = vllm.get("precision") == "fp8", _is_on(generation.get("nvfp4_pertoken_rollout"))
    if vllm.get("is_mx") and not is_fp8:
        raise UserError(f"{VLLM_CFG}.is_mx=true is a form of {VLLM_CFG}.precision=fp8; set that, or is_mx=false")
    model_opt = generation.get("quant_cfg")
    switches = (f"{VLLM_CFG}.precision=fp8", is_fp8), (f"{PER_TOKEN}.enabled=true", per_token)
    keys = [key for key, is_on in (*switches, (f"policy.generation.quant_cfg={model_opt}", model_opt)) if is_on]
    if len(keys) > 1:
        raise UserError(f"{keys[0]} and {keys[1]} ask for two formats of the engine; remove one of them")
    if model_opt:
        _check_weight_only("policy.generation.quant_cfg", model_opt)
        _check_real_quant(generation, model_opt)
        return "nvfp4_a16"
    if generation.get("real_quant"):
        raise UserError("policy.generation.real_quant=true needs policy.generation.quant_cfg, which says the format")
    return "nvfp4" if per_token else "" if not is_fp8 else "mxfp8" if vllm.get("is_mx") else "fp8"


def _config_name(quant_cfg: str) -> str:
    return PurePath(quant_cfg).name.removesuffix(".yaml").removesuffix(".yml")


def knows_quant_cfg(quant_cfg: str | None) -> bool:
    """Return whether a config of ModelOpt, by its name or its file's, has 4-bit weights and bfloat16 activations."""
    return quant_cfg is not None and _config_name(str(quant_cfg)) in WEIGHT_ONLY


def _check_weight_only(key: str, quant_cfg: str) -> None:
    if not knows_quant_cfg(quant_cfg):
        raise UserError(
            f"{key}={quant_cfg} is none of ModelOpt's configs that this package runs, which have 4-bit weights and "
            f"bfloat16 activations: set it to {', '.join(WEIGHT_ONLY)} or null, or use NeMo RL's own launcher"
        )


def _check_real_quant(generation: Mapping[str, Any], quant_cfg: str) -> None:
    """Refuse packed weights of other modules than the config's, which the trainer would quantize as well."""
    if not generation.get("real_quant"):
        return
    key, never = "policy.generation.real_quant_ignore", {pattern.strip("*") for pattern in REAL_QUANT_IGNORE}
    patterns = generation.get("real_quant_ignore")
    patterns = REAL_QUANT_IGNORE if patterns is None else patterns
    ignores_attention = any("self_att" in pattern for pattern in patterns)
    if ignores_attention != (ATTENTION in WEIGHT_ONLY[_config_name(quant_cfg)]):
        raise UserError(
            f"{key} {'leaves' if ignores_attention else 'does not leave'} attention in bfloat16 in the engine, and "
            f"policy.generation.quant_cfg={quant_cfg} the reverse: set {key}={list(REAL_QUANT_IGNORE)} with "
            "nvfp4_a16_mlp_only.yaml, or without its last pattern for nvfp4_a16.yaml"
        )
    if other := [pattern for pattern in patterns if "self_att" not in pattern and pattern.strip("*") not in never]:
        raise UserError(f"{key}: {other[0]!r} is none of {', '.join(sorted(never))}; remove it")


def _check_bf16_layers(
    megatron: Mapping[str, Any], generation: Mapping[str, Any], vllm: Mapping[str, Any], format: str
) -> None:
    """Refuse layers that only one side keeps in bfloat16, and attention that a trainer in NVFP4 would quantize."""
    first, last = _trainer_bf16_layers(megatron)
    if format != "nvfp4":
        counts = tuple(vllm.get(f"num_{side}_layers_in_bf16") or 0 for side in ("first", "last"))
        if megatron.get(BF16_LAYERS[0]) and counts != (first, last):
            raise UserError(
                f"policy.megatron_cfg.{BF16_LAYERS[0]}=true keeps {first} first and {last} last layers of the trainer "
                f"in bfloat16, and the engine has {counts[0]} and {counts[1]}: set {VLLM_CFG}.num_first_layers_in_bf16="
                f"{first} and num_last_layers_in_bf16={last}"
            )
        return
    ignored = (generation["nvfp4_pertoken_rollout"] or {}).get("additional_ignore") or []
    layers = sorted({int(part) for pattern in ignored for part in str(pattern).split(".") if part.isdecimal()})
    at_end = layers[first:]
    consecutive = not at_end or at_end == list(range(at_end[0], at_end[0] + last))
    if ignored and not (layers[:first] == list(range(first)) and len(at_end) == last and consecutive):
        raise UserError(
            f"{PER_TOKEN}.additional_ignore leaves layers {layers} in bfloat16 in the engine, and policy.megatron_cfg."
            f"{BF16_LAYERS[0]} {first} first and {last} last ones in the trainer: remove additional_ignore, and the "
            "engine follows the trainer"
        )
    if PurePath(str(megatron.get(TE_FILE))).stem != TE_FILE_STEM:
        raise UserError(
            f"policy.megatron_cfg.{TE_FILE}={megatron.get(TE_FILE)}: {FP4_CFG} would train attention in NVFP4, which "
            f"{PER_TOKEN} leaves in bfloat16; set it to examples/configs/te_precision/{TE_FILE_STEM}.yaml"
        )


def _trainer_bf16_layers(megatron: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many first and last layers a trainer keeps in bfloat16; Megatron Core's default is one of each."""
    if not megatron.get(BF16_LAYERS[0]):
        return 0, 0
    first, last = (megatron.get(key, 1) for key in BF16_LAYERS[1:])
    for key, value in zip(BF16_LAYERS[1:], (first, last), strict=True):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UserError(f"policy.megatron_cfg.{key}={value!r} must be a whole number, 0 or more")
    return first, last


def _weight_block(megatron: Mapping[str, Any], scales: ScaleFormat) -> Literal["square", "line"]:
    """Return the block of a trainer in NVFP4. Raises UserError where NeMo RL's engine would multiply other values."""
    if _variable(megatron, CHOSEN_SCALES_VARIABLE, "none") not in ("none", ""):
        raise UserError(
            f"{ENV_VARS}.{CHOSEN_SCALES_VARIABLE} chooses between two scales of a block, which the engine's kernels do "
            "not; remove it"
        )
    if scales == "fp32" and _switch(megatron, TOKENS_VARIABLE) is not True:
        raise UserError(
            f"{TOKENS_KEY} is not '1': the trainer's activations have one global scale a tensor and the engine's one a "
            f"token; set it to '1', or {VLLM_CFG}.{POW2_KEYS[0]} and {POW2_KEYS[1]} to true, with which both agree"
        )
    lines = _switch(megatron, LINES_VARIABLE)
    if lines is None:
        raise UserError(
            f"{LINES_KEY} is not set: Transformer Engine then quantizes weights in 16x16 blocks and {PER_TOKEN} in "
            "1x16; set it to '1' for 1x16 on both sides, or to '0' for 16x16 on both, which this package's workers send"
        )
    return "line" if lines else "square"


def _backward(megatron: Mapping[str, Any]) -> Backward | None:
    """Return what gradients multiply in a format other than FP8; None if the recipe does not say it."""
    value = _variable(megatron, BACKWARD_VARIABLE, "")
    if value not in ("", "dequantized", "high_precision"):
        raise UserError(f"{ENV_VARS}.{BACKWARD_VARIABLE}={value!r} must be dequantized or high_precision")
    return cast("Backward", value) if value else None


def _check_engine(vllm: Mapping[str, Any], engine_fp8: bool) -> None:
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


def _engine_scales(vllm: Mapping[str, Any], format: str) -> ScaleFormat:
    if format == "mxfp8":
        if off := next((key for key in POW2_KEYS if vllm.get(key) is False), None):
            raise UserError(f"{VLLM_CFG}.{off}=false: the scales of MXFP8 are powers of two; remove it")
        return "pow2"
    weight, activation = (bool(vllm.get(key, False)) for key in POW2_KEYS)
    if weight != activation:
        raise UserError(
            f"{VLLM_CFG}.{POW2_KEYS[0]}={str(weight).lower()} and {VLLM_CFG}.{POW2_KEYS[1]}={str(activation).lower()} "
            "give weights and activations different scales; set both to true"
        )
    return "pow2" if weight else "fp32"


def _variable(megatron: Mapping[str, Any], name: str, default: str = "0") -> str:
    return str((megatron.get("env_vars") or {}).get(name, default))


def _switch(megatron: Mapping[str, Any], name: str) -> bool | None:
    """Return what a variable of Transformer Engine's says, None if it is not set."""
    value = _variable(megatron, name, "")
    if value not in ("", "0", "1"):
        raise UserError(f"{ENV_VARS}.{name}={value!r} must be '0' or '1'")
    return None if value == "" else value == "1"


def _trainer_scales(megatron: Mapping[str, Any]) -> ScaleFormat:
    """Return the format that the variable chooses.

    Transformer Engine reads "1" as yes and every other text as no (common/recipe/__init__.py).
    """
    value = _variable(megatron, SCALES_VARIABLE)
    if value not in ("0", "1"):
        raise UserError(f"{SCALES_KEY}={value!r} must be '0' (powers of two) or '1' (float32)")
    return "fp32" if value == "1" else "pow2"


def _describe_scales(scales: ScaleFormat) -> str:
    return "power-of-two scales" if scales == "pow2" else "float32 scales"
