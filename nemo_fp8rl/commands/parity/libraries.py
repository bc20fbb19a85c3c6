"""The installed libraries of other projects, to compare each beside the formula that it publishes.

A library that is not installed, or cannot be loaded, is reported with the reason. With a CUDA GPU the libraries run
there, else on the CPU as far as they can.
"""

import ast
import contextlib
import importlib
import importlib.util
import io
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.commands.parity import formulas, mxfp8_formulas, nvfp4_formulas
from nemo_fp8rl.commands.parity.implementation import FORMATS, Implementation, Quantize
from nemo_fp8rl.commands.parity.transformer_engine import e2m1_codes
from nemo_fp8rl.fp8 import BLOCK, Block, ScaleFormat, kernels
from nemo_fp8rl.fp8.block_scaled import ALONG_LAST, E4M3, BlockScaled
from nemo_fp8rl.fp8.quantize import quantize_blockwise

NEMO_RL_SRC = "NEMO_RL_SRC"
"""Environment variable that names a checkout of NeMo RL."""
NEMO_RL_FILE = Path("nemo_rl/models/generation/vllm/quantization/fp8.py")
NEMO_RL_FUNCTION = "cast_tensor_to_fp8_blockwise"


class UnavailableError(RuntimeError):
    """The library is not installed, or cannot run on this machine."""


def load_libraries() -> tuple[list[Implementation], dict[str, str]]:
    """Return the libraries that can run on this machine, and by name the reason why the others cannot."""
    available: list[Implementation] = []
    reasons: dict[str, str] = {}
    for name, load in LOADERS.items():
        try:
            with silence_stdout():
                available += load()
        except UnavailableError as error:
            reasons[name] = str(error)
    return available, reasons


