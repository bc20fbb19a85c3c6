"""Transformer Engine's Python on a CPU: the package's quantizer and torch's matmul replace its compiled half.

`install` must run before anything imports Megatron. What is real: modules, autograd functions, recipes, quantizers'
layouts, and so which operand of which GEMM is quantized how, from what. What is not: every kernel.
"""

import enum
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from packaging.version import Version
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nemo_fp8rl.fp8 import BLOCK, BlockScaled, LinearRecipe, linear, quantize_blockwise
from nemo_fp8rl.fp8.block_scaled import ALONG_LAST, ALONG_TOKENS, E4M3
from nemo_fp8rl.fp8.kernels.reference import block_scale, to_blocks
from tests.interpreted_triton import interpret

NAME = "transformer_engine_torch"


class DType(enum.IntEnum):
    """The names of transformer_engine/pytorch/csrc/extensions/pybind.cpp that newer Python reads."""

    kByte, kInt32, kFloat32, kFloat16, kBFloat16, kFloat8E4M3, kFloat8E5M2, kFloat4E2M1 = 0, 2, 4, 5, 6, 7, 8, 10


TORCH_DTYPES = {DType.kBFloat16: torch.bfloat16, DType.kFloat32: torch.float32}


class FakeKernels(ModuleType):
    """Stands for the compiled module; a name without a definition below can be imported and fails at its call."""

    DType = DType
    FP8FwdTensors = enum.IntEnum(
        "FP8FwdTensors", [f"GEMM{i}_{kind}" for i in (1, 2, 3) for kind in ("INPUT", "WEIGHT", "OUTPUT")], start=0
    )
    FP8BwdTensors = enum.IntEnum(
        "FP8BwdTensors", [f"GRAD_{kind}{i}" for i in (1, 2, 3) for kind in ("OUTPUT", "INPUT")], start=0
    )

    NVTE_Fused_Attn_Backend = enum.IntEnum(  # asked for on import; nothing here attends by it
        "NVTE_Fused_Attn_Backend", {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
    )
    NVTE_Fused_Attn_Backend.NVTE_F16_max512_seqlen = 0  # 2.14's; 2.20 counts the members

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=f"{NAME}.{name}", side_effect=NotImplementedError(f"no fake of {NAME}.{name}"))

    @staticmethod
    def create_empty_quantized_tensor(
        quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin_memory: bool
    ) -> Any:
        """Since 2.20 the compiled half creates tensors; Python still defines their parts."""
        if type(quantizer).__name__ == "Float8Quantizer":
            return _empty_per_tensor(quantizer, shape, dtype)
        specs, metadata = quantizer.inner_tensor_specs(tuple(shape)), quantizer.storage_metadata(dtype)
        names = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
        parts = {
            name: torch.empty(*part[:1], dtype=part[1], device=device) if (part := specs.get(f"_{name}")) else None
            for name in names
        }
        further = metadata["nontensor_kwargs"]
        if not quantizer.internal:
            further = {"shape": shape, "dtype": further.pop("fake_dtype"), **further}
        return metadata["cls"](**parts, **further)

    @staticmethod
    def quantize(src: Tensor, quantizer: Any, dst: Any = None, noop: Tensor | None = None) -> Any:
        """Quantize with the package's quantizer, in Transformer Engine's layouts (see fp8/kernels/te.py)."""
        assert noop is None
        assert quantizer.dtype == DType.kFloat8E4M3
        out = quantizer.make_empty(src.shape, dtype=src.dtype, device=src.device) if dst is None else dst
        if type(quantizer).__name__ == "Float8Quantizer":
            return _quantize_per_tensor(src, quantizer, out)
        square = quantizer.block_scaling_dim == 2
        x = src.detach().flatten(0, -2).to("cpu", copy=True)  # what numpy has seen can give no memory back
        scale_format = "pow2" if quantizer.force_pow_2_scales else "fp32"

        def quantized(block: tuple[int, int]) -> BlockScaled:
            return quantize_blockwise(x, block=block, scale_format=scale_format)

        if quantizer.rowwise_usage:
            rows = quantized(BLOCK if square else ALONG_LAST)
            out._rowwise_data.copy_(rows.data.view(torch.uint8).view(out._rowwise_data.shape))
            _pad_into(out._rowwise_scale_inv, rows.scale_inv if square else rows.scale_inv.t())
        if quantizer.columnwise_usage:
            columns = quantized(BLOCK if square else ALONG_TOKENS)
            out._columnwise_data.copy_(columns.data.view(torch.uint8).t().reshape(out._columnwise_data.shape))
            _pad_into(out._columnwise_scale_inv, columns.scale_inv.t() if square else columns.scale_inv)
        return out

    @classmethod
    def split_quantize(cls, src: Tensor, sizes: Sequence[int], quantizers: Sequence[Any], **_: Any) -> list[Any]:
        return [
            cls.quantize(part, quantizer) for part, quantizer in zip(src.split(list(sizes)), quantizers, strict=True)
        ]

    product: Callable[[Any, Any], Tensor] | None = None
    """(Activations, weights) -> the forward product of two FP8 operands; None: torch's."""

    @staticmethod
    def generic_gemm(
        a: Any, transa: bool, b: Any, transb: bool, out: Tensor | None, quantizer: Any, out_dtype: Any,
        bias: Tensor | None, bias_dtype: Any, gelu: bool, gelu_in: Any, grad: bool, workspace: Any, size: int,
        accumulate: bool, split: bool, **_: Any,
    ) -> tuple[Tensor, None, None, None]:  # fmt: skip
        """Compute op(b) @ op(a) row by row, from the half of each operand that its GEMM reads."""
        assert quantizer is None
        assert not gelu
        assert not (grad and bias is not None)
        left, right = _operand(b, not transb), _operand(a, transa)
        if out_dtype == DType.kFloat32:
            left, right = left.float(), right.float()
        is_forward = transa and not transb and hasattr(a, "_is_2D_scaled") and hasattr(b, "_is_2D_scaled")
        if is_forward and FakeKernels.product is not None:
            product = FakeKernels.product(b, a)
        else:
            product = (left.t() if transb else left) @ (right.t() if transa else right)
        product = product.to(TORCH_DTYPES[out_dtype])
        if not transb:
            product = product.view(*b.shape[:-1], product.size(-1))
        if bias is not None:
            product = product + bias
        if out is not None:
            product = out.copy_(out + product if accumulate else product)
        return product, None, None, None

    @classmethod
    def te_general_grouped_gemm(
        cls, a: Sequence[Any], transa: bool, b: Sequence[Any], transb: bool, out: list[Tensor], out_dtype: Any,
        m_splits: Sequence[int], bias: Any, bias_dtype: Any, single_output: bool, gelu_in: Any, grad: bool,
        workspaces: Any, size: int, accumulate: bool, split: bool, sms: int,
    ) -> Any:  # fmt: skip
        outs = out[0].split(list(m_splits)) if single_output else out
        for one_a, one_b, one_out in zip(a, b, outs, strict=True):
            cls.generic_gemm(
                one_a, transa, one_b, transb, one_out, None, out_dtype, None, None, False, None, grad, None, 0,
                accumulate, split,
            )  # fmt: skip
        return bias

    @staticmethod
    def fp8_transpose(data: Tensor, dtype: Any, out: Tensor | None = None) -> Tensor:
        return data.t().contiguous() if out is None else out.copy_(data.t())

    @staticmethod
    def fp8_block_scaling_compute_partial_amax(
        part: Tensor, amax: Tensor, rows: int, columns: int, start: int, block: int
    ) -> None:
        whole = torch.zeros(1, rows, columns, device=part.device)
        whole.view(-1)[start : start + part.numel()] = part
        found = to_blocks(whole, (block, block)).abs().amax((2, 4))[0]
        amax[: found.size(0), : found.size(1)] = found

    @staticmethod
    def multi_tensor_compute_scale_and_scale_inv(
        chunk: int, overflow: Tensor, lists: list[list[Tensor]], most: float, pow2: bool, epsilon: float
    ) -> None:
        assert (most, epsilon) == (448.0, 0.0)
        for amax, scale, scale_inv in zip(*lists, strict=True):
            multiplier = block_scale(amax[None, :, None, :, None], torch.float32, "pow2" if pow2 else "fp32")
            scale.copy_(multiplier[0, :, 0, :, 0])
            scale_inv.copy_(1 / scale)

    @staticmethod
    def fp8_block_scaling_partial_cast(
        part: Tensor, out: Tensor, scale: Tensor, rows: int, columns: int, start: int, block: int, dtype: Any
    ) -> None:
        scales = scale.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
        values = part.float() * scales.reshape(-1)[start : start + part.numel()]
        out.copy_(values.clamp(-448, 448).to(E4M3).view(torch.uint8))

    fp8_gathers = 0
    """Of rows or of columns, as one of them ends in the next."""

    @classmethod
    def swap_first_dims(cls, source: Tensor, out: Tensor) -> Tensor:
        cls.fp8_gathers += 1
        return out.copy_(source.transpose(0, 1))

    @staticmethod
    def get_num_cublas_streams() -> int:
        return 1

    @staticmethod
    def multi_tensor_l2norm(chunk: int, overflow: Tensor, lists: list[list[Tensor]], per_tensor: bool) -> Any:
        norms = [tensor.float().norm() for tensor in lists[0]]
        return torch.stack(norms).norm()[None] if norms else torch.zeros(1, device=overflow.device), None

    @staticmethod
    def multi_tensor_scale(chunk: int, overflow: Tensor, lists: list[list[Tensor]], scale: Any) -> None:
        for source, target in zip(*lists, strict=True):
            target.copy_(source * scale)

    multi_tensor_scale_tensor = multi_tensor_scale

    @staticmethod
    def dequantize(source: Any, dtype: Any) -> Tensor:
        """Multiply the bytes of a tensor with one scale."""
        return (source._data.view(E4M3).float() * source._scale_inv).to(TORCH_DTYPES[dtype])

    @staticmethod
    def multi_tensor_adam(chunk: int, overflow: Tensor, lists: list[list[Tensor]], *keywords: Any) -> None:
        """lists: gradients, parameters, first and second moments, and where parameters are not float32, masters."""
        for grad, parameter, mean, square, *master in zip(*lists, strict=True):
            values = _adam(grad, master[0] if master else parameter, mean, square, *keywords)
            for place, value in zip((*(master or [parameter]), mean, square), values, strict=True):
                place.copy_(value)
            parameter.copy_(values[0])

    @staticmethod
    def multi_tensor_adam_param_remainder(
        chunk: int, overflow: Tensor, lists: list[list[Tensor]], *keywords: Any
    ) -> None:
        """lists: gradients, bfloat16 parameters, first and second moments, the low halves of masters."""
        for grad, parameter, mean, square, low in zip(*lists, strict=True):
            high = parameter.view(torch.int16) - (low < 0).to(torch.int16)  # undo the rounding
            master = torch.stack([low, high], -1).view(torch.float32).squeeze(-1)  # little-endian halves
            master, new_mean, new_square = _adam(grad, master, mean, square, *keywords)
            halves = master.contiguous().view(torch.int16).view(*master.shape, 2)
            low.copy_(halves[..., 0])
            parameter.view(torch.int16).copy_(halves[..., 1] + (halves[..., 0] < 0))
            mean.copy_(new_mean)
            square.copy_(new_square)


