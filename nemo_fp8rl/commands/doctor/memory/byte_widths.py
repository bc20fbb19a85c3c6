"""Bytes of one value, by format."""

from nemo_fp8rl.fp8 import BLOCK

GIB = 2**30
BF16, FP32 = 2, 4
SCALE = FP32 / (BLOCK[0] * BLOCK[1])
"""Bytes of scales for each value of an FP8 weight."""
