"""MXFP8 and NVFP4 methods for GPUs: what they derive for the kernels, which is chosen, and what they multiply.

The kernels themselves are fakes (fake_marlin.py), which read the derived tensors as the real ones do.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm.model_executor.kernels.linear.mxfp8.flashinfer", reason="vLLM 0.25 has other kernels")

from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.fp8 import (
    FORMATS,
    MXFP8,
    NVFP4,
    NVFP4_A16,
    BlockScaled,
    Format,
    LinearRecipe,
    fake_quantize_tokens,
    quantize_blockwise,
)
from nemo_fp8rl.generation.fp8_method.gpu_formats import activations, choice, derived, marlin_linear
from nemo_fp8rl.generation.fp8_method.gpu_formats.blackwell_linear import (
    BlackwellMxfp8LinearMethod,
    BlackwellNvfp4LinearMethod,
)
from nemo_fp8rl.generation.fp8_method.gpu_formats.marlin_linear import MarlinLinearMethod
from tests.conftest import RECIPES, SMALL
from tests.generation.fp8_method.fake_marlin import use_fakes
from tests.generation.pair import Pair

WITH_LINES = [FORMATS[name] for name in ("mxfp8", "mxfp8_1x32", "nvfp4", "nvfp4_1x16")]
SHAPES = [(1, 1), (5, 3), (128, 4), (129, 5), (300, 12)]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def stored(format: Format, n: int = 192, k: int = 128) -> BlockScaled:
    """A weight whose rows have very different sizes, so that a scale in another place shows."""
    return quantize_blockwise(randn(n, k) * torch.logspace(-2, 1, n)[:, None].bfloat16(), format=format)


def layer_of(weight: BlockScaled) -> Any:
    """The parameters of a layer, as a refit writes them."""
    format = weight.format
    layer = torch.nn.Module()
    tensors = {"weight": weight.data, format.scale_name("weight"): weight.scale_inv}
    if weight.global_scale is not None:
        tensors[format.global_name("weight")] = weight.global_scale.expand(3).clone()
    for name, tensor in tensors.items():
        layer.register_parameter(name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    return layer


@pytest.mark.parametrize("shape", SHAPES)
def test_swizzled_scales_are_vllms(monkeypatch, shape):
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import swizzle_mxfp8_scale
    from vllm.model_executor.layers.quantization.utils.nvfp4_utils import swizzle_blockscale

    monkeypatch.setattr(Tensor, "cuda", lambda tensor: tensor)
    scales = torch.randint(1, 120, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(derived.swizzle(scales).flatten(), swizzle_mxfp8_scale(scales, shape[0], shape[1] * 32))
    of_fp4 = scales.view(torch.float8_e4m3fn)
    expected = swizzle_blockscale(of_fp4)
    got = derived.swizzle(of_fp4)
    assert got.shape == expected.shape
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("format", WITH_LINES, ids=lambda format: format.name)
def test_a_scale_for_every_row_dequantizes_to_the_same_values(format):
    weight = stored(format, n=80)
    scales = derived.row_scales(weight)
    assert scales.shape == (80, 128 // format.weight_block[1])
    in_lines = BlockScaled(weight.data, scales, format.line_block, format, weight.global_scale)
    assert torch.equal(in_lines.dequantize(), weight.dequantize())


@pytest.mark.parametrize("format", [MXFP8, NVFP4], ids=lambda format: format.name)
@pytest.mark.parametrize("rows", [1, 7])
def test_rounded_activations_are_the_contracts(format, rows):
    x = randn(rows, 96) * torch.logspace(-4, 3, rows)[:, None].bfloat16()
    x[0] = 0.0
    got = activations.round_activations(x, format.name)
    expected = fake_quantize_tokens(x, format)
    assert torch.equal(got.view(torch.int16), expected.view(torch.int16))
    torch.library.opcheck(torch.ops.nemo_fp8rl.round_activations, (x, format.name))


@pytest.mark.parametrize("operation", ["quantize_mxfp8", "quantize_nvfp4"])
@pytest.mark.parametrize("rows", [1, 130])
def test_torch_compile_knows_the_quantizers_shapes(operation, rows):
    torch.library.opcheck(getattr(torch.ops.nemo_fp8rl, operation), (randn(rows, 160),))


METHODS = [
    (MXFP8, MarlinLinearMethod),
    (NVFP4, MarlinLinearMethod),
    (NVFP4_A16, MarlinLinearMethod),
    (FORMATS["nvfp4_a16_1x16"], MarlinLinearMethod),
    (MXFP8, BlackwellMxfp8LinearMethod),
    (FORMATS["mxfp8_1x32"], BlackwellMxfp8LinearMethod),
    (NVFP4, BlackwellNvfp4LinearMethod),
]


@pytest.mark.parametrize(("format", "kind"), METHODS, ids=lambda value: getattr(value, "name", None) or value.__name__)
def test_a_linear_layer_multiplies_the_trainers_values_after_every_refit(monkeypatch, format, kind):
    use_fakes(monkeypatch)
    method, weight = kind(LinearRecipe(format)), stored(format)
    layer = layer_of(weight)
    method.prepare(layer, torch.bfloat16)
    bias, x = randn(192, seed=3), randn(2, 70, 128, seed=2)

    def check(weight: BlockScaled) -> None:
        method.process_weights_after_loading(layer)
        values = fake_quantize_tokens(x.view(140, 128), format).float()
        expected = (values @ weight.dequantize().t()).bfloat16().view(2, 70, 192) + bias
        got = method.apply(layer, x, bias)
        assert got.shape == expected.shape
        close = (got == expected).float().mean()
        assert close > 0.99, close  # the kernels may sum in another order
        torch.testing.assert_close(got, expected, rtol=0.01, atol=0.01 * float(expected.abs().max()))

    check(weight)
    names = [name for name in vars(layer) if name.startswith("kernel_")]
    addresses = {name: getattr(layer, name).data_ptr() for name in names}
    assert addresses
    second = quantize_blockwise(weight.dequantize().flip(0) * 8, format=format)
    before = {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}
    for parameter, tensor in zip(layer.parameters(), layer_of(second).parameters(), strict=True):
        parameter.data.copy_(tensor.data)
    check(second)
    assert {name: getattr(layer, name).data_ptr() for name in names} == addresses
    assert {name: parameter.data_ptr() for name, parameter in layer.named_parameters()} == before
    assert torch.equal(method.stored(layer).dequantize(), second.dequantize())


def fake_gpu(monkeypatch, capability: int, has_flashinfer: bool = True) -> None:
    """A GPU of this compute capability, as far as vLLM's own questions about kernels go."""
    from vllm.model_executor.kernels.linear.mxfp8 import flashinfer
    from vllm.model_executor.layers.quantization.utils import nvfp4_utils

    platform = SimpleNamespace(
        is_cuda=lambda: True,
        has_device_capability=lambda least: capability >= least,
        is_device_capability_family=lambda family: capability // 10 == family // 10,
        get_device_capability=lambda: SimpleNamespace(to_int=lambda: capability),
    )
    monkeypatch.setattr(flashinfer, "current_platform", platform)
    monkeypatch.setattr(flashinfer, "has_flashinfer", lambda: has_flashinfer)
    monkeypatch.setattr(nvfp4_utils, "current_platform", platform)
    monkeypatch.setattr(nvfp4_utils, "cutlass_scaled_mm_supports_fp4", lambda number: number >= 100)
    monkeypatch.setattr(choice, "load", lambda name, device: None)
    monkeypatch.setattr(choice, "load_fp4", lambda name, device: None)