def _adam(
    grad: Tensor, master: Tensor, mean: Tensor, square: Tensor, lr: float, beta1: float, beta2: float, eps: float,
    step: int, decoupled: bool, bias_correction: bool, weight_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The float32 arithmetic of common/multi_tensor/adam.cu, without a fused multiplication and addition."""
    assert decoupled
    assert bias_correction
    b1, b2 = torch.tensor(beta1, dtype=torch.float32), torch.tensor(beta2, dtype=torch.float32)
    g, p = grad.float(), master.float()
    m = b1 * mean.float() + (1 - b1) * g
    v = b2 * square.float() + (1 - b2) * g * g
    correction1, correction2 = (torch.tensor(1 - b.double().item() ** step, dtype=torch.float32) for b in (b1, b2))
    update = (m / correction1) / ((v / correction2).sqrt() + eps) + weight_decay * p
    return p - lr * update, m, v


def _empty_per_tensor(quantizer: Any, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """A tensor with one scale; as on Hopper, whose matmuls need it, with the transpose that its quantizer names."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

    shape = torch.Size(shape)
    columns = torch.empty(shape[-1:] + shape[:-1], dtype=torch.uint8) if quantizer.columnwise_usage else None
    return Float8Tensor(
        shape=shape, dtype=dtype, data=torch.empty(shape, dtype=torch.uint8), fp8_scale_inv=torch.ones(1),
        fp8_dtype=quantizer.dtype, data_transpose=columns, quantizer=quantizer, device=torch.device("cpu"),
    )  # fmt: skip


def _quantize_per_tensor(source: Tensor, quantizer: Any, out: Any) -> Any:
    """Multiply by the quantizer's scale and saturate; Float8Quantizer's kernel also stores the scale's reciprocal."""
    values = (source.detach().float() * quantizer.scale).clamp(-448, 448).to(E4M3)  # a NaN stays one
    out._data.copy_(values.view(torch.uint8))
    out._scale_inv.copy_(quantizer.scale.reciprocal())
    return out


def fake_product_of_rows(x: Any, weight: Any) -> Tensor:
    """Add as `ops.fp8_linear`, which quantizes the activations again, to the same bytes."""
    from nemo_fp8rl.ops.matmul import fp8_linear

    rows, columns = weight._rowwise_data.shape
    scales = weight._rowwise_scale_inv[: -(-rows // 128), : -(-columns // 128)].contiguous()
    return fp8_linear(_operand(x, True), weight._rowwise_data.view(E4M3), scales, weight._quantizer.force_pow_2_scales)


def _pad_into(place: Tensor, values: Tensor) -> None:
    place.fill_(torch.nan)
    place[: values.size(0), : values.size(1)] = values


def _operand(operand: Any, rowwise: bool) -> Tensor:
    """Return a matrix with tokens, or a weight's rows, first; it is exact in the dtype of `fp8.linear`'s products."""
    if not hasattr(operand, "_is_2D_scaled"):
        return operand.flatten(0, -2)
    half = "_rowwise" if rowwise else "_columnwise"
    data, scales = getattr(operand, f"{half}_data"), getattr(operand, f"{half}_scale_inv")
    data = data.flatten(0, -2) if rowwise else data.flatten(1)  # of columns: transposed
    rows, columns = data.shape
    if operand._is_2D_scaled:
        spread = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    else:
        spread = scales[:, :rows].t().repeat_interleave(128, 1)[:, :columns]
    scale_format = "pow2" if operand._quantizer.force_pow_2_scales else "fp32"
    dtype = LinearRecipe(scale_format=scale_format).operand_dtype(torch.bfloat16)
    values = (data.view(E4M3).float() * spread).to(dtype)
    return values if rowwise else values.t().contiguous()  # as `fp8.linear` has it, or sums would differ


def install() -> bool:
    """Install the fake; return False if Transformer Engine's Python is not on the path."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # its package then neither looks for nor loads its compiled half
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # it would look for the GPU
    sys.modules[NAME] = FakeKernels(NAME)
    interpret()
    try:
        with mock.patch("warnings.warn"):  # that there is no compiled half
            from transformer_engine import common
    except ImportError:
        del sys.modules[NAME]
        return False
    common.load_framework_extension = lambda framework: None
    linear.is_bf16_matmul_fast = lambda: True  # also where nothing poses as a GPU: float32 sums are in another order
    return True


def permute_by_torch() -> None:
    """Replace Transformer Engine's Triton kernels, whose interpreter takes minutes."""
    from megatron.core.transformer.moe import moe_utils

    from nemo_fp8rl.policy.layers import te_linears
    from tests.transformer_engine.fake_permutation import FAKES

    te_linears.HOST_COUNTS_VERSION = Version("0")  # as the fake does, whatever the version
    for name, fake in FAKES.items():
        setattr(moe_utils, name, fake)


class _CpuIsCuda(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}  # a CPU build has none
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        if func is torch.Tensor.to:
            args = tuple(torch.device("cpu") if isinstance(a, torch.device) and a.type == "cuda" else a for a in args)
        return func(*args, **kwargs)


@contextmanager
def _one_by_one(*groups: Any, **_: Any) -> Iterator[Any]:
    """Collectives, which gloo cannot send together, or not of several dtypes."""
    yield SimpleNamespace(wait=lambda: None)


@contextmanager
def fake_hopper() -> Iterator[None]:
    """Make the CPU report to be a GPU of compute capability 9.0."""
    device = SimpleNamespace(name="fake Hopper", major=9, minor=0, multi_processor_count=132)
    answers = {
        "is_available": True,
        "current_device": torch.device("cpu"),
        "get_device_properties": device,
        "get_device_capability": (9, 0),
        "is_current_stream_capturing": False,
        "synchronize": None,
        "manual_seed": None,
        "get_rng_state": torch.get_rng_state(),
    }
    from megatron.core import tensor_parallel
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.extensions.transformer_engine import te_general_gemm
    from megatron.core.transformer.moe import moe_utils

    from nemo_fp8rl.policy.layers import te_linears
    from tests.transformer_engine.fake_permutation import FAKES

    with ExitStack() as stack:
        # the fake permutation takes a count on the host, whatever the version
        stack.enter_context(mock.patch.object(te_linears, "HOST_COUNTS_VERSION", Version("0")))
        # `megatron_on_cpu`, which goes round the rest, replaces these two
        tracker = tensor_parallel.random.get_cuda_rng_tracker
        stack.enter_context(mock.patch.object(tensor_parallel, "get_cuda_rng_tracker", tracker))
        stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", te_general_gemm))
        for name, fake in FAKES.items():
            stack.enter_context(mock.patch.object(moe_utils, name, fake))
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer))
        for name in ("range_push", "range_pop"):
            stack.enter_context(mock.patch.object(torch.cuda.nvtx, name, lambda *_: None))
        stack.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
        for collective_module in (torch.distributed, param_and_grad_buffer):
            stack.enter_context(mock.patch.object(collective_module, "_coalescing_manager", _one_by_one))
        stack.enter_context(mock.patch.object(torch.Tensor, "cuda", lambda self, *_, **__: self))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", torch.Tensor.clone))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", property(lambda self: True), create=True))
        stack.enter_context(_CpuIsCuda())
        yield
