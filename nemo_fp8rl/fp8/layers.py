"""Which weights are FP8: the one list that trainer, refit and engine share."""

import re
from dataclasses import dataclass

LAYER = re.compile(r"\.layers\.(\d+)\.")
EXPERTS = re.compile(r"\.experts(\.|$)")
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""What engines and trainers hold as one matrix, so that it is FP8 as a whole or not at all."""


@dataclass(frozen=True)
class Fp8Layers:
    """The decoder layers `first` to `end - 1`, whose linear projections are FP8; none when they are equal.

    Embedding, norms, router and output head stay in high precision, so do the layers outside, and so does what has one
    of the words `ignored` in its name, such as `o_proj` or `layers.3.mlp`. Matrices that are held as one go together: a
    word that is in the name of q_proj keeps k_proj and v_proj too, and one in an expert's all experts of the layer.
    """

    first: int
    end: int
    ignored: tuple[str, ...] = ()

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
        """Whether a weight, or the module that holds it, is FP8; by its HF name, or by vLLM's for fused modules."""
        layer = LAYER.search(name)
        projection = name.removesuffix(".weight").endswith(("_proj", ".experts"))
        return layer is not None and int(layer[1]) in self and projection and not self._ignores(name)

    def _ignores(self, name: str) -> bool:
        return any(word in member for member in held_together(name) for word in self.ignored)


def held_together(name: str) -> list[str]:
    """HF's names of the projections that are one matrix with this one; of experts, without their number."""
    name = name.removesuffix(".weight")
    if experts := EXPERTS.search(name):
        return [f"{name[: experts.start()]}.experts.{part}_proj" for part in ("gate", "up", "down")]
    path, _, leaf = name.rpartition(".")
    parts = next((parts for fused, parts in FUSED.items() if leaf in (fused, *parts)), (leaf,))
    return [f"{path}.{part}" for part in parts]


def scale_name(hf_name: str) -> str:
    """HF name of the scales that belong to the weight `hf_name`."""
    return hf_name + "_scale_inv"
