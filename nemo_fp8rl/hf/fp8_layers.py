"""The FP8 matrices of a model under a recipe, and the check that trainer and engine quantize the same blocks."""

import dataclasses
from collections.abc import Iterator, Mapping

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.fp8 import BLOCK, Format, Fp8Layers
from nemo_fp8rl.hf.divisibility import Dimension, layer_suffix
from nemo_fp8rl.hf.model_config import HfConfig

IGNORED = "policy.generation.vllm_cfg.quantization_ignored_layer_kws"
QUERIES, KEYS = "num_attention_heads * head_dim", "num_key_value_heads * head_dim"
KERNEL_WIDTH = 32
"""Values, along rows and columns, of which vLLM's kernels of 4 bits take multiples."""


def requested_fp8_layers(hf: HfConfig, cfg: Config) -> Fp8Layers:
    """Return the FP8 layers that the recipe requests for the engine, without a check against the model."""
    if not cfg.nemo_fp8rl.quantizes_rollout:
        return Fp8Layers.none()
    vllm = cfg.policy.generation.vllm_cfg
    end = hf.num_hidden_layers - vllm.num_last_layers_in_bf16
    return Fp8Layers(vllm.num_first_layers_in_bf16, end, vllm.quantization_ignored_layer_kws)


def engine_fp8_layers(hf: HfConfig, cfg: Config) -> Fp8Layers:
    """Return the layers that the engine stores in FP8 and for which the refit quantizes.

    Raises: UserError if the model's sizes do not fit the blocks, or if no layer is FP8
    """
    layers = requested_fp8_layers(hf, cfg)
    if not cfg.nemo_fp8rl.quantizes_rollout:
        return layers
    if layers.count <= 0:
        vllm = cfg.policy.generation.vllm_cfg
        first, last = vllm.num_first_layers_in_bf16, vllm.num_last_layers_in_bf16
        raise UserError(
            f"policy.generation.vllm_cfg.num_first_layers_in_bf16={first} and num_last_layers_in_bf16={last} leave no "
            f"FP8 layer of the model's {hf.num_hidden_layers}; lower them, or use nemo_fp8rl.flow=bf16"
        )
    check_ignored(hf, layers, IGNORED)
    check_block_alignment(hf, layers, cfg.nemo_fp8rl.flow, cfg.nemo_fp8rl.format)
    return layers


def check_ignored(hf: HfConfig, layers: Fp8Layers, key: str) -> None:
    """Raise UserError if a word of `layers.ignored_words` is in no layer's name, or if the words leave no FP8 layer."""
    all_projections = projections(hf, dataclasses.replace(layers, ignored_words=()))
    for word in layers.ignored_words:
        if projections(hf, dataclasses.replace(layers, ignored_words=(word,))) == all_projections:
            raise UserError(f"{key}: {word!r} is in the name of no FP8 layer of this model; remove or correct it")
    if not projections(hf, layers):
        raise UserError(f"{key}={list(layers.ignored_words)} leaves no FP8 layer; remove words, or stay in bfloat16")


def projections(hf: HfConfig, layers: Fp8Layers) -> list[str]:
    """Return one HF name for each FP8 matrix of the model, in fused form; experts of a layer count as one matrix."""
    mlp = "mlp.experts" if hf.family.experts else "mlp"
    parts = ("self_attn.q_proj", "self_attn.o_proj", f"{mlp}.gate_proj", f"{mlp}.down_proj")
    names = (f"model.layers.{layer}.{part}" for layer in range(hf.num_hidden_layers) for part in parts)
    return [name for name in names if layers.quantizes(name)]


def trainer_fp8_layers(hf: HfConfig, cfg: Config) -> Fp8Layers:
    """Return the layers whose linears train in FP8: the engine's FP8 layers, or none."""
    return engine_fp8_layers(hf, cfg) if cfg.nemo_fp8rl.quantizes_training else Fp8Layers.none()


def check_block_alignment(hf: HfConfig, layers: Fp8Layers, flow: str, format: Format) -> None:
    """Raise UserError if a quantized projection would not start at a block border of its fused matrix.

    Engine and trainer fuse q, k and v, and gate and up, one below the other. The columns of MXFP8 and NVFP4 must be
    whole blocks as well, because their kernels and checkpoints have no ragged ones.
    """
    block = format.line_block[1]
    unaligned = list(unaligned_projections(hf, layers, fused_sizes(hf), block))
    if format.name != "fp8":
        unaligned += unaligned_projections(hf, layers, summed_sizes(hf), block)
    for word, name, size in unaligned:
        below = size // block * block
        fits = " and ".join(str(nearest) for nearest in (below, below + block) if nearest)
        exclusion = f"keep that in bfloat16 by {IGNORED}=[{word}], or " if word else ""
        raise UserError(
            f"nemo_fp8rl.flow={flow} cannot run this model: its {name}={size}{layer_suffix(name)} is not a multiple "
            f"of {block} (nearest sizes that fit: {fits}), so trainer and engine would not quantize the same "
            f"blocks; {exclusion}use nemo_fp8rl.flow=bf16"
        )


