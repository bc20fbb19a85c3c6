"""The matrices for the comparison: some implementations treat each kind differently."""

from collections.abc import Callable

import torch
from torch import Tensor

SIGMA_WEIGHT, SIGMA_ACTIVATION, SIGMA_TINY = 0.02, 1.0, 1e-6
DEGREES = 3
"""Degrees of freedom of the Student t distribution: its variance is finite, its fourth moment is not."""

OUTLIER = 8.0
"""The last element of `ragged outlier`, in sigmas."""

BINADES = 24
"""Between the first row of `wide range` and a row below its last."""

KINDS = ("normal", "heavy-tailed", "ragged", "ragged outlier", "zero blocks", "tiny", "wide range")
"""
normal          Gaussian
heavy-tailed    Student t
ragged          the last blocks of rows and columns are incomplete
ragged outlier  the same, and the very last element is large
zero blocks     the left half is zero
tiny            Gaussian of sigma 1e-6
wide range      each row is a little smaller than the row before, the last by about 2^-24
"""


def weights(size: int, seed: int) -> dict[str, Tensor]:
    """Return bf16 [size, size] of sigma 0.02, by kind; the ragged kinds are [size - 24, size + 76]."""
    return _matrices(size, size, SIGMA_WEIGHT, seed)


def activations(size: int, seed: int) -> dict[str, Tensor]:
    """Return bf16 [size / 4 tokens, size] of sigma 1, by kind; the ragged kinds are [size / 4 - 24, size + 76]."""
    return _matrices(size // 4, size, SIGMA_ACTIVATION, seed)


def _matrices(rows: int, columns: int, sigma: float, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(n: int = rows, k: int = columns) -> Tensor:
        return torch.randn(n, k, generator=generator)

    def heavy_tailed() -> Tensor:
        squares = sum(normal().square() for _ in range(DEGREES))
        return normal() / torch.as_tensor(squares / DEGREES).sqrt()

    def zero_blocks() -> Tensor:
        x = normal()
        x[:, : columns // 2] = 0
        return x

    def ragged(last: float | None = None) -> Tensor:
        x = normal(rows - 24, columns + 76)
        if last is not None:
            x[-1, -1] = last
        return x

    def wide_range() -> Tensor:
        return normal() * 2.0 ** -(torch.arange(rows) * BINADES // rows).view(-1, 1)

    kinds: dict[str, Callable[[], Tensor]] = {
        "normal": lambda: sigma * normal(),
        "heavy-tailed": lambda: sigma * heavy_tailed(),
        "ragged": lambda: sigma * ragged(),
        "ragged outlier": lambda: sigma * ragged(OUTLIER),
        "zero blocks": lambda: sigma * zero_blocks(),
        "tiny": lambda: SIGMA_TINY * normal(),
        "wide range": lambda: sigma * wide_range(),
    }
    return {kind: kinds[kind]().bfloat16() for kind in KINDS}
