"""The division of a model's dimensions over ranks, and the check that it is possible."""

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
"""Dimension of config.json -> the first layer with this dimension."""


def layer_suffix(dimension: str) -> str:
    """Return " of LAYER" for a message about a dimension, or an empty string."""
    return f" of {LAYERS[dimension]}" if dimension in LAYERS else ""


class Dimension(NamedTuple):
    """A dimension that ranks divide into equal parts of whole blocks.

    name:  the name in config.json
    size:  the number of rows, columns, heads or experts
    block: the size of a part must be a multiple of it
    """

    name: str
    size: int
    block: int = 1

    def can_split_into(self, parts: int) -> bool:
        return parts == 1 or self.size % (parts * self.block) == 0


def check_divides(key: str, parts: int, *dimensions: Dimension) -> None:
    """Raise UserError, with the layer and numbers of ranks that fit, unless every dimension splits into `parts` parts.

    key: the recipe's key whose value is `parts`
    """
    for dimension in dimensions:
        if not dimension.can_split_into(parts):
            name, size, block = dimension
            blocks = f" in multiples of {block}, the size of its blocks" if block > 1 else ""
            possible = (n for n in range(1, size + 1) if all(other.can_split_into(n) for other in dimensions))
            fits = ", ".join(map(str, islice(possible, 8)))
            raise UserError(
                f"{key}={parts} does not divide the model's {name}={size}{layer_suffix(name)}{blocks}; "
                f"sizes that fit: {fits}"
            )


def pipeline_stages(layers: int, size: int, first: int | None = None, last: int | None = None) -> list[range]:
    """Return the layers of each pipeline stage.

    If the layers cannot be divided so, the last range does not end at `layers`.

    layers: layers of the model
    size:   number of stages
    first:  layers of the first stage; None: as many as the stages between
    last:   layers of the last stage; None: as many as the stages between
    """
    fixed = [n for n in (first, last) if n is not None]
    others = size - len(fixed)
    counts = [(layers - sum(fixed)) // others if others > 0 else 0] * size
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    ends = list(accumulate(counts))
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
