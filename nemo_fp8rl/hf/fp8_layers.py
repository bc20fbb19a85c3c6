"""Which matrices of a model are FP8 under a recipe, and whether its sizes give trainer and engine the same blocks."""

import dataclasses
from collections.abc import Iterator, Mapping

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.fp8 import BLOCK, Fp8Layers
from nemo_fp8rl.hf.divisibility import Dimension, of_layer
from nemo_fp8rl.hf.model_config import HfConfig

IGNORED = "policy.generation.vllm_cfg.quantization_ignored_layer_kws"
QUERIES, KEYS = "num_attention_heads * head_dim", "num_key_value_heads * head_dim"


def asked_fp8_layers(hf: HfConfig, cfg: Config) -> Fp8Layers:
    """What the recipe says of the engine, whether the model allows it or not."""
    if not cfg.nemo_fp8rl.engine_fp8:
        return Fp8Layers.none()
    vllm = cfg.policy.generation.vllm_cfg
    end = hf.num_hidden_layers - vllm.num_last_layers_in_bf16
    return Fp8Layers(vllm.num_first_layers_in_bf16, end, vllm.quantization_ignored_layer_kws)


def engine_fp8_layers(hf: HfConfig, cfg: Config) -> Fp8Layers:
    """The layers that the engine holds in FP8 and that the refit quantizes for it.

    Raises UserError when the model's sizes do not fit the blocks, or when no layer would be left.
    """
    layers = asked_fp8_layers(hf, cfg)
    if not cfg.nemo_fp8rl.engine_fp8:
        return layers
    if layers.count <= 0:
        vllm = cfg.policy.generation.vllm_cfg
        first, last = vllm.num_first_layers_in_bf16, vllm.num_last_layers_in_bf16
        raise UserError(
            f"policy.generation.vllm_cfg.num_first_layers_in_bf16={first} and num_last_layers_in_bf16={last} leave no "
            f"FP8 layer of the model's {hf.num_hidden_layers}; lower them, or use nemo_fp8rl.flow=bf16"
        )
    check_ignored(hf, layers, IGNORED)
    check_fp8_alignment(hf, layers, cfg.nemo_fp8rl.flow)
    return layers


def check_ignored(hf: HfConfig, layers: Fp8Layers, key: str) -> None:
    """Raise UserError when a word of `layers.ignored` is in no layer's name, or when the words leave no FP8 layer."""
    everything = projections(hf, dataclasses.replace(layers, ignored=()))
    for word in layers.ignored:
        if projections(hf, dataclasses.replace(layers, ignored=(word,))) == everything:
            raise UserError(f"{key}: {word!r} is in the name of no FP8 layer of this model; remove or correct it")
    if not projections(hf, layers):
        raise UserError(f"{key}={list(layers.ignored)} leaves no FP8 layer; remove words, or stay in bfloat16")


def projections(hf: HfConfig, layers: Fp8Layers) -> list[str]:
    """One HF name for each FP8 matrix of the model, fused as engines and trainers hold them; experts count as one."""
    mlp = "mlp.experts" if hf.family.experts else "mlp"
    parts = ("self_attn.q_proj", "self_attn.o_proj", f"{mlp}.gate_proj", f"{mlp}.down_proj")
    names = (f"model.layers.{layer}.{part}" for layer in range(hf.num_hidden_layers) for part in parts)
    return [name for name in names if layers.quantizes(name)]


def trainer_fp8_layers(hf: HfConfig, cfg: Config) -> Fp8Layers:
    """The layers whose linears train in FP8: the engine's, or none."""
    return engine_fp8_layers(hf, cfg) if cfg.nemo_fp8rl.trainer_fp8 else Fp8Layers.none()


def check_fp8_alignment(hf: HfConfig, layers: Fp8Layers, flow: str) -> None:
    """Raise UserError when an FP8 projection would not start at a block border of the matrix it is fused into.

    Engine and trainer fuse q, k, v one below the other, and gate, up.
    """
    for word, name, size in ragged(hf, layers, fused_sizes(hf)):
        below = size // BLOCK[0] * BLOCK[0]
        fits = " and ".join(str(near) for near in (below, below + BLOCK[0]) if near)
        raise UserError(
            f"nemo_fp8rl.flow={flow} cannot run this model: its {name}={size}{of_layer(name)} is not a multiple "
            f"of {BLOCK[0]} (nearest sizes that fit: {fits}), so trainer and engine would not quantize the same "
            f"blocks; keep that in bfloat16 by {IGNORED}=[{word}], or use nemo_fp8rl.flow=bf16"
        )


def fused_sizes(hf: HfConfig) -> dict[str, tuple[str, int]]:
    """A word of their names -> projections that an engine fuses: a dimension that each must have in whole blocks, and
    its size. Queries are as many rows as keys, or several times as many.
    """
    mlp = hf.family.intermediate_size
    return {"q_proj": (KEYS, hf.num_key_value_heads * hf.head_dim), "mlp": (mlp, hf.intermediate_size)}


def ragged(hf: HfConfig, layers: Fp8Layers, sizes: Mapping[str, tuple[str, int]]) -> Iterator[tuple[str, str, int]]:
    """(word, dimension, size) of these FP8 projections that are not whole blocks."""
    for word, (name, size) in sizes.items():
        if size % BLOCK[0] and is_fp8(hf, layers, word):
            yield word, name, size


def is_fp8(hf: HfConfig, layers: Fp8Layers, word: str) -> bool:
    """Whether any FP8 matrix has the word in its name."""
    return any(word in name for name in projections(hf, layers))


def attention_dimensions(hf: HfConfig, layers: Fp8Layers) -> list[Dimension]:
    """What tensor parallelism divides of attention: heads, and rows or columns of projections that are FP8."""
    heads, groups = hf.num_attention_heads, hf.num_key_value_heads
    dimensions = [Dimension("num_attention_heads", heads), Dimension("num_key_value_heads", groups)]
    for word, name, count in (("q_proj", KEYS, groups), ("o_proj", QUERIES, heads)):
        if is_fp8(hf, layers, word):
            dimensions.append(Dimension(name, count * hf.head_dim, BLOCK[0]))
    return dimensions


def mlp_dimension(hf: HfConfig, layers: Fp8Layers) -> Dimension:
    """The same of an MLP, or of each expert."""
    block = BLOCK[0] if is_fp8(hf, layers, "mlp") else 1
    return Dimension(hf.family.intermediate_size, hf.intermediate_size, block)
