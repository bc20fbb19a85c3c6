"""`nemo-fp8rl export`: convert a bfloat16 HF checkpoint to an HF FP8 checkpoint that vLLM serves without this package.

The bytes equal those of a refit of the same weights (`refit.checkpoint_form`). The format relies on these facts, read
in the source of vLLM 0.32.0:

- `Fp8Config.from_config` (model_executor/layers/quantization/fp8.py) reads `quant_method: fp8`, `activation_scheme`,
  `weight_block_size` and, without `ignored_layers`, `modules_to_not_convert`; it ignores other keys. E4M3 is its only
  format; `fmt` is written because the checkpoints of DeepSeek and Qwen have it.
- With a block size, `Fp8LinearMethod.create_weights` and `Fp8MoEMethod.create_weights` (same file) store the scales as
  float32 `weight_scale_inv` of ceil(N / 128) x ceil(K / 128), which multiply the weight; the loaders of fused layers
  place `q_proj`, `gate_proj`, `experts.3.up_proj` and so on, and their scales, by the names of a bfloat16 checkpoint.
- Every linear layer that is not listed becomes FP8. The router `mlp.gate` is therefore listed too: no checkpoint has
  its scale. `is_layer_skipped` (layers/quantization/utils/quant_utils.py) compares whole module names; for a fused
  module (`qkv_proj`, `gate_up_proj`) all parts or none must be listed; the experts of a layer count as one module,
  `mlp.experts`. Embedding, norms and `lm_head` are no `LinearBase`, so vLLM does not quantize them; the head is listed
  for transformers, which would convert it.
- The parts of a fused module start at a multiple of 128 rows, and so do the parts of an expert
  (`validate_fp8_block_shape` and `validate_fp8_block_shape_moe`, layers/quantization/utils/fp8_utils.py).

`scale_format` and `fp8_layers` serve this package's method on a CPU: `LLM(folder, quantization="nemo_fp8rl")`. The
scales of an FP8 KV cache are not exported: they depend on the prompts of a rollout.
"""

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from rich.filesize import decimal
from safetensors import SafetensorError

from nemo_fp8rl.common.atomic_files import check_output, new_folder
from nemo_fp8rl.common.display import Display
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.fp8 import BLOCK, Fp8Layers, NonFiniteError, ScaleFormat, scale_name, scale_shape
from nemo_fp8rl.fp8.block_scaled import E4M3
from nemo_fp8rl.fp8.layers import LAYER
from nemo_fp8rl.generation.fp8_method.quantization_config import config_for_vllm_fp8
from nemo_fp8rl.hf.checkpoint_reader import CheckpointReader
from nemo_fp8rl.hf.config_dtype import with_dtype
from nemo_fp8rl.hf.fp8_layers import QUERIES, check_ignored, fused_sizes, unaligned_projections
from nemo_fp8rl.hf.hub import TOKENIZER_FILES
from nemo_fp8rl.hf.model_config import HfConfig, checkpoint_hint, read_hf_config
from nemo_fp8rl.hf.model_tensors import EMBEDDING, expected_tensors
from nemo_fp8rl.hf.shard_writer import ShardWriter, TensorSpec
from nemo_fp8rl.refit.checkpoint_form import to_checkpoint_form

COPIED_FILES = ("generation_config.json", *TOKENIZER_FILES)
EXPERT = re.compile(r"(\.mlp\.experts)\.\d+\..*")


