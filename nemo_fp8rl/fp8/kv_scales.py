"""Scales of an FP8 KV cache and of FP8 attention: one number a layer for each of q, k and v, from calibration data.

    scale = amax * margin / 448        multiplies to dequantize, as vLLM's k_scale does; x / scale is what is stored

amax is the largest |x| seen, or a percentile of |x| over all ELEMENTS. What was seen is kept as a sketch: the exact
maximum, and how many magnitudes fell into each bin. The bins are the bfloat16 values themselves: a bfloat16 magnitude
is counted at itself, any other one at the next bfloat16 above it. A percentile p is the smallest magnitude v such that
at least p % of the elements are at most v; the sketch returns a number in

    [v, v]                  for bfloat16 data
    [v, v * (1 + 2^-7))     for float32 and float16 data
    [v, v + 2^-133)         for float32 below 2^-126, where bfloat16 is denormal

and never one above the maximum. No range or bin width has to be chosen before the data are known, and maxima and sums
of integers do not depend on how the data were split or in which order the parts are merged, so every rank gets the
same bits. The price is 0.8 MB a layer, 38 MB for 48 layers, once a calibration; two bits less of mantissa would save
28 MB and give up that bfloat16 data is exact. Sketches without percentiles count
elements and no magnitudes.

x is what attention sees: q and k after their norms and RoPE, real tokens only (padding counts like any other element).
Left out: scales per head; the scale of the softmax's output, which is at most 1 and which vLLM then takes as 1.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from nemo_fp8rl.fp8.format import E4M3_MAX, ScaleFormat, check_scale_format, non_finite

TENSORS = ("q", "k", "v")
"""The order of the second dimension of a sketch."""
LARGEST_MARGIN = 224.0
"""Up to here the scale of any float32 is itself a float32, also after rounding up to a power of two."""
MARGIN = 1.05
"""Room above the largest calibrated magnitude; also the default of NeMo RL's `calibrate_qkv_fp8_scales`."""
BINS = 0x7F81
"""The finite bfloat16 magnitudes 0x0000 ... 0x7F7F, and one for what float32 holds above them."""
SMALLEST_SCALE = 2.0**-126
"""float32's smallest normal number: its inverse is finite, and vLLM demands scales above 0."""

INFINITY_BITS = 0x7F800000
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PIECE_VALUES = {"cpu": 1 << 18, "cuda": 1 << 23}
"""Elements counted at a time: the temporaries stay in a CPU's cache, and are small beside a GPU's memory."""


class CalibrationError(ValueError):
    """No scale can be taken from these data: the message names the layer and which of q, k and v."""


@dataclass(frozen=True)
class KvScales:
    """What multiplies to dequantize, a float32 value a layer; q_scale is for attention that takes queries in FP8."""

    k_scale: tuple[float, ...]
    v_scale: tuple[float, ...]
    q_scale: tuple[float, ...]

    @staticmethod
    def names(layers: int) -> list[str]:
        """The names that `named` gives for so many layers."""
        return [name for layer in range(layers) for name in scale_names(f"model.layers.{layer}.self_attn")]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """(name, float32 []) for a refit or a checkpoint."""
        for layer, scales in enumerate(zip(self.k_scale, self.v_scale, self.q_scale, strict=True)):
            names = scale_names(f"model.layers.{layer}.self_attn")
            yield from zip(names, (torch.tensor(scale, dtype=torch.float32) for scale in scales), strict=True)


def scale_names(attention: str) -> tuple[str, str, str]:
    """Names of the scales of keys, values and queries of an attention block, as NeMo RL's `get_vllm_qkv_scale_names`.

    vLLM loads them into {attention}.attn.{q,k,v}_scale (`QuantizationConfig.get_cache_scale_mapper`, and
    `maybe_remap_kv_scale_name` before that); older versions map k and v only, hence the other form for q.
    """
    return f"{attention}.k_scale", f"{attention}.v_scale", f"{attention}.attn.q_scale"


