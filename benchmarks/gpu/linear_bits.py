"""Matrix products of the libraries and of ours, compared bit by bit: FP8 with block scales, and bf16."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.report import (
    DEVICE,
    MISSING,
    ON_GPU,
    Report,
    describe_agreement,
    equal_share,
    milliseconds,
    percent,
)
from nemo_fp8rl.fp8 import FP8_TOKENS, BlockScaled, quantize_activations, quantize_blockwise
from nemo_fp8rl.ops.matmul import fp8_linear, linear

FP8_SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
    "tiny": (512, 256),
}
"""(N, K) of Qwen3-8B's linear layers, and of one of the tiny model."""
BF16_SHAPES = {"head": (151936, 4096, 4096), "router": (128, 2048, 16384), "qkv": (6144, 4096, 16384)}
"""(N, K, largest M); logits are never computed for more tokens at once."""
ROWS = (16384, 1, 16, 256, 4096, 64, 2, 7, 100, 1000)
"""Numbers of rows, the most telling first. The first is what the others' rows are compared with."""
DRY_FP8_SHAPES, DRY_BF16_SHAPES, DRY_ROWS = {"tiny": (256, 256)}, {"router": (64, 128, 70)}, (70, 1, 16)

Multiply = Callable[[int], Tensor]
"""The first so many rows of x times the weight, bf16 [rows, N]."""


