"""Bytes of one value, by format."""

from nemo_fp8rl.fp8 import Format, with_lines

GIB = 2**30
BF16, FP32 = 2, 4


def sent_width(format: Format) -> float:
    """Return the bytes of a quantized value with its share of a scale, as a refit sends it."""
    return format.bits_per_value / 8


def engine_width(format: Format) -> float:
    """Return the same as an engine's kernels have it, which read a scale of MXFP8 and NVFP4 for each row."""
    return sent_width(with_lines(format) if format.engine_rows == 1 else format)
