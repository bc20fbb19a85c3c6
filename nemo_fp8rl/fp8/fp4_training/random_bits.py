"""Random bits for the stochastic rounding of gradients: a function of seed, layer, optimizer step, call and element.

No generator has a state that could differ: a run that is resumed, and layers that are recomputed, draw the same bits.
They are those of Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; Random123).
"""

import hashlib
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
MASK = 0xFFFFFFFF
BITS = 16
"""Bits of a draw. A counter gives 128, so that it serves 8 elements."""
CHUNK_COUNTERS = 1 << 14
"""Counters computed at a time, so that the temporaries stay in the cache."""


def philox(counter: tuple[Tensor, int, int, int], key: tuple[int, int]) -> list[Tensor]:
    """Return four tensors of 32 random bits, int64 like counter[0].

    counter: four words of 32 bits; the first is a tensor, int64 of any shape
    key:     two words of 32 bits
    """
    c0, c1, c2, c3 = counter
    words = [c0, *(torch.full_like(c0, word) for word in (c1, c2, c3))]
    for number in range(ROUNDS):
        k0, k1 = ((word + number * step) & MASK for word, step in zip(key, KEY_STEPS, strict=True))
        p0, p1 = words[0] * MULTIPLIERS[0], words[2] * MULTIPLIERS[1]  # modulo 2^64; the sign bit is a bit like others
        high0, high1 = (p0 >> 32).bitwise_and_(MASK), (p1 >> 32).bitwise_and_(MASK)
        low0, low1 = p0.bitwise_and_(MASK), p1.bitwise_and_(MASK)
        words = [
            high1.bitwise_xor_(words[1]).bitwise_xor_(k0),
            low1,
            high0.bitwise_xor_(words[3]).bitwise_xor_(k1),
            low0,
        ]
    return words


@dataclass(frozen=True)
class CallBits:
    """The bits of one backward of one layer.

    key:   of the layer
    step:  the optimizer step
    call:  the number of the backward in this step; microbatches are one call each
    """

    key: tuple[int, int]
    step: int
    call: int

    def draw(self, operand: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return independent draws of 0 to 2^BITS - 1, float32 of this shape.

        operand: 0, 1, ..., for tensors of one backward whose draws must differ
        """
        count = math.prod(shape)
        counters = -(-count // 8)
        out = torch.empty(counters, 8, dtype=torch.float32, device=device)
        for start in range(0, counters, CHUNK_COUNTERS):
            index = torch.arange(start, min(start + CHUNK_COUNTERS, counters), device=device)
            words = torch.stack(philox((index, operand, self.call, self.step & MASK), self.key), 1)
            out[start : start + len(index), 0::2] = words & 0xFFFF
            out[start : start + len(index), 1::2] = words >> 16
        return out.view(-1)[:count].view(shape)


@dataclass
class GradientBits:
    """The random bits of a trainer.

    seed:  of the run
    step:  optimizer steps that the trainer has taken
    """

    seed: int
    step: int = 0
    _calls: dict[str, int] = field(default_factory=dict)

    def start_step(self, step: int) -> None:
        """Begin the optimizer step after `step` others."""
        self.step = step
        self._calls.clear()

    def start_call(self, layer: str) -> CallBits:
        """Return the bits of the next backward of a layer in this step.

        layer: its name in the whole model, with what tells apart the ranks that round different values
        """
        call = self._calls.get(layer, 0)
        self._calls[layer] = call + 1
        digest = hashlib.blake2b(f"{self.seed} {layer}".encode(), digest_size=8).digest()
        return CallBits((int.from_bytes(digest[:4]), int.from_bytes(digest[4:])), self.step, call)


@dataclass(frozen=True)
class LayerBits:
    """The random bits of one layer; see `GradientBits`."""

    trainer: GradientBits
    layer: str

    def start_call(self) -> CallBits:
        return self.trainer.start_call(self.layer)
