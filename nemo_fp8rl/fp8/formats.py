"""The number formats of quantized weights: one frozen description for quantizer, wire, engine, export and doctor.

Everything that depends on a format asks its `Format`; a new format is one entry here and its kernels. This module needs
no torch, because recipes are read without it; `block_scaled.py` has the dtypes.

A format has two levels of scale at most. Each block has a scale. In NVFP4 the block scales are E4M3, whose range is
short, so that a tensor has a global scale as well: value = element * block scale * global scale.
"""

from dataclasses import dataclass, replace
from typing import Literal

from nemo_fp8rl.fp8.names import Backward, Block, ScaleFormat

Element = Literal["e4m3", "e2m1"]
"""E4M3 is one byte, up to 448. E2M1 is half a byte, up to 6; the even column is in the low half."""
ScaleType = Literal["float32", "e8m0", "e4m3"]
"""The type of a block's scale. E8M0 is a power of two in one byte: the exponent, biased by 127."""


@dataclass(frozen=True)
class Format:
    """How weights and activations are quantized.

    name:           of the format, which also says the block where a format has several
    element:        the type of the values
    scale:          the type of the block scales
    weight_block:   rows and columns of a weight that share a scale
    token_block:    the same of an activation that a matmul sums over its last dimension; None: activations stay in
                    bfloat16
    has_global:     a tensor also has a global scale, float32
    engine_rows:    rows of a weight for each row of scales that vLLM's own kernels and loaders expect
    scale_suffix:   what a checkpoint adds to the name of a weight for the name of its block scales
    """

    name: str
    element: Element
    scale: ScaleType
    weight_block: Block
    token_block: Block | None
    engine_rows: int
    scale_suffix: str
    has_global: bool = False

    @property
    def values_per_byte(self) -> int:
        return 2 if self.element == "e2m1" else 1

    @property
    def scale_itemsize(self) -> int:
        return 4 if self.scale == "float32" else 1

    @property
    def family(self) -> str:
        """The name without the block."""
        return self.name.removesuffix("_{}x{}".format(*self.weight_block))

    @property
    def description(self) -> str:
        rows, columns = self.weight_block
        activations = "" if self.token_block else ", activations in bfloat16"
        return f"{self.family.removesuffix('_a16').upper()} in blocks of {rows}x{columns}{activations}"

    @property
    def line_block(self) -> Block:
        """The block of one row that is as wide as the weight's."""
        return (1, self.weight_block[1])

    @property
    def column_block(self) -> Block:
        """The block of an activation or gradient that a matmul sums over its tokens."""
        return (self.weight_block[1], 1)

    @property
    def is_fp4(self) -> bool:
        return self.element == "e2m1"

    @property
    def default_backward(self) -> Backward:
        """`dequantized` in FP4, as peers take it for RL: the gradient of what the forward multiplied."""
        return "dequantized" if self.is_fp4 else "native"

    @property
    def has_native_backward(self) -> bool:
        """Return whether there are matmuls of quantized operands; a weight-only format has none."""
        return self.token_block is not None

    def is_exact_in_bf16(self, scale_format: ScaleFormat) -> bool:
        """Return whether bfloat16 holds every dequantized value exactly."""
        return self.scale == "e8m0" or scale_format == "pow2"

    def data_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the bytes of a weight [..., N, K].

        Raises: ValueError if a byte would hold values of two rows
        """
        if shape[-1] % self.values_per_byte:
            raise ValueError(f"{self.name} packs two values into a byte, and a row has {shape[-1]} values")
        return (*shape[:-1], shape[-1] // self.values_per_byte)

    def scale_name(self, weight: str) -> str:
        """Return the name of the block scales that belong to a weight."""
        return weight + self.scale_suffix

    def global_name(self, weight: str) -> str:
        """Return the name of the global scale that belongs to a weight."""
        return f"{weight}_scale_2"

    @property
    def bits_per_value(self) -> float:
        """The bits of a weight's value and of its share of a block scale."""
        rows, columns = self.weight_block
        return 8 / self.values_per_byte + 8 * self.scale_itemsize / (rows * columns)


FP8 = Format("fp8", "e4m3", "float32", (128, 128), (1, 128), 128, "_scale_inv")
MXFP8 = Format("mxfp8", "e4m3", "e8m0", (32, 32), (1, 32), 1, "_scale")
NVFP4 = Format("nvfp4", "e2m1", "e4m3", (16, 16), (1, 16), 1, "_scale", has_global=True)
NVFP4_A16 = replace(NVFP4, name="nvfp4_a16", token_block=None)


def with_lines(format: Format) -> Format:
    """Return the format with blocks of one row, as libraries quantize weights for engines alone."""
    rows, columns = format.line_block
    return replace(format, name=f"{format.name}_{rows}x{columns}", weight_block=format.line_block)


FLOW_FORMATS: dict[str, Format] = {"fp8": FP8, "mxfp8": MXFP8, "nvfp4": NVFP4, "nvfp4_a16": NVFP4_A16}
"""The formats by their names in `nemo_fp8rl.flow`."""
FORMATS = {format.name: format for f in FLOW_FORMATS.values() for format in (f, with_lines(f))}
"""All formats by name, as parts on the wire name them."""