def export(
    checkpoint: Path,
    output: Path,
    scale_format: str = "pow2",
    num_first_layers_in_bf16: int = 0,
    num_last_layers_in_bf16: int = 0,
    ignored_layer_kws: Sequence[str] = (),
) -> bool:
    """Quantize a bfloat16 checkpoint into the new folder `output`; returns True.

    One file of tensors (`hf.shard_writer.FILE_BYTES`) is in memory at a time. `output` appears complete or not at all:
    the export writes to a folder next to it, which is removed after an error, or after a kill by the next export.

    checkpoint:  an HF folder of a supported family
    Raises:      UserError if the checkpoint cannot be read (see `read_hf_config`, `CheckpointReader`), is not bfloat16
                 or not finite, or has sizes that do not fit vLLM's blocks; if `output` is not empty or not writable
    """
    output = Path(os.path.abspath(output))
    check_output(output)
    if scale_format not in get_args(ScaleFormat):
        raise UserError(f"--scale-format {scale_format}: choose one of {', '.join(get_args(ScaleFormat))}")
    if not (checkpoint / "config.json").is_file():
        raise UserError(
            f"--checkpoint {checkpoint} has no config.json; give an HF checkpoint folder{checkpoint_hint(checkpoint)}"
        )
    hf = read_hf_config(checkpoint)
    fp8_layers = _choose_fp8_layers(hf, num_first_layers_in_bf16, num_last_layers_in_bf16, tuple(ignored_layer_kws))
    shapes = expected_tensors(hf)
    config = with_dtype(json.loads((checkpoint / "config.json").read_text()), "bfloat16")
    config["quantization_config"] = config_for_vllm_fp8(served_modules(shapes), scale_format, fp8_layers)
    with CheckpointReader(checkpoint) as reader:
        reader.check(shapes)
        for name in shapes:
            if reader.dtype(name) != "BF16":
                raise UserError(
                    f"{checkpoint}: {name} is {reader.dtype(name)}, only bfloat16 is exported; convert the checkpoint"
                )
        with new_folder(output, (OSError, SafetensorError)) as partial:
            with ShardWriter(partial, _make_specs(shapes, fp8_layers)) as writer:
                _check_space(output, writer.nbytes)
                _quantize(reader, shapes, writer, scale_format, fp8_layers)
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            for path in (path for pattern in COPIED_FILES for path in checkpoint.glob(pattern)):
                (partial / path.name).write_bytes(_read_bytes(path))
    files = f"{len(writer.files)} files" if len(writer.files) > 1 else "1 file"
    layers = f"{fp8_layers.count} of {hf.num_hidden_layers} layers in FP8"
    print(f"wrote {output}: {layers}, {decimal(writer.nbytes)} in {files}")
    return True


def served_modules(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield vLLM's linear module of each tensor (name -> shape); all experts of a layer give the same module."""
    for name, shape in shapes.items():
        if len(shape) == len(BLOCK) and name != EMBEDDING:
            yield EXPERT.sub(r"\1", name.removesuffix(".weight"))


def _choose_fp8_layers(hf: HfConfig, first: int, last: int, ignored: tuple[str, ...]) -> Fp8Layers:
    """Return the layers to quantize. Raises UserError if there are none, or if vLLM's blocks do not fit them."""
    if min(first, last) < 0 or first + last >= hf.num_hidden_layers:
        raise UserError(
            f"--num-first-layers-in-bf16 {first} and --num-last-layers-in-bf16 {last} must leave an FP8 layer of the "
            f"model's {hf.num_hidden_layers}, and be 0 or more"
        )
    layers, key = Fp8Layers(first, hf.num_hidden_layers - last, ignored), "--quantization-ignored-layer-kws"
    check_ignored(hf, layers, key)
    fused = fused_sizes(hf)
    sizes = fused | {"o_proj": (QUERIES, hf.num_attention_heads * hf.head_dim)}
    inputs = dict.fromkeys(fused, ("hidden_size", hf.hidden_size))
    for word, name, size in (*unaligned_projections(hf, layers, sizes), *unaligned_projections(hf, layers, inputs)):
        raise UserError(
            f"this model has no blockwise FP8 form: its {name}={size} is not a multiple of {BLOCK[0]}, so vLLM's "
            f"blocks do not fit; keep that in bfloat16 by {key} {word}, or serve its bfloat16 checkpoint"
        )
    return layers


def _make_specs(shapes: Mapping[str, tuple[int, ...]], fp8_layers: Fp8Layers) -> dict[str, TensorSpec]:
    specs = {}
    for name, shape in shapes.items():
        quantized = fp8_layers.quantizes(name)
        specs[name] = TensorSpec(E4M3 if quantized else torch.bfloat16, shape)
        if quantized:
            specs[scale_name(name)] = TensorSpec(torch.float32, scale_shape(shape, BLOCK))
    return specs


def _quantize(
    reader: CheckpointReader, names: Collection[str], writer: ShardWriter, scale_format: Any, fp8_layers: Fp8Layers
) -> None:
    """Quantize tensor by tensor from `reader` to `writer`."""
    written, layer = 0, None
    with Display("export", len(names)) as display:
        for number, name in enumerate(names, 1):
            try:
                tensors = to_checkpoint_form(name, reader.get(name), fp8_layers, scale_format)
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
