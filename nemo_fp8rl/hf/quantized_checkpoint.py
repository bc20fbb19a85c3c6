"""The refusal of quantized checkpoints: training starts from bfloat16, and the sentence says what the checkpoint is.

Two kinds are named because an engine would serve them without a word, and no trainer here would agree with it:

- MXFP8 by the OCP specification, whose scales are rounded down: the scaled amax of a block is in 256 ... 512 and
  saturates at 448, while scales that are rounded up leave it in 224 ... 448. So with rounding down no block's largest
  code is below 256, and that of a quarter of the blocks is 448; with rounding up it is below 256 in a seventh of the
  blocks, and 448 in a twentieth.
- NVFP4 whose projections of one fused layer have different global scales: vLLM takes the largest of q, k and v, or of
  gate and up, for all of them, and does not quantize again (compressed_tensors and modelopt linear methods).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.fp8 import MXFP8
from nemo_fp8rl.hf.hub import WEIGHTS

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
GLOBALS = (".weight_scale_2", ".weight_global_scale")
"""ModelOpt's name of a global scale, and that of compressed-tensors, which divides."""
CODE_OF_256, CODE_OF_448 = 0x78, 0x7E
E8M0 = ("U8", "F8_E8M0")
"""Safetensors' dtypes of MXFP8's scales."""
MIN_BLOCKS = 64
MANY_SATURATED = 0.12
"""A share of blocks between what rounding up and rounding down of scales give."""
MAX_TENSORS = 8
"""Weights that are read; each has thousands of blocks."""
FIX = "give the bfloat16 checkpoint that it was made from"


def refuse_quantized(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise UserError, with format and rule, if the checkpoint is quantized. config: what config.json holds."""
    block, beside = config.get("quantization_config"), folder / "hf_quant_config.json"
    if block is None and not beside.exists():
        return
    check_rules(folder)
    if block is not None:
        raise UserError(f"{folder} is already quantized{_describe(block)}; {FIX}")
    try:
        described = _describe(json.loads(beside.read_text()).get("quantization"))
    except (OSError, ValueError, AttributeError):
        described = ""
    raise UserError(f"{folder} has {beside.name}, by which vLLM takes it for quantized{described}; {FIX}")


def check_rules(folder: Path) -> None:
    """Raise UserError, with file and tensor, for MXFP8 by OCP's rule or NVFP4 with unlike global scales."""
    from safetensors import SafetensorError, safe_open

    global_scales: dict[str, tuple[Path, float]] = {}
    for path in sorted(folder.glob(WEIGHTS)):
        try:
            with safe_open(path, framework="pt") as opened:
                for name in _mxfp8_weights(opened)[:MAX_TENSORS]:
                    _check_rounding(path, name, opened)
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    if name.endswith(GLOBALS):
                        global_scales[name] = path, float(opened.get_tensor(name).max())
        except (SafetensorError, OSError):
            return  # the reader of the checkpoint names a file that is not whole
    _check_global_scales(global_scales)


def _describe(block: Any) -> str:
    """Return the format that a quantization_config names, in parentheses, or "" if it names none."""
    if not isinstance(block, Mapping):
        return ""
    method = block.get("quant_method")
    words = [block.get("quant_algo") or block.get("format") or block.get("fmt"), method and f"quant_method {method}"]
    return f" ({', '.join(str(word) for word in words if word)})" if any(words) else ""


def _mxfp8_weights(opened: Any) -> list[str]:
    """Return the names of E4M3 weights with one byte for the scale of a block."""
    dtypes = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118 (not a dict)
    weights = (name for name, dtype in dtypes.items() if dtype == "F8_E4M3" and name.endswith(".weight"))
    return sorted(name for name in weights if dtypes.get(MXFP8.scale_name(name)) in E8M0)


def _check_rounding(path: Path, name: str, opened: Any) -> None:
    import torch

    codes = opened.get_tensor(name).view(torch.uint8) & 0x7F
    scales = opened.get_tensor(MXFP8.scale_name(name))
    if codes.dim() != 2 or scales.dim() != 2 or codes.size(1) % scales.size(1):
        return
    largest = codes.view(codes.size(0), scales.size(1), -1).amax(2)
    largest = largest[largest > 0]
    saturated = float((largest == CODE_OF_448).float().mean()) if largest.numel() else 0.0
    if largest.numel() >= MIN_BLOCKS and saturated > MANY_SATURATED and bool((largest >= CODE_OF_256).all()):
        raise UserError(
            f"{path}: {name} is MXFP8 by the rule of OCP's specification, which rounds scales down (elements saturate "
            f"in {saturated:.0%} of its blocks); here scales are rounded up, as by Transformer Engine and vLLM: {FIX}"
        )


def _check_global_scales(scales: Mapping[str, tuple[Path, float]]) -> None:
    """Raise UserError if projections of one fused layer differ. scales: file and value by the tensor's name."""
    for name, (path, _) in scales.items():
        for parts in FUSED:
            prefix, first, suffix = name.rpartition(parts[0])
            names = {prefix + part: prefix + part + suffix for part in parts} if first else {}
            values = {part: scales[whole][1] for part, whole in names.items() if whole in scales}
            if len(set(values.values())) > 1:
                listing = ", ".join(f"{part} {value:g}" for part, value in values.items())
                raise UserError(
                    f"{path}: NVFP4 with different global scales in one fused layer ({listing}), of which vLLM takes "
                    f"the largest for all, without quantizing again; {FIX}"
                )