@pytest.mark.parametrize(
    ("capability", "format", "name"),
    [
        (90, "mxfp8", "MarlinLinearMethod"),
        (90, "nvfp4", "MarlinLinearMethod"),
        (90, "nvfp4_a16", "MarlinLinearMethod"),
        (100, "mxfp8", "BlackwellMxfp8LinearMethod"),
        (120, "mxfp8_1x32", "BlackwellMxfp8LinearMethod"),
        (100, "nvfp4", "BlackwellNvfp4LinearMethod"),
        (100, "nvfp4_a16_1x16", "MarlinLinearMethod"),
    ],
)
def test_the_method_follows_format_and_gpu(monkeypatch, capability, format, name):
    fake_gpu(monkeypatch, capability)
    linear, experts = choice.gpu_methods(LinearRecipe(FORMATS[format]))
    assert linear.__name__ == name
    assert experts.__name__ == "MarlinMoEMethod"


def test_what_has_no_kernel_is_refused_or_goes_to_marlin(monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(choice, "vllm_version", lambda: (0, 25))
        with pytest.raises(ValueError, match=r"mxfp8 on a GPU needs the kernels of vLLM 0\.32; install it"):
            choice.gpu_methods(LinearRecipe(MXFP8))
    fake_gpu(monkeypatch, 100, has_flashinfer=False)
    with caplog.at_level("INFO"):
        assert choice.gpu_methods(LinearRecipe(MXFP8))[0] is MarlinLinearMethod
    assert "Marlin multiplies mxfp8, with activations that were rounded before: requires FlashInfer" in caplog.text
    for format in (NVFP4, NVFP4_A16):
        with pytest.raises(ValueError, match=rf"fp32 with {format.name} .*set nemo_fp8rl\.scale_format=pow2"):
            choice.gpu_methods(LinearRecipe(format, "fp32"))
    assert choice.gpu_methods(LinearRecipe(NVFP4_A16))[0] is MarlinLinearMethod
    with pytest.raises(ValueError, match=r"take bfloat16, not torch\.float16; set policy\.precision=bfloat16"):
        marlin_linear.check_activations(torch.float16)
    for kind, format, shape, reason in (
        (BlackwellNvfp4LinearMethod, NVFP4, (48, 64), "multiples of 32"),
        (BlackwellMxfp8LinearMethod, MXFP8, (64, 128), "N >= 128"),
    ):
        with pytest.raises(ValueError, match=f"{reason}.*quantization_ignored_layer_kws"):
            kind(LinearRecipe(format)).prepare(layer_of(stored(format, *shape)), torch.bfloat16)


@pytest.mark.parametrize(
    ("format", "kind"),
    [("nvfp4_a16", MarlinLinearMethod), ("nvfp4", BlackwellNvfp4LinearMethod), ("mxfp8", BlackwellMxfp8LinearMethod)],
)
def test_a_refitted_engine_multiplies_what_the_trainer_does(monkeypatch, tmp_path, format, kind):
    """vLLM's engine, loaders and reload are real, and so is the refit; the kernels are fakes."""
    from nemo_fp8rl.generation.fp8_method import quantization

    use_fakes(monkeypatch)
    monkeypatch.setattr(quantization, "methods_for_device", lambda recipe: (kind, None))
    make_tiny(tmp_path / "tiny", "add")
    paths = (f"policy.model_name={tmp_path}/tiny/model", f"data.train.data_path={tmp_path}/tiny/data.jsonl")
    pair = Pair(load(RECIPES / "tiny_cpu.yaml", [*paths, *SMALL, f"nemo_fp8rl.flow={format}_e2e"]))

    def addresses() -> dict[str, int]:
        (found,) = pair.engine.core.llm.apply_model(
            lambda model: {
                f"{name}.{key}": value.data_ptr()
                for name, module in model.named_modules()
                for key, value in vars(module).items()
                if key.startswith("kernel_")
            }
        )
        return found

    try:
        pair.refit()
        before, first = addresses(), pair.mismatch()
        pair.train(1)
        pair.refit()
        assert max(first, pair.mismatch()) < 1.0005
        assert before
        assert addresses() == before
    finally:
        pair.close()
