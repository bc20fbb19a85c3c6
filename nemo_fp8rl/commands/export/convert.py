"""Read a checkpoint tensor by tensor, quantize, and write the new folder; the package says what vLLM reads."""

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from rich.filesize import decimal
from safetensors import SafetensorError
from torch import Tensor

from nemo_fp8rl.commands.export.adapters import MergedReader, read_checkpoint_adapters
from nemo_fp8rl.commands.export.choices import Choices, Place, choose
from nemo_fp8rl.commands.export.global_scales import ExportedScales
from nemo_fp8rl.common.atomic_files import check_output, new_folder
from nemo_fp8rl.common.display import Display
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.fp8 import FP8, Format, Fp8Layers, NonFiniteError, scale_shape
from nemo_fp8rl.fp8.block_scaled import DATA_DTYPES, SCALE_DTYPES, repeat_rows
from nemo_fp8rl.fp8.layers import LAYER
from nemo_fp8rl.generation.fp8_method.quantization_config import (
    config_for_vllm_fp8,
    config_for_vllm_modelopt,
    engine_format,
)
from nemo_fp8rl.hf.checkpoint_reader import CheckpointReader
from nemo_fp8rl.hf.config_dtype import with_dtype
from nemo_fp8rl.hf.fp8_layers import QUERIES, check_ignored, fused_sizes, unaligned_projections
from nemo_fp8rl.hf.hub import TOKENIZER_FILES
from nemo_fp8rl.hf.model_config import HfConfig, checkpoint_hint, read_hf_config
from nemo_fp8rl.hf.model_tensors import EMBEDDING, expected_tensors
from nemo_fp8rl.hf.storage.shard_writer import ShardWriter, TensorSpec
from nemo_fp8rl.refit.sender.checkpoint_form import to_checkpoint_form

COPIED_FILES = ("generation_config.json", *TOKENIZER_FILES)
MATRIX = 2
"""Dimensions of a linear layer's weight."""
EXPERT = re.compile(r"(\.mlp\.experts)\.\d+\..*")


INPUT_SCALE = 2.0**-4
"""The global scale of all activations of a layer, where vLLM takes it from the checkpoint."""


