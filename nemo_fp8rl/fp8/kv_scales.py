"""Calibrate the scales of an FP8 KV cache: one number per layer for each of q, k and v.

    scale = amax * MARGIN / 448, rounded up to a power of two

amax is the largest |x| that calibration observed. The scale multiplies to dequantize, as vLLM's k_scale does; the cache
stores x / scale. A power of two keeps both products exact. A maximum depends neither on how the data were split nor on
the order, so every rank gets the same bits.

x is what attention reads: q and k after their norms and RoPE, real tokens only (padding would count like any element).
Left out: percentiles of |x|; scales per head; the scale of the softmax's output, which is at most 1 and which vLLM then
takes as 1.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from nemo_fp8rl.fp8.block_scaled import E4M3_MAX, describe_non_finite

TENSORS = ("q", "k", "v")
"""The order of the columns of `KvMaxima.amax`."""
MARGIN = 1.05
"""Room above the largest observed magnitude; also the default of NeMo RL's `calibrate_qkv_fp8_scales`."""
SMALLEST_SCALE = 2.0**-126
"""float32's smallest normal number: its inverse is finite, and vLLM demands scales above 0."""
NO_DATA = -1.0
"""The value of amax before any element was observed: below every magnitude."""

INFINITY_BITS = 0x7F800000
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PIECE_VALUES = {"cpu": 1 << 18, "cuda": 1 << 23}
"""Elements read at a time: the temporaries stay in a CPU's cache, and are small beside a GPU's memory."""


class CalibrationError(ValueError):
    """The data give no scale; the message names the layer and which of q, k and v."""


@dataclass(frozen=True)
class KvScales:
    """The scales of a model's KV cache, each a tuple of one float32 value per layer that multiplies to dequantize.

    k_scale: of the keys
    v_scale: of the values
    q_scale: of the queries, for attention that takes queries in FP8
    """

    k_scale: tuple[float, ...]
    v_scale: tuple[float, ...]
    q_scale: tuple[float, ...]

    @staticmethod
    def tensor_names(num_layers: int) -> list[str]:
        """Return the names that `named_tensors` gives for `num_layers` layers, in its order."""
        return [name for layer in range(num_layers) for name in scale_names(f"model.layers.{layer}.self_attn")]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, float32 []) of every scale, for a refit or a checkpoint."""
        for layer, scales in enumerate(zip(self.k_scale, self.v_scale, self.q_scale, strict=True)):
            names = scale_names(f"model.layers.{layer}.self_attn")
            yield from zip(names, (torch.tensor(scale, dtype=torch.float32) for scale in scales), strict=True)


def scale_names(attention: str) -> tuple[str, str, str]:
    """Return the names of the scales of keys, values and queries of the module `attention`.

    The names are those of NeMo RL's `get_vllm_qkv_scale_names`. vLLM loads them into {attention}.attn.{q,k,v}_scale
    (`QuantizationConfig.get_cache_scale_mapper`, and `maybe_remap_kv_scale_name` before that). Older versions map k and
    v only, hence the other form for q.
    """
    return f"{attention}.k_scale", f"{attention}.v_scale", f"{attention}.attn.q_scale"


class KvMaxima:
    """The largest magnitudes of q, k and v in every layer of the model, as calibration observes them.

    amax: float32 [layers, 3], in the order of `TENSORS`, on the CPU; NO_DATA where nothing was observed
    """

    def __init__(self, num_layers: int) -> None:
        if num_layers < 1:
            raise ValueError(f"a model to calibrate has at least one layer, got {num_layers}")
        self.amax = torch.full((num_layers, len(TENSORS)), NO_DATA)

    @property
    def num_layers(self) -> int:
        return self.amax.size(0)

    def observe(self, layer: int, *, q: Tensor | None = None, k: Tensor | None = None, v: Tensor | None = None) -> None:
        """Raise the maxima of one layer to those of q, k and v.

        layer:   the model's layer, not the pipeline stage's, counted from 0
        q, k, v: bf16, fp16 or fp32, any shape, strides and device; strided input is copied a piece at a time
        Raises:  CalibrationError if a value is NaN or infinite; that tensor then changes no maximum
        """
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"there is no layer {layer} in a model of {self.num_layers} layers")
        for index, x in enumerate((q, k, v)):
            if x is None or not x.numel():
                continue
            name = f"{TENSORS[index]} of layer {layer}"
            if x.dtype not in DTYPES:
                raise ValueError(f"{name}: {', '.join(map(str, DTYPES))} is calibrated, got {x.dtype}")
            maximum = self.amax[layer, index]
            torch.maximum(maximum, _amax(x, name).to(maximum.device), out=maximum)

    def all_reduce(self) -> None:
        """Take the maxima over all ranks: tensor, data, context and pipeline parallel ranks alike. All must call."""
        torch.distributed.all_reduce(self.amax, torch.distributed.ReduceOp.MAX)

    def scales(self) -> KvScales:
        """Return the scale of every layer, by the formula of this module.

        Scales are at least 2^-126; a layer of zeros alone gets scale 1.
        Raises: CalibrationError if a layer observed no data
        """
        gaps = (self.amax == NO_DATA).nonzero().tolist()
        if gaps:
            layer, index = gaps[0]
            raise CalibrationError(
                f"{TENSORS[index]} of layer {layer} saw no data, the first of {len(gaps)} such of "
                f"{self.amax.numel()} tensors"
            )
        q, k, v = ([_scale(amax) for amax in column] for column in self.amax.t().tolist())
        return KvScales(tuple(k), tuple(v), tuple(q))


def _amax(x: Tensor, name: str) -> Tensor:
    """Return the largest magnitude, float32 [], of a tensor that is not empty."""
    maxima = []
    for piece in _pieces(x):
        maxima.append(_magnitude_bits(piece).max().int() << (16 if x.dtype is torch.bfloat16 else 0))
        if maxima[-1] >= INFINITY_BITS:
            raise CalibrationError(f"{name}: {describe_non_finite(x)}")
    return torch.stack(maxima).max().view(torch.float32)


def _pieces(x: Tensor) -> tuple[Tensor, ...]:
    """Cut x along its longest dimension, so that only one piece at a time is copied, whatever the strides are."""
    if not x.dim():
        return (x,)
    longest = max(range(x.dim()), key=x.size)
    return x.split(max(1, PIECE_VALUES[x.device.type] * x.size(longest) // x.numel()), longest)


def _magnitude_bits(x: Tensor) -> Tensor:
    """Return x's bits without the sign, whose order is that of the magnitudes.

    int16 for bfloat16; int32 for float32, and for float16, which is converted to float32.
    """
    if x.dtype is torch.bfloat16:
        return x.view(torch.int16) & 0x7FFF
    return x.float().view(torch.int32) & 0x7FFFFFFF


def _scale(amax: float) -> float:
    if amax == 0:
        return 1.0
    exact = Fraction(amax) * Fraction(MARGIN) / Fraction(E4M3_MAX)
    # The smallest power of two that is not below `exact`: 2^(exponent - 1) < exact < 2^(exponent + 1).
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
    return max(math.ldexp(1.0, exponent + (exact > Fraction(2) ** exponent)), SMALLEST_SCALE)