@dataclass
class Operands:
    """x [M, K] and a weight [N, K].

    x, weight:     bf16
    scale_format:  of the FP8 scales
    quantized:     the weight in FP8
    """

    x: Tensor
    weight: Tensor
    scale_format: str
    quantized: BlockScaled | None

    def rows(self, count: int, multiple: int = 1) -> tuple[Tensor, Tensor]:
        """Return the first rows of x in FP8, and scales column by column with columns padded to `multiple`."""
        m, k = count, -(-self.x.size(1) // 128)
        scales = torch.empty((k, -(-m // multiple) * multiple), dtype=torch.float32, device=self.x.device).t()[:m]
        return quantize_activations(self.x[:count], self.scale_format, scales).data, scales


def deep_gemm() -> Any:
    """Return the module, vLLM's copy where it has no package of its own. Raises ImportError."""
    if not ON_GPU:
        raise ImportError("needs a GPU")
    try:
        return importlib.import_module("deep_gemm")
    except ImportError:
        return importlib.import_module("vllm.third_party.deep_gemm")


def by_transformer_engine(o: Operands) -> Callable[[int], Callable[[], Tensor]]:
    """Quantize by Transformer Engine's own quantizers, and multiply as its Linear does."""
    if not ON_GPU:
        raise ImportError("needs a GPU")
    import transformer_engine.pytorch  # noqa: F401  loads the libraries that the next import needs
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.cpp_extensions import general_gemm
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    def quantizer(dimensions: int) -> Any:
        return Float8BlockQuantizer(
            fp8_dtype=tex.DType.kFloat8E4M3,
            rowwise=True,
            columnwise=False,
            amax_epsilon=0.0,
            force_pow_2_scales=o.scale_format == "pow2",
            block_scaling_dim=dimensions,
        )

    weight = quantizer(2)(o.weight)

    def prepare(count: int) -> Callable[[], Tensor]:
        x = quantizer(1)(F.pad(o.x[:count], (0, 0, 0, -count % FP8_TOKENS)))
        options = {"out_dtype": torch.bfloat16, "use_split_accumulator": True}
        return lambda: general_gemm(weight, x, **options)[0][:count]

    return prepare


def by_deep_gemm(o: Operands) -> Callable[[int], Callable[[], Tensor]]:
    product, w = deep_gemm().fp8_gemm_nt, o.quantized
    assert w is not None

    def prepare(count: int) -> Callable[[], Tensor]:
        x, out = o.rows(count, 4), o.x.new_empty(count, len(o.weight))

        def multiply() -> Tensor:
            product(x, (w.data, w.scale_inv), out, disable_ue8m0_cast=True)
            return out

        return multiply

    return prepare


def by_cutlass(o: Operands) -> Callable[[int], Callable[[], Tensor]]:
    if not ON_GPU:
        raise ImportError("needs a GPU")
    from vllm._custom_ops import cutlass_scaled_mm

    w = o.quantized
    assert w is not None

    def prepare(count: int) -> Callable[[], Tensor]:
        data, scales = o.rows(count)
        return lambda: cutlass_scaled_mm(data, w.data.t(), scales, w.scale_inv.t(), torch.bfloat16)

    return prepare


def by_vllms_triton(o: Operands) -> Callable[[int], Callable[[], Tensor]]:
    import vllm.triton_utils  # before the kernel's module, which asks it whether there is Triton
    from vllm.model_executor.layers.quantization.utils.fp8_utils import _w8a8_triton_block_scaled_mm as kernel

    assert vllm.triton_utils.HAS_TRITON
    w = o.quantized
    assert w is not None
    (n, k), block_m = o.weight.shape, 64

    def prepare(count: int) -> Callable[[], Tensor]:
        data, scales = o.rows(count)
        out = o.x.new_empty(count, n)
        grid = (-(-count // block_m) * -(-n // 128),)
        strides = (*data.stride(), *w.data.t().stride(), *out.stride(), *scales.stride(), *w.scale_inv.t().stride())
        tile = {"BLOCK_SIZE_M": block_m, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 32}
        launch = {"num_warps": 4, "num_stages": 3} if ON_GPU else {}

        def multiply() -> Tensor:
            kernel[grid](data, w.data, out, scales, w.scale_inv, count, n, k, 128, 128, *strides, **tile, **launch)
            return out

        return multiply

    return prepare


def by_ours(o: Operands) -> Callable[[int], Callable[[], Tensor]]:
    """With the quantizer, which is a part of the operation."""
    w = o.quantized
    assert w is not None
    return lambda count: lambda: fp8_linear(o.x[:count], w.data, w.scale_inv, o.scale_format == "pow2")


def by_torch_bf16(o: Operands) -> Callable[[int], Callable[[], Tensor]]:
    return lambda count: lambda: F.linear(o.x[:count], o.weight)


def by_deep_gemm_bf16(o: Operands) -> Callable[[int], Callable[[], Tensor]]:
    product = deep_gemm().bf16_gemm_nt

    def prepare(count: int) -> Callable[[], Tensor]:
        out = o.x.new_empty(count, len(o.weight))

        def multiply() -> Tensor:
            product(o.x[:count], o.weight, out)
            return out

        return multiply

    return prepare


def by_ours_bf16(o: Operands) -> Callable[[int], Callable[[], Tensor]]:
    return lambda count: lambda: linear(o.x[:count], o.weight)


FP8_KERNELS = {
    "TE": by_transformer_engine,
    "DeepGEMM": by_deep_gemm,
    "CUTLASS": by_cutlass,
    "Triton": by_vllms_triton,
    "ours": by_ours,
}
BF16_KERNELS = {"F.linear": by_torch_bf16, "DeepGEMM": by_deep_gemm_bf16, "ours": by_ours_bf16}


def random_operands(m: int, n: int, k: int, scale_format: str = "") -> Operands:
    """Return operands of the same values in every run. Without a scale format the weight is not quantized."""
    generator = torch.Generator(DEVICE).manual_seed(n + k)
    x = torch.randn(m, k, generator=generator, device=DEVICE).bfloat16()
    weight = (torch.randn(n, k, generator=generator, device=DEVICE) * k**-0.5).bfloat16()
    quantized = quantize_blockwise(weight, scale_format=scale_format) if scale_format else None  # type: ignore[arg-type]
    return Operands(x, weight, scale_format, quantized)


class Comparison:
    """Kernels on one pair of operands; a kernel that a machine lacks is named once in a report."""

    def __init__(self, report: Report, kernels: dict[str, Any], rounds: int) -> None:
        self.report, self.kernels, self.rounds = report, dict(kernels), rounds

    def run(self, case: str, operands: Operands, rows: tuple[int, ...]) -> None:
        """Add a line for each number of rows.

        case:      the name of the shape
        operands:  x has rows[0] rows
        rows:      the largest first
        """
        prepared = {}
        for name, kernel in list(self.kernels.items()):
            try:
                prepared[name] = kernel(operands)
            except MISSING as error:
                del self.kernels[name]
                self.report.leave_out(name, error)
        whole: dict[str, Tensor] = {}
        for count in rows:
            if self.report.has_time():
                self._compare(f"{case} M={count}", count, prepared, whole)

    def _compare(self, case: str, count: int, prepared: dict[str, Any], whole: dict[str, Tensor]) -> None:
        outputs, own_rows, times = {}, {}, {}
        for name in list(prepared):
            try:
                multiply = prepared[name](count)
                outputs[name] = multiply().clone()
                times[name] = milliseconds(multiply, self.rounds)
            except Exception as error:
                del prepared[name]
                self.report.fail(f"{case} {name}", error)
                continue
            own_rows[name] = equal_share(outputs[name], whole.setdefault(name, outputs[name])[:count])
        if not outputs:
            return
        text, shares = describe_agreement(outputs)
        moved = [f"{name} {percent(share)}" for name, share in own_rows.items() if share < 1]
        rows = f"rows of the largest M: {', '.join(moved) or 'all equal'}"
        ms = " ".join(f"{name} {time:.3f}" for name, time in times.items())
        self.report.add(case, f"{text}; {rows}; ms: {ms}", equal=shares, own_rows=own_rows, ms=times)


def compare_fp8(report: Report, dry_run: bool, rounds: int) -> None:
    """Add the lines of the FP8 products: power-of-two scales first."""
    comparison = Comparison(report, FP8_KERNELS, rounds)
    rows = DRY_ROWS if dry_run else ROWS
    for scale_format in ("pow2", "fp32"):
        for name, (n, k) in (DRY_FP8_SHAPES if dry_run else FP8_SHAPES).items():
            if not report.has_time():
                continue
            comparison.run(f"{scale_format} {name} {n}x{k}", random_operands(rows[0], n, k, scale_format), rows)


def compare_bf16(report: Report, dry_run: bool, rounds: int) -> None:
    """Add the lines of the bf16 products."""
    comparison = Comparison(report, BF16_KERNELS, rounds)
    for name, (n, k, largest) in (DRY_BF16_SHAPES if dry_run else BF16_SHAPES).items():
        if not report.has_time():
            continue
        rows = (largest, *(count for count in (DRY_ROWS if dry_run else ROWS) if count < largest))
        comparison.run(f"bf16 {name} {n}x{k}", random_operands(largest, n, k), rows)