def check_kernel_widths(hf: HfConfig, cfg: Config) -> None:
    """Raise UserError if the matrices of an engine's process are no whole tiles of vLLM's kernels of 4 bits on a GPU.

    Source: vLLM, pad_nvfp4_weight_for_cutlass, which pads rows and columns to multiples of KERNEL_WIDTH
    """
    choice, layers = cfg.nemo_fp8rl, requested_fp8_layers(hf, cfg)
    if choice.format.element != "e2m1":
        return
    vllm = cfg.policy.generation.vllm_cfg
    split = 1 if hf.family.experts and vllm.expert_parallel_size > 1 else vllm.tensor_parallel_size
    sizes = fused_sizes(hf) | summed_sizes(hf)
    of_process = {word: (name, size // (split if word == "mlp" else 1)) for word, (name, size) in sizes.items()}
    if found := next(unaligned_projections(hf, layers, of_process, KERNEL_WIDTH), None):
        _, name, size = found
        raise UserError(
            f"nemo_fp8rl.flow={choice.flow}: vLLM's kernels of 4 bits take multiples of {KERNEL_WIDTH} values on a "
            f"GPU, and a process of an engine has {name}={size}{layer_suffix(name)}; lower "
            "policy.generation.vllm_cfg.tensor_parallel_size, or set nemo_fp8rl.flow=bf16"
        )


def fused_sizes(hf: HfConfig) -> dict[str, tuple[str, int]]:
    """Return the dimensions that must be whole blocks, because an engine fuses projections along them.

    The result maps a word in the names of the projections to the dimension's name and size. Queries have as many rows
    as keys, or a multiple of them, so one entry stands for q, k and v.
    """
    mlp = hf.family.intermediate_size
    return {"q_proj": (KEYS, hf.num_key_value_heads * hf.head_dim), "mlp": (mlp, hf.intermediate_size)}


def summed_sizes(hf: HfConfig) -> dict[str, tuple[str, int]]:
    """Return the columns of the quantized projections, as `fused_sizes` does; those of down_proj are the rows there.

    The word of the hidden size, whose projections are in every layer, is empty: it is in every name.
    """
    return {"": ("hidden_size", hf.hidden_size), "o_proj": (QUERIES, hf.num_attention_heads * hf.head_dim)}


def unaligned_projections(
    hf: HfConfig, layers: Fp8Layers, sizes: Mapping[str, tuple[str, int]], unit: int = BLOCK[0]
) -> Iterator[tuple[str, str, int]]:
    """Yield (word, dimension, size) of the FP8 projections in `sizes` that are not whole blocks of `unit`."""
    for word, (name, size) in sizes.items():
        if size % unit and is_fp8(hf, layers, word):
            yield word, name, size


def is_fp8(hf: HfConfig, layers: Fp8Layers, word: str) -> bool:
    """Return whether any FP8 matrix has the word in its name."""
    return any(word in name for name in projections(hf, layers))


def attention_dimensions(hf: HfConfig, layers: Fp8Layers, block: int = BLOCK[0]) -> list[Dimension]:
    """Return the dimensions of attention that tensor parallelism divides.

    These are the heads, and the rows or columns of FP8 projections.

    block: columns of a block
    """
    heads, groups = hf.num_attention_heads, hf.num_key_value_heads
    dimensions = [Dimension("num_attention_heads", heads), Dimension("num_key_value_heads", groups)]
    for word, name, count in (("q_proj", KEYS, groups), ("o_proj", QUERIES, heads)):
        if is_fp8(hf, layers, word):
            dimensions.append(Dimension(name, count * hf.head_dim, block))
    return dimensions


def mlp_dimension(hf: HfConfig, layers: Fp8Layers, block: int = BLOCK[0]) -> Dimension:
    """Return the dimension of an MLP, or of each expert, that tensor parallelism divides. block: columns of a block."""
    return Dimension(hf.family.intermediate_size, hf.intermediate_size, block if is_fp8(hf, layers, "mlp") else 1)