@dataclass(frozen=True)
class KvSketches:
    """What calibration saw of q, k and v (`TENSORS`) in every layer of the model.

    amax:   float32 [layers, 3], largest magnitude
    counts: int64 [layers, 3, BINS], elements by the bfloat16 bits of their magnitude, rounded up; [layers, 3, 1], all
            elements, without percentiles

    These two tensors are all the state there is: stored and sent as they are, merged by maximum and by sum.
    """

    amax: Tensor
    counts: Tensor

    @classmethod
    def empty(cls, num_layers: int, device: torch.device | str = "cpu", percentiles: bool = True) -> "KvSketches":
        """device: where the state lives; that of the data saves copies, that of the process group is needed there.
        percentiles: False keeps maxima alone, which takes less time and next to no memory.
        """
        if num_layers < 1:
            raise ValueError(f"a model to calibrate has at least one layer, got {num_layers}")
        shape, bins = (num_layers, len(TENSORS)), BINS if percentiles else 1
        return cls(torch.zeros(shape, device=device), torch.zeros(*shape, bins, dtype=torch.int64, device=device))

    @property
    def num_layers(self) -> int:
        return self.amax.size(0)

    def observe(self, layer: int, *, q: Tensor | None = None, k: Tensor | None = None, v: Tensor | None = None) -> None:
        """Count the elements of q, k and v of one layer: bf16, fp16 or fp32, any shape, strides and device.

        layer is the model's, not the pipeline stage's. Strided input is copied a piece at a time. Raises
        CalibrationError if a value is NaN or infinite; nothing of that tensor is counted then.
        """
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"there is no layer {layer} in sketches of {self.num_layers} layers")
        for index, x in enumerate((q, k, v)):
            if x is None or not x.numel():
                continue
            what = f"{TENSORS[index]} of layer {layer}"
            if x.dtype not in DTYPES:
                raise ValueError(f"{what}: {', '.join(map(str, DTYPES))} is calibrated, got {x.dtype}")
            amax, counts = _sketch(x, what, self.counts.size(-1))
            cell = self.amax[layer, index]
            torch.maximum(cell, amax.to(cell.device), out=cell)
            self.counts[layer, index] += counts.to(self.counts.device)

    def merge(self, other: "KvSketches") -> None:
        """Add what `other` saw, as if its data had been observed here."""
        if other.counts.shape != self.counts.shape:
            theirs, ours = (f"{x.num_layers} layers and {x.counts.size(-1)} bins" for x in (other, self))
            raise ValueError(f"sketches of {theirs} cannot be merged into {ours}")
        torch.maximum(self.amax, other.amax.to(self.amax.device), out=self.amax)
        self.counts.add_(other.counts.to(self.counts.device))

    def all_reduce(self, group: "torch.distributed.ProcessGroup | None" = None) -> None:
        """Merge the sketches of all ranks into each of them: tensor, data, context and pipeline parallel ranks alike.

        Every rank of the group must call, with sketches of the whole model on the group's kind of device. Elements
        that several ranks hold (replicated kv heads) count once a rank.
        """
        torch.distributed.all_reduce(self.amax, torch.distributed.ReduceOp.MAX, group)
        torch.distributed.all_reduce(self.counts, torch.distributed.ReduceOp.SUM, group)

    def percentile(self, percentile: float) -> Tensor:
        """float32 [layers, 3] on the CPU: see the module's docstring; 100 gives amax. 0 where nothing was seen."""
        if not 0 < percentile <= 100:
            raise ValueError(f"a percentile lies above 0 and at most at 100, got {percentile}")
        if self.counts.size(-1) != BINS:
            raise ValueError(f"these sketches are without percentiles, and {percentile} was asked for")
        share = Fraction(str(percentile)) / 100  # 99.9 means 999 of 1000, which the nearest double to it does not
        amax, counts = self.amax.cpu(), self.counts.cpu()
        bins = torch.zeros(amax.shape, dtype=torch.int32)
        for place in itertools.product(range(self.num_layers), range(len(TENSORS))):
            below = counts[place].cumsum(0)
            bins[place] = torch.searchsorted(below, math.ceil(share * int(below[-1])))
        return torch.minimum((bins << 16).view(torch.float32), amax)

    def scales(
        self,
        *,
        margin: float = MARGIN,
        percentile: float | None = None,
        scale_format: ScaleFormat = "pow2",
    ) -> KvScales:
        """Scales of every layer: amax, or the percentile of the elements, * margin / 448.

        percentile: None takes the exact maximum; below 100, what lies above it saturates at margin times it.
        scale_format: pow2 rounds UP to a power of two, so that amax * margin still fits; fp32 to the nearest float32.

        Scales are at least 2^-126; a layer of zeros alone gets scale 1. Raises CalibrationError if a layer saw no
        data, or nothing but zeros up to the percentile.
        """
        check_scale_format(scale_format)
        if not 0 < margin <= LARGEST_MARGIN:
            raise ValueError(f"the margin of a scale is a positive number up to {LARGEST_MARGIN}, got {margin}")
        clip = self.amax.cpu() if percentile is None else self.percentile(percentile)
        self._refuse_gaps(clip, percentile)
        q, k, v = ([_scale(amax, margin, scale_format) for amax in column] for column in clip.t().tolist())
        return KvScales(tuple(k), tuple(v), tuple(q))

    def _refuse_gaps(self, clip: Tensor, percentile: float | None) -> None:
        unseen = (self.counts.sum(-1) == 0).nonzero().tolist()
        if unseen:
            layer, index = unseen[0]
            raise CalibrationError(
                f"{TENSORS[index]} of layer {layer} saw no data, the first of {len(unseen)} such of "
                f"{self.amax.numel()} tensors"
            )
        zeros = ((clip == 0) & (self.amax.cpu() > 0)).nonzero().tolist()
        if zeros:
            layer, index = zeros[0]
            raise CalibrationError(
                f"{percentile} % of {TENSORS[index]} of layer {layer} are 0 and others as large as "
                f"{float(self.amax[layer, index])}: take a higher percentile, or None"
            )


