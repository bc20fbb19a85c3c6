"""How a dimension of the model is split over ranks, and whether it can be."""

from itertools import accumulate

from nemo_fp8rl.errors import UserError

LAYERS = {
    "num_attention_heads": "self_attn.q_proj",
    "num_key_value_heads": "self_attn.k_proj",
    "head_dim": "self_attn.q_proj",
    "num_attention_heads * head_dim": "self_attn.o_proj",
    "num_key_value_heads * head_dim": "self_attn.k_proj",
    "intermediate_size": "mlp.gate_proj",
    "moe_intermediate_size": "mlp.experts.*.gate_proj",
    "num_experts": "mlp.experts",
}
"""By config.json's dimension, the first layer that has it."""


def of_layer(dimension: str) -> str:
    return f" of {LAYERS[dimension]}" if dimension in LAYERS else ""


def check_divides(key: str, parts: int, dimension: str, size: int, block: int = 1) -> None:
    """Raise UserError, by layer and sizes that fit, unless `parts` ranks can have equal parts of it in whole blocks.

    key: the recipe's, which says `parts`. dimension: config.json's.
    """
    if parts > 1 and size % (parts * block):
        fits = ", ".join([str(n) for n in range(1, size // block + 1) if size % (n * block) == 0][:8]) or "none"
        blocks = f" in multiples of {block}, the blocks of FP8" if block > 1 else ""
        what = f"{dimension}={size}{of_layer(dimension)}{blocks}"
        raise UserError(f"{key}={parts} does not divide the model's {what}; sizes that fit: {fits}")


def stages(layers: int, size: int, first: int | None = None, last: int | None = None) -> list[range]:
    """Layers of each of `size` pipeline stages: first and last may have numbers of their own, the others have equal
    ones. Where that does not come out, the last range ends elsewhere than at `layers`.
    """
    given = [n for n in (first, last) if n is not None]
    others = size - len(given)
    counts = [(layers - sum(given)) // others if others > 0 else 0] * size
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    ends = list(accumulate(counts))
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