def export(
    checkpoint: Path,
    output: Path,
    scale_format: str | None = None,
    num_first_layers_in_bf16: int | None = None,
    num_last_layers_in_bf16: int | None = None,
    ignored_layer_kws: Sequence[str] | None = None,
    format: str | None = None,
    weight_block: str | None = None,
    merge: bool = False,
) -> bool:
    """Quantize a bfloat16 checkpoint into the new folder `output`; returns True.

    One file of tensors (`hf.storage.shard_writer.FILE_BYTES`) is in memory at a time. `output` appears complete or not
    at all: the export writes to a folder next to it, which is removed after an error, or after a kill by the next
    export.

    checkpoint:  an HF folder of a supported family, or the folder of a run's adapters
    merge:       True adds the adapters to the weights of their base, False copies them beside the base
    further:     None is the choice of the run that made the checkpoint; see `choices.choose`
    Raises:      UserError if the checkpoint cannot be read (see `read_hf_config`, `CheckpointReader`), is not bfloat16
                 or not finite, or has sizes that do not fit vLLM's blocks; if `output` is not empty or not writable
    """
    output = Path(os.path.abspath(output))
    check_output(output)
    bf16_layers = num_first_layers_in_bf16, num_last_layers_in_bf16, ignored_layer_kws
    adapters = read_checkpoint_adapters(checkpoint)
    if merge and adapters is None:
        raise UserError(f"--merge: --checkpoint {checkpoint} is no folder of adapters; leave --merge out")
    place: Place | None = None if adapters is None else "merged" if merge else "beside"
    choices = choose(checkpoint, format, scale_format, weight_block, *bf16_layers, place)
    source = checkpoint if adapters is None else adapters.base
    if not (source / "config.json").is_file():
        raise UserError(
            f"--checkpoint {checkpoint} has no config.json; give an HF checkpoint folder{checkpoint_hint(checkpoint)}"
        )
    if adapters and not merge:
        adapters.check_served_beside()
    hf = read_hf_config(source)
    fp8_layers = Fp8Layers.none() if choices.is_bf16 else _choose_fp8_layers(hf, choices)
    shapes = expected_tensors(hf)
    config = with_dtype(json.loads((source / "config.json").read_text()), "bfloat16")
    if not choices.is_bf16:
        config["quantization_config"] = _quantization_config(shapes, fp8_layers, choices)
    with MergedReader(adapters) if adapters and merge else CheckpointReader(source) as reader:
        reader.check(shapes)
        for name in shapes:
            if reader.dtype(name) != "BF16":
                raise UserError(
                    f"{source}: {name} is {reader.dtype(name)}, only bfloat16 is exported; convert the checkpoint"
                )
        with new_folder(output, (OSError, SafetensorError)) as partial:
            with ShardWriter(partial, _make_specs(shapes, fp8_layers, choices.format)) as writer:
                _check_space(output, writer.nbytes)
                scales = ExportedScales(reader, choices, None if adapters else checkpoint.parent)
                _quantize(reader, shapes, writer, fp8_layers, choices, scales)
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            for folder in dict.fromkeys((source, checkpoint)):  # the run's tokenizer is beside its adapters
                for path in (path for pattern in COPIED_FILES for path in folder.glob(pattern)):
                    (partial / path.name).write_bytes(_read_bytes(path))
            if adapters and not merge:
                adapters.copy_to(partial)
    files = f"{len(writer.files)} files" if len(writer.files) > 1 else "1 file"
    layers = f"{fp8_layers.count} of {hf.num_hidden_layers} layers in {_title(choices.format)}"
    layers = "bfloat16" if choices.is_bf16 else layers
    reason = f", as {choices.recipe} says where no option does" if choices.recipe else ""
    print(f"wrote {output}: {layers}, {decimal(writer.nbytes)} in {files}{reason}")
    if adapters and not merge:
        print(f"serve it by: {adapters.command(output)}")
    return True


