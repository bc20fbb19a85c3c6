"""The layers whose weights are FP8: one rule that trainer, refit and engine share."""

import re
from dataclasses import dataclass

LAYER = re.compile(r"\.layers\.(\d+)\.")
EXPERTS = re.compile(r"\.experts(\.|$)")
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Projections that engines and trainers fuse into one matrix, which is FP8 as a whole or not at all."""


@dataclass(frozen=True)
class Fp8Layers:
    """The decoder layers whose linear projections are FP8; none when `first` equals `end`.

    Embedding, norms, router and output head stay in high precision, and so does every other layer. The projections of
    one fused matrix stay together: a word in the name of q_proj also excludes k_proj and v_proj, and a word in the name
    of one expert's projection excludes all experts of that layer.

    first:         the first FP8 layer
    end:           the layer after the last one
    ignored_words: a projection with such a word in its name, for example `o_proj` or `layers.3.mlp`, stays in high
                   precision
    """

    first: int
    end: int
    ignored_words: tuple[str, ...] = ()

    @classmethod
    def none(cls) -> "Fp8Layers":
        return cls(0, 0)

    @property
    def count(self) -> int:
        return self.end - self.first

    def __bool__(self) -> bool:
        return self.count > 0

    def __contains__(self, layer: int) -> bool:
        return self.first <= layer < self.end

    def quantizes(self, name: str) -> bool:
        """Return whether a weight, or its module, is FP8. name: HF's name, or vLLM's name of a fused module."""
        layer = LAYER.search(name)
        projection = name.removesuffix(".weight").endswith(("_proj", ".experts"))
        return layer is not None and int(layer[1]) in self and projection and not self._ignores(name)

    def _ignores(self, name: str) -> bool:
        return any(word in projection for projection in fused_projections(name) for word in self.ignored_words)


def fused_projections(name: str) -> list[str]:
    """Return HF's names of the projections in the same fused matrix as `name`; those of experts without a number."""
    name = name.removesuffix(".weight")
    if experts := EXPERTS.search(name):
        return [f"{name[: experts.start()]}.experts.{part}_proj" for part in ("gate", "up", "down")]
    path, _, leaf = name.rpartition(".")
    parts = next((parts for fused, parts in FUSED.items() if leaf in (fused, *parts)), (leaf,))
    return [f"{path}.{part}" for part in parts]


def scale_name(hf_name: str) -> str:
    """Return the HF name of the scales that belong to the weight `hf_name`."""
    return hf_name + "_scale_inv"
