"""How a dimension of the model is split over ranks, and whether it can be."""

from itertools import accumulate, islice
from typing import NamedTuple

from nemo_fp8rl.common.errors import UserError

LAYERS = {
    "num_attention_heads": "self_attn.q_proj",
    "num_key_value_heads": "self_attn.k_proj",
    "num_attention_heads * head_dim": "self_attn.o_proj",
    "num_key_value_heads * head_dim": "self_attn.k_proj",
    "intermediate_size": "mlp.gate_proj",
    "moe_intermediate_size": "mlp.experts.*.gate_proj",
    "num_experts": "mlp.experts",
}
"""Dimension of config.json -> the first layer that has it."""


def of_layer(dimension: str) -> str:
    return f" of {LAYERS[dimension]}" if dimension in LAYERS else ""


class Dimension(NamedTuple):
    """What ranks must have equal parts of, in whole blocks. name: config.json's."""

    name: str
    size: int
    block: int = 1

    def divides_in(self, parts: int) -> bool:
        return parts == 1 or self.size % (parts * self.block) == 0


def check_divides(key: str, parts: int, *dimensions: Dimension) -> None:
    """Raise UserError, by layer and sizes that fit all of them, unless `parts` ranks can have equal parts of each.

    key: the recipe's, which says `parts`.
    """
    for dimension in dimensions:
        if not dimension.divides_in(parts):
            name, size, block = dimension
            blocks = f" in multiples of {block}, the blocks of FP8" if block > 1 else ""
            all_fit = (n for n in range(1, size + 1) if all(other.divides_in(n) for other in dimensions))
            fits = ", ".join(map(str, islice(all_fit, 8)))
            raise UserError(
                f"{key}={parts} does not divide the model's {name}={size}{of_layer(name)}{blocks}; "
                f"sizes that fit: {fits}"
            )


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