def served_modules(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield vLLM's linear module of each tensor (name -> shape); all experts of a layer give the same module."""
    for name, shape in shapes.items():
        if len(shape) == MATRIX and name != EMBEDDING:
            yield EXPERT.sub(r"\1", name.removesuffix(".weight"))


def _title(format: Format) -> str:
    return "FP8" if format == FP8 else format.name.upper()


def _quantization_config(
    shapes: Mapping[str, tuple[int, ...]], fp8_layers: Fp8Layers, choices: Choices
) -> dict[str, object]:
    if choices.format == FP8:
        return config_for_vllm_fp8(served_modules(shapes), choices.scale_format, fp8_layers)
    return config_for_vllm_modelopt(served_modules(shapes), choices.scale_format, fp8_layers, choices.format)


def _choose_fp8_layers(hf: HfConfig, choices: Choices) -> Fp8Layers:
    """Return the layers to quantize. Raises UserError if there are none, or if vLLM's blocks do not fit them."""
    first, last = choices.first, choices.last
    if min(first, last) < 0 or first + last >= hf.num_hidden_layers:
        raise UserError(
            f"--num-first-layers-in-bf16 {first} and --num-last-layers-in-bf16 {last} must leave an FP8 layer of the "
            f"model's {hf.num_hidden_layers}, and be 0 or more"
        )
    key = "--quantization-ignored-layer-kws"
    layers = Fp8Layers(first, hf.num_hidden_layers - last, choices.ignored)
    check_ignored(hf, layers, key)
    fused = fused_sizes(hf)
    sizes = fused | {"o_proj": (QUERIES, hf.num_attention_heads * hf.head_dim)}
    inputs = dict.fromkeys(fused, ("hidden_size", hf.hidden_size))
    (rows, columns), title = choices.format.weight_block, _title(choices.format)
    for unit, widths in ((rows, fused), (columns, sizes), (columns, inputs)):
        for word, name, size in unaligned_projections(hf, layers, widths, unit):
            raise UserError(
                f"this model has no {'blockwise FP8' if title == 'FP8' else title} form: its {name}={size} is not a "
                f"multiple of {unit}, so vLLM's blocks do not fit; keep that in bfloat16 by {key} {word}, or serve its "
                "bfloat16 checkpoint"
            )
    return layers


def _make_specs(shapes: Mapping[str, tuple[int, ...]], fp8_layers: Fp8Layers, format: Format) -> dict[str, TensorSpec]:
    specs = {}
    for name, shape in shapes.items():
        if not fp8_layers.quantizes(name):
            specs[name] = TensorSpec(torch.bfloat16, shape)
            continue
        block = engine_format(format).weight_block
        specs[name] = TensorSpec(DATA_DTYPES[format.element], format.data_shape(shape))
        specs[format.scale_name(name)] = TensorSpec(SCALE_DTYPES[format.scale], scale_shape(shape, block))
        if format.has_global:
            specs[format.global_name(name)] = TensorSpec(torch.float32, ())
        if _takes_input_scale(format):
            specs[input_scale_name(name)] = TensorSpec(torch.float32, ())
    return specs


def _takes_input_scale(format: Format) -> bool:
    return format.has_global and format.token_block is not None


def input_scale_name(weight: str) -> str:
    """Return the name of the global scale of the activations that multiply a weight."""
    return weight.removesuffix("weight") + "input_scale"


def _engine_form(name: str, tensors: dict[str, Tensor], rows: int, format: Format) -> dict[str, Tensor]:
    """Return a refit's tensors of a weight of so many rows as vLLM's own method reads them."""
    if (scales := format.scale_name(name)) not in tensors:
        return tensors
    repeats = format.weight_block[0] // format.engine_rows
    tensors[scales] = repeat_rows(tensors[scales], repeats, -(-rows // format.engine_rows))
    if _takes_input_scale(format):
        tensors[input_scale_name(name)] = torch.tensor(INPUT_SCALE)
    return tensors


def _quantize(
    reader: CheckpointReader | MergedReader,
    names: Collection[str],
    writer: ShardWriter,
    fp8_layers: Fp8Layers,
    choices: Choices,
    scales: ExportedScales,
) -> None:
    """Quantize tensor by tensor from `reader` to `writer`."""
    written, layer = 0, None
    with Display("export", len(names)) as display:
        for number, name in enumerate(names, 1):
            try:
                weight, encode = reader.get(name), scales.encode(name) if fp8_layers.quantizes(name) else None
                how = choices.scale_format, choices.format, encode
                tensors = to_checkpoint_form(name, weight, fp8_layers, *how)
                tensors = _engine_form(name, tensors, weight.size(0), choices.format)
            except NonFiniteError as error:
                raise UserError(
                    f"{reader.folder}: {name}: {error}; give a checkpoint from before training diverged, or copy this "
                    "one again if it is damaged"
                ) from None
            for key, tensor in tensors.items():
                writer.write(key, tensor)
                written += tensor.nbytes
            before, layer = layer, LAYER.search(name)
            if number == len(names) or (before and layer and before[1] != layer[1]):
                display.show_step(number, {"written": decimal(written)})


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); mend it or take it out of the checkpoint") from None


def _check_space(output: Path, nbytes: int) -> None:
    """Raise UserError if the disk is too small, before an hour of work."""
    free = shutil.disk_usage(output.parent).free
    if free < nbytes:
        raise UserError(
            f"--output {output}: {decimal(free)} are free there, the export takes {decimal(nbytes)}; make room or give "
            "another folder"
        )
