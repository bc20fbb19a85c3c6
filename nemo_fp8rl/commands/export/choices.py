"""The choices of an export: those of the options, and where an option is left out, those of the checkpoint's run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import yaml

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.yaml_tree import file_errors, flatten
from nemo_fp8rl.fp8 import FLOW_FORMATS, FP8, Format, ScaleFormat, with_lines

FLOW, SCALE_FORMAT, WEIGHT_BLOCK = "nemo_fp8rl.flow", "nemo_fp8rl.scale_format", "nemo_fp8rl.weight_block"
VLLM = "policy.generation.vllm_cfg"
BF16 = "bf16"
Place = Literal["merged", "beside"]
"""Of adapters: in the weights, or in a folder beside them."""
WEIGHT_BLOCKS = ("square", "line")


@dataclass(frozen=True)
class Choices:
    """How an export quantizes.

    is_bf16:     True quantizes no layer; `format` has no meaning then
    first, last: numbers of layers that stay in bfloat16
    recipe:      the recipe of the run that made the checkpoint, where it quantized; else None
    """

    format: Format
    scale_format: ScaleFormat
    first: int
    last: int
    ignored: tuple[str, ...]
    recipe: Path | None
    is_bf16: bool = False


def choose(
    checkpoint: Path,
    format: str | None = None,
    scale_format: str | None = None,
    weight_block: str | None = None,
    first: int | None = None,
    last: int | None = None,
    ignored: Sequence[str] | None = None,
    adapters: Place | None = None,
) -> Choices:
    """Return the choices for a checkpoint; None stands for the run's choice, or for the default outside a run.

    adapters:  where the adapters of the checkpoint go; None has none
    Raises:    UserError if a choice does not exist, or if the recipe of the run cannot be read
    """
    recipe = _recipe_of(checkpoint)
    recorded = _read(recipe) if recipe else {}
    flow = str(recorded.get(FLOW, "bf16"))
    if format == BF16 and adapters != "merged":
        raise UserError(
            "--format bf16 needs --merge: vLLM serves a bfloat16 checkpoint, with adapters or not, as it is"
        )
    if adapters and recipe and flow == "bf16" and format is None:
        if adapters == "beside":
            raise UserError(
                f"{checkpoint} has adapters over a bfloat16 base, which vLLM serves as it is: give that base to "
                f"`vllm serve` with --enable-lora --lora-modules policy={checkpoint}, or give --merge, or --format to "
                "quantize it"
            )
        return Choices(FP8, "pow2", 0, 0, (), recipe, is_bf16=True)
    if format == BF16:
        return Choices(FP8, "pow2", 0, 0, (), None, is_bf16=True)
    if flow == "bf16":
        recipe, recorded = None, {}
    run_format = flow.removesuffix("_e2e").removesuffix("_rollout") if recipe else "fp8"
    words = recorded.get(f"{VLLM}.quantization_ignored_layer_kws", ())
    choices = {
        "--format": (format or run_format, tuple(FLOW_FORMATS)),
        "--scale-format": (scale_format or recorded.get(SCALE_FORMAT, "pow2"), get_args(ScaleFormat)),
        "--weight-block": (weight_block or recorded.get(WEIGHT_BLOCK, "square"), WEIGHT_BLOCKS),
    }
    for option, (choice, possible) in choices.items():
        if choice not in possible:
            raise UserError(f"{option} {choice}: choose one of {', '.join(possible)}")
    chosen = FLOW_FORMATS[choices["--format"][0]]
    if choices["--weight-block"][0] == "line":
        if not chosen.name.startswith(("mxfp8", "nvfp4")):
            raise UserError(f"--weight-block line is of MXFP8 and NVFP4; vLLM reads {chosen.name} in blocks of 128x128")
        chosen = with_lines(chosen)
    return Choices(
        chosen,
        cast(ScaleFormat, choices["--scale-format"][0]),
        recorded.get(f"{VLLM}.num_first_layers_in_bf16", 0) if first is None else first,
        recorded.get(f"{VLLM}.num_last_layers_in_bf16", 0) if last is None else last,
        tuple(words if ignored is None else ignored),
        recipe,
    )


def _recipe_of(checkpoint: Path) -> Path | None:
    """Return the recipe of the run whose checkpoint this is: RUN/checkpoints/step_N/policy/weights, or adapter."""
    folder = checkpoint.resolve()
    parts = folder.parts[-4:]
    if len(parts) < 4 or parts[0] != "checkpoints" or parts[2] != "policy" or parts[3] not in ("weights", "adapter"):
        return None
    path = folder.parents[3] / "config.yaml"
    return path if path.is_file() else None


def _read(path: Path) -> Mapping[str, Any]:
    """Return a run's recipe by dotted key. Raises UserError."""
    try:
        return flatten(yaml.safe_load(path.read_text(encoding="utf-8")))
    except file_errors() as error:
        raise UserError(
            f"{path}, the recipe of the run, cannot be read ({' '.join(str(error).split())}); put it back, or copy the "
            "weights elsewhere and give --format"
        ) from None
