"""Exported MXFP8 and NVFP4 in vLLM: our method and vLLM's own `modelopt` generate what a refitted engine does.

Real: vLLM's config, layers, loaders and, for NVFP4, its emulation. vLLM has no kernel of these formats for a CPU, so
kernels are registered here: its own emulation of W4A4, and a plain matmul of what its own functions quantize and
dequantize for the others, as its emulation of MXFP8 leaves activations alone and W4A16 has none. Experts multiply as
ours do on a CPU.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from nemo_fp8rl.common.vllm_version import NEWER, vllm_version
from nemo_fp8rl.fp8 import FLOW_FORMATS, BlockScaled, LinearRecipe
from nemo_fp8rl.generation.fp8_method.on_cpu.emulated_experts import EmulatedMoEMethod
from nemo_fp8rl.generation.fp8_method.quantization_config import engine_format
from tests.generation.fp8_method.test_exported import METHODS, Exported, check_methods
from tests.generation.pair import GREEDY, apart, outputs

ALGORITHMS = {"mxfp8": "MXFP8", "nvfp4": "NVFP4", "nvfp4_a16": "W4A16_NVFP4"}
CASES = [("mxfp8", "qwen3"), ("nvfp4", "qwen3"), ("nvfp4_a16", "qwen3"), ("mxfp8", "qwen3_moe"), ("nvfp4", "qwen3_moe")]
FIRST = "policy.generation.vllm_cfg.num_first_layers_in_bf16=1"


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def exported(request, tmp_path_factory) -> Iterator[Exported]:
    format, family = request.param
    case: Any = ({}, [f"nemo_fp8rl.flow={format}_e2e", FIRST], {"format": format, "num_first_layers_in_bf16": 1})
    exported = Exported(family, tmp_path_factory.mktemp("x"), case)
    yield exported
    exported.pair.close()


def test_exported_tensors_are_a_refits_with_a_scale_for_every_row(exported):
    stored, format = load_file(exported.folder / "model.safetensors"), exported.cfg.nemo_fp8rl.format
    rows, columns = format.weight_block
    quantized = 0
    for name, tensor in exported.sent.items():
        expected = tensor.view(torch.uint8) if tensor.dim() else tensor
        if name.endswith(".weight_scale"):
            quantized += 1
            weight = exported.sent[name.removesuffix("_scale")]
            assert stored[name].shape == (weight.shape[0], weight.shape[1] * format.values_per_byte // columns)
            expected = expected[torch.arange(weight.shape[0]) // rows]
        got = stored.pop(name)
        assert got.dtype == tensor.dtype
        assert torch.equal(got.view(torch.uint8) if got.dim() else got, expected), name
    assert quantized
    scales = [name for name in exported.sent if name.endswith(".weight_scale")]
    inputs = {name.replace(".weight_scale", ".input_scale") for name in scales} if format.name == "nvfp4" else set()
    assert stored.keys() == inputs
    assert all(scale == 2.0**-4 for scale in stored.values())


def test_our_method_serves_it_as_a_refitted_engine(exported):
    engine = exported.engine(quantization="nemo_fp8rl")
    assert outputs(exported.pair.generate(GREEDY, engine)) == exported.expected
    check_methods(engine, exported, "Emulated")


@pytest.fixture
def vllms_modelopt_on_cpu(exported: Exported, monkeypatch) -> None:
    import vllm.model_executor.kernels.linear as kernels
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import (
        _mxfp8_e4m3_quantize_torch,
        dequant_mxfp8_to_bf16,
    )
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype
    from vllm.platforms import PlatformEnum

    class Mxfp8(kernels.EmulationMxfp8LinearKernel):
        def apply_weights(self, layer, x, bias=None):
            values = dequant_mxfp8_to_bf16(*_mxfp8_e4m3_quantize_torch(x.view(-1, x.size(-1))))
            return super().apply_weights(layer, values.view(x.shape), bias)

    class W4A16(kernels.MarlinNvFp4LinearKernel):
        """Stands in for Marlin, which `init_nvfp4_linear_kernel` takes where nothing else is named."""

        @classmethod
        def is_supported(cls, compute_capability=None):
            return True, None

        def process_weights_after_loading(self, layer):
            pass

        def apply_weights(self, layer, x, bias=None):
            stored = layer.weight, layer.weight_scale, layer.weight_global_scale
            return F.linear(x, dequantize_to_dtype(*stored, x.dtype, 16, swizzle=False), bias)

    monkeypatch.setattr(kernels, "MarlinNvFp4LinearKernel", W4A16)
    for table, kind, kernel in (
        (kernels._POSSIBLE_MXFP8_KERNELS, "mxfp8", Mxfp8),
        (kernels._POSSIBLE_NVFP4_KERNELS, "nvfp4", kernels.EmulationNvFp4LinearKernel),
    ):
        monkeypatch.setitem(table, PlatformEnum.CPU, [])
        kernels.register_linear_kernel(kernel, PlatformEnum.CPU, kind)

    format = engine_format(exported.cfg.nemo_fp8rl.format)

    class Experts(EmulatedMoEMethod):
        def process_weights_after_loading(self, layer):
            self.recipe, layer.activations_dtype = LinearRecipe(format), torch.bfloat16
            EmulatedMoEMethod.process_weights_after_loading(self, layer)

        def stored(self, layer, name):
            of_experts = getattr(layer, f"{name}_weight_scale_2", None)
            if of_experts is not None and of_experts.dim() == 2:
                assert torch.equal(of_experts[:, 0], of_experts[:, 1])
                of_experts = of_experts[:, 0]
            data, scales = getattr(layer, f"{name}_weight").data, getattr(layer, f"{name}_weight_scale").data
            return BlockScaled(data, scales, format.weight_block, format, of_experts)

    monkeypatch.setattr(modelopt, "select_nvfp4_moe_backend", lambda **_: (NvFp4MoeBackend.EMULATION, None))
    monkeypatch.setattr(modelopt, "select_mxfp8_moe_backend", lambda **_: (Fp8MoeBackend.EMULATION, None))
    for method in (modelopt.ModelOptNvFp4FusedMoE, modelopt.ModelOptMxFp8FusedMoE):
        monkeypatch.setattr(method, "is_monolithic", False)
        for name in (*METHODS, "stored", "project"):
            monkeypatch.setattr(method, name, getattr(Experts, name), raising=False)


@pytest.mark.skipif(vllm_version() < NEWER, reason="vLLM 0.25 has other classes, and cannot emulate on a CPU")
@pytest.mark.usefixtures("vllms_modelopt_on_cpu")
def test_vllms_own_modelopt_serves_it_as_a_refitted_engine(exported):
    engine = exported.engine()
    name = exported.cfg.nemo_fp8rl.format.name
    quantization = engine.core.llm.vllm_config.quant_config
    assert quantization.quant_method == ALGORITHMS[name]
    assert exported.cfg.nemo_fp8rl.format is FLOW_FORMATS[name]
    got = outputs(exported.pair.generate(GREEDY, engine))
    assert got == exported.expected, apart(got, exported.expected)
    check_methods(engine, exported, "ModelOpt")
