"""The shape of a decoder: its layers, each of one kind or another, and their weights."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from nemo_fp8rl.commands.doctor.models.layer_kinds import LAYER_KINDS
from nemo_fp8rl.commands.doctor.models.sizes import Sizes, Weight


@dataclass(frozen=True)
class Shape(Sizes):
    """Sizes of a decoder, and its weights by the names in its HF checkpoint."""

    @property
    def layers(self) -> int:
        return len(self.parts)

    @property
    def parameters(self) -> int:
        layers = sum(weight.elements for i in range(self.layers) for weight in self.layer(i))
        return layers + sum(weight.elements for weight in (*self.head(), self.embedding()))

    def has(self, part: str) -> bool:
        return any(part in layer for layer in self.parts)

    def embedding(self) -> Weight:
        return Weight(f"{self.names.root}{self.names.embedding}.weight", self.vocab, self.hidden, "rows")

    def head(self) -> list[Weight]:
        """Return the final norm and the output head. A tied head is the embedding."""
        norm = Weight(f"{self.names.root}{self.names.norm}.weight", self.hidden, 1)
        return [norm] if self.tied else [norm, Weight("lm_head.weight", self.vocab, self.hidden, "rows")]

    def layer(self, index: int) -> tuple[Weight, ...]:
        return self._layers[index]

    @cached_property
    def _layers(self) -> list[tuple[Weight, ...]]:
        return [tuple(self._layer(f"{self.names.root}layers.{i}.", parts)) for i, parts in enumerate(self.parts)]

    def _layer(self, layer: str, parts: tuple[str, ...]) -> Iterator[Weight]:
        yield from (Weight(f"{layer}{norm}.weight", self.hidden, 1) for norm in self.names.norms)
        for part in parts:
            module = f"{layer}{self.names.module_of(part)}."
            yield from (replace(weight, name=module + weight.name) for weight in LAYER_KINDS[part].weights(self))