def _sketch(x: Tensor, what: str, bins: int) -> tuple[Tensor, Tensor]:
    """The sketch of one tensor that is not empty: amax, float32 [], and counts, int64 [bins]."""
    counts = torch.zeros(bins, dtype=torch.int64, device=x.device)
    maxima = []
    for piece in _pieces(x):
        magnitudes = _magnitude_bits(piece.reshape(-1))
        maxima.append(magnitudes.max().int() << (16 if x.dtype is torch.bfloat16 else 0))
        if maxima[-1] >= INFINITY_BITS:
            raise CalibrationError(f"{what}: {non_finite(x)}")
        if bins == 1:
            counts += magnitudes.numel()
            continue
        if x.dtype is not torch.bfloat16:
            magnitudes = (magnitudes + 0xFFFF) >> 16
        counts += torch.bincount(magnitudes, minlength=BINS)
    return torch.stack(maxima).max().view(torch.float32), counts


def _pieces(x: Tensor) -> tuple[Tensor, ...]:
    """x cut along its longest dimension, so that whatever its strides only a piece at a time is copied."""
    if not x.dim():
        return (x,)
    longest = max(range(x.dim()), key=x.size)
    return x.split(max(1, PIECE_VALUES[x.device.type] * x.size(longest) // x.numel()), longest)


def _magnitude_bits(x: Tensor) -> Tensor:
    """int16 of bfloat16, int32 of float32 and of float16 made float32: their order is that of the magnitudes."""
    if x.dtype is torch.bfloat16:
        return x.view(torch.int16) & 0x7FFF
    return x.float().view(torch.int32) & 0x7FFFFFFF


def _scale(amax: float, margin: float, scale_format: ScaleFormat) -> float:
    if amax == 0:
        return 1.0
    exact = Fraction(amax) * Fraction(margin) / Fraction(E4M3_MAX)
    if scale_format == "fp32":
        scale = float(exact)
    else:  # the smallest power of two that is not below: 2^(exponent - 1) < exact < 2^(exponent + 1)
        exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
        scale = math.ldexp(1.0, exponent + (exact > Fraction(2) ** exponent))
    return float(torch.tensor(max(scale, SMALLEST_SCALE), dtype=torch.float32))
