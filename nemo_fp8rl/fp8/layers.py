"""Which weights are FP8: the one list that trainer, refit and engine share."""

import re
from dataclasses import dataclass

LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Fp8Layers:
    """The decoder layers `first` to `end - 1`, whose linear projections are FP8; none when they are equal.

    Embedding, norms, router and output head stay in high precision, and so do the layers outside.
    """

    first: int
    end: int

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
        return layer is not None and int(layer[1]) in self and projection


def scale_name(hf_name: str) -> str:
    """HF name of the scales that belong to the weight `hf_name`."""
    return hf_name + "_scale_inv"