@contextlib.contextmanager
def silence_stdout() -> Iterator[None]:
    """Discard what a library prints on stdout, which is for the table alone."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def transformer_engine() -> list[Implementation]:
    """Load Transformer Engine's quantizer, through our kernel `te`."""
    if reason := kernels.why_unavailable("te", "cuda"):
        raise UnavailableError(reason)

    def quantize(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
        return quantize_blockwise(x.cuda(), block=block, scale_format=scale_format, kernel="te")

    name, version = "Transformer Engine", _version("transformer_engine")
    return [Implementation(name, formulas.TE, quantize, version=version, formula=name, device="cuda")]


def nemo_rl() -> list[Implementation]:
    """Load `cast_tensor_to_fp8_blockwise` from the text of NeMo RL's file: importing it patches vLLM and needs Ray."""
    source, version = _nemo_rl_file()
    cast = _function(source, NEMO_RL_FUNCTION)

    def quantize(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
        cast.__globals__["global_fp8_config"] = SimpleNamespace(use_weight_pow2_scale=scale_format == "pow2")
        data, scale_inv = cast(x.float().to(_device()), list(block))  # its caller casts to float32 first
        return BlockScaled(data, scale_inv.squeeze(-1), block)

    name = "NeMo RL"
    return [Implementation(name, formulas.NEMO_RL, quantize, (BLOCK,), version=version, formula=name, device=_device())]


def verl() -> list[Implementation]:
    """Load both paths of verl; the Triton path needs a GPU."""
    module = _module("verl.utils.kernel.fp8_kernel")

    def quantizer(path: str) -> Quantize:
        def quantize(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
            data, scale_inv = getattr(module, path)(x.to(_device()), list(block))
            return BlockScaled(data, scale_inv.squeeze(-1) if scale_inv.dim() > 2 else scale_inv, block)

        return quantize

    paths = {"verl torch": "_scaled_fp8_blockwise_pytorch"}
    if torch.cuda.is_available():
        paths["verl Triton"] = "scaled_fp8_blockwise_triton"
    only: tuple[ScaleFormat, ...] = ("fp32",)
    version, device = _version("verl"), _device()
    return [
        Implementation(name, formulas.VERL, quantizer(path), (BLOCK,), only, version, name, device)
        for name, path in paths.items()
    ]


def deepgemm() -> list[Implementation]:
    """Load DeepGEMM's casts in torch, with which its tests and its users quantize."""
    module = _module("deep_gemm.utils.math")

    def quantize(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
        cast = module.per_block_cast_to_fp8 if block == BLOCK else module.per_token_cast_to_fp8
        data, scale_inv = cast(x.to(_device()), use_ue8m0=scale_format == "pow2")
        return BlockScaled(data, scale_inv, block)

    version, formula, device = _version("deep_gemm"), _deepgemm_formula(), _device()
    return [Implementation("DeepGEMM", formulas.DEEPGEMM, quantize, version=version, formula=formula, device=device)]


def vllm() -> list[Implementation]:
    """Load vLLM's cast of weights, its requantization, its torch quantizer, and on a GPU its CUDA kernel."""
    logging.getLogger("vllm").setLevel(logging.ERROR)  # vLLM configures its logging only when an engine starts
    deep_gemm = _module("vllm.utils.deep_gemm")
    fp8_utils = _module("vllm.model_executor.layers.quantization.utils.fp8_utils")
    input_quant = _module("vllm.model_executor.layers.quantization.input_quant_fp8")

    def cast(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
        with _without_compiler():
            data, scale_inv = deep_gemm.per_block_cast_to_fp8(
                x.to(_device()), list(block), use_ue8m0=scale_format == "pow2"
            )
        return BlockScaled(data, scale_inv, block)

    def requantize(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
        quantized = quantize_blockwise(x.to(_device()), block=block, scale_format=scale_format)
        with _without_compiler():
            fp8_utils.requant_weight_ue8m0_inplace(quantized.data, quantized.scale_inv, block)
        return quantized

    def native(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
        rule = SimpleNamespace(group_size=block[1], use_ue8m0=scale_format == "pow2", column_major_scales=False)
        data, scale_inv = input_quant.QuantFP8._quantize_group_native(rule, x.to(_device()))
        return BlockScaled(data, scale_inv, block)

    def group(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
        formulas.check_whole_blocks(x, block)
        data, scale_inv = fp8_utils.per_token_group_quant_fp8(x.cuda(), block[1], use_ue8m0=scale_format == "pow2")
        return BlockScaled(data, scale_inv, block)

    def library(name: str, source: str, call: Quantize, block: Block, formula: str = "") -> Implementation:
        version = _module("vllm").__version__
        return Implementation(name, source, call, (block,), FORMATS, version, formula or name, _device())

    implementations = [
        library("vLLM per_block_cast_to_fp8", "vLLM vllm/utils/deep_gemm.py", cast, BLOCK, _deepgemm_formula()),
        library("vLLM requantizing ours", formulas.FP8_UTILS, requantize, BLOCK),
        library("vLLM native", formulas.INPUT_QUANT, native, ALONG_LAST),
    ]
    if torch.cuda.is_available():
        implementations.append(library("vLLM CUDA", formulas.GROUP_QUANT, group, ALONG_LAST))
    return implementations


def vllm_mxfp8() -> list[Implementation]:
    """Load vLLM's quantizer of MXFP8 in torch."""
    utils = _module("vllm.model_executor.layers.quantization.utils.mxfp8_utils")

    def quantize(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
        formulas.check_whole_blocks(x, block)
        data, scales = utils._mxfp8_e4m3_quantize_torch(x.to(_device()))
        return BlockScaled(data, scales, block, mxfp8_formulas.LINES)

    return [_beside(mxfp8_formulas.FORMULAS, "vLLM torch", quantize, _module("vllm").__version__, _device())]


def vllm_nvfp4() -> list[Implementation]:
    """Load vLLM's emulation of NVFP4, which gives the values of codes."""
    utils = _module("vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils")

    def quantize(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
        formulas.check_whole_blocks(x, block)
        encode = nvfp4_formulas.encode_factor(x, scale_format).to(_device())
        values, scales = utils.ref_nvfp4_quant(x.to(_device()), encode, block[1])
        return _packed(values, scales, 1 / encode, block)

    return [_beside(nvfp4_formulas.FORMULAS, "vLLM emulation", quantize, _module("vllm").__version__, _device())]


def compressed_tensors() -> list[Implementation]:
    """Load compressed-tensors' quantizers, which llm-compressor calls."""
    quantization = _module("compressed_tensors.quantization")
    helpers = _module("compressed_tensors.quantization.utils.helpers")
    forward = _module("compressed_tensors.quantization.lifecycle.forward")

    def cast(x: Tensor, block: Block, arguments: Any, encode: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the values of the codes, and the scales."""
        formulas.check_whole_blocks(x, block)
        blocks = x.view(x.size(0), -1, block[1])
        scales, zeros = helpers.calculate_qparams(blocks.amin(-1), blocks.amax(-1), arguments, global_scale=encode)
        return forward.quantize(x, scales, zeros, arguments, global_scale=encode), scales

    def nvfp4(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
        pow2 = nvfp4_formulas.encode_factor(x, scale_format)
        encode = helpers.generate_gparam(x.amin(), x.amax()) if scale_format == "fp32" else pow2
        arguments = quantization.QuantizationArgs(
            num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=E4M3, zp_dtype=E4M3
        )
        return _packed(*cast(x, block, arguments, encode), 1 / encode, block)

    def mxfp8(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
        arguments = quantization.QuantizationArgs(
            num_bits=8, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8, zp_dtype=torch.uint8
        )
        data, scales = cast(x.float(), block, arguments, None)
        return BlockScaled(data.to(E4M3), scales.float().log2().add(127).to(torch.uint8), block, mxfp8_formulas.LINES)

    name, version = "compressed-tensors", _version("compressed-tensors")
    return [
        _beside(mxfp8_formulas.FORMULAS, name, mxfp8, version, "cpu"),
        _beside(nvfp4_formulas.FORMULAS, name, nvfp4, version, "cpu"),
    ]


def _beside(
    published: Iterable[Implementation], name: str, quantize: Quantize, version: str, device: str
) -> Implementation:
    """Return the library that implements the formula of that name."""
    formula = next(formula for formula in published if formula.name == name)
    return replace(formula, quantize=quantize, formula=name, version=version, device=device)


def _packed(values: Tensor, scales: Tensor, global_scale: Tensor, block: Block) -> BlockScaled:
    """Return NVFP4 of the values of codes [N, K], which are written as codes and packed."""
    codes = e2m1_codes(values.float().cpu().numpy())
    data = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)
    return BlockScaled(data, scales.to(E4M3).cpu(), block, nvfp4_formulas.LINES, global_scale.cpu().view(()))


LOADERS: dict[str, Callable[[], list[Implementation]]] = {
    "Transformer Engine": transformer_engine,
    "NeMo RL": nemo_rl,
    "verl": verl,
    "DeepGEMM": deepgemm,
    "vLLM": vllm,
    "vLLM MXFP8": vllm_mxfp8,
    "vLLM NVFP4": vllm_nvfp4,
    "compressed-tensors": compressed_tensors,
}


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown version"


def _module(name: str) -> Any:
    """Import a module of a library. Raises UnavailableError."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise UnavailableError("not installed")
    try:
        return importlib.import_module(name)
    except Exception as error:  # a foreign package may raise anything while it loads
        raise UnavailableError(f"cannot be imported ({type(error).__name__}: {error})") from error


def _nemo_rl_file() -> tuple[Path, str]:
    """Return the path of NeMo RL's fp8.py and its version. Raises UnavailableError."""
    if root := os.environ.get(NEMO_RL_SRC):
        path, version = Path(root) / NEMO_RL_FILE, f"in {NEMO_RL_SRC}"
    else:
        spec = importlib.util.find_spec("nemo_rl")  # finds a package without running it
        if spec is None or spec.origin is None:
            raise UnavailableError(f"not installed, and {NEMO_RL_SRC} names no checkout")
        path, version = Path(spec.origin).parent.parent / NEMO_RL_FILE, _version("nemo-rl")
    if not path.is_file():
        raise UnavailableError(f"there is no {path}")
    return path, version


def _function(path: Path, name: str) -> FunctionType:
    """Return one function of a file, with torch as its only global. Raises UnavailableError."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            scope: dict[str, Any] = {"torch": torch}
            exec(compile(ast.Module([node], []), str(path), "exec"), scope)
            return scope[name]
    raise UnavailableError(f"{path} has no function {name}")


def _without_compiler() -> contextlib.AbstractContextManager[Any]:
    """Run vLLM's compiled cast as plain torch operations: the machine may have no compiler."""
    return torch.compiler.set_stance("force_eager")


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _deepgemm_formula() -> str:
    """Return the name of the formula of DeepGEMM's cast on this machine's device."""
    return "DeepGEMM, on CUDA" if torch.cuda.is_available() else "DeepGEMM, on CPU"
