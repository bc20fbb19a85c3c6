"""The layers of an aligned engine by themselves, and how vLLM comes to take them."""

import pickle
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.kernels.linear.scaled_mm.triton import TritonFp8BlockScaledMMKernel
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from nemo_fp8rl.fp8 import Fp8Layers, LinearRecipe
from nemo_fp8rl.generation import vllm_compat
from nemo_fp8rl.generation.fp8_method.quantization import NemoFp8RlConfig
from nemo_fp8rl.generation.fp8_method.quantization_config import quantization_config
from nemo_fp8rl.generation.fp8_method.shared_ops import linears, registration
from nemo_fp8rl.generation.fp8_method.shared_ops.attention import SharedAttention, SharedAttentionBackend
from nemo_fp8rl.generation.fp8_method.shared_ops.layers import LAYERS
from nemo_fp8rl.ops.fingerprint import shared_fp8_product
from nemo_fp8rl.ops.norm import add_rms_norm
from nemo_fp8rl.ops.rope import rotate
from nemo_fp8rl.policy.layers.rope import read_rope
from tests.gpu_engine.test_ops import values

LENGTH, D = 4096, 64
THETA = {"rope_theta": 500_000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    LLAMA3 | {"original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
]


@contextmanager
def build(is_aligned: bool):
    """As vLLM builds a model: with the current config of the engine."""
    vllm_compat.forget_rotations()
    config = VllmConfig()
    if is_aligned:
        config.quant_config = NemoFp8RlConfig.from_config(quantization_config("pow2", Fp8Layers(0, 2), True))
    with set_current_vllm_config(config):
        yield


def test_the_choice_reaches_the_processes_of_ranks():
    """They get the engine's config pickled."""
    for layers in (Fp8Layers(0, 2), Fp8Layers.none()):
        for is_aligned in (True, False):
            method = NemoFp8RlConfig.from_config(quantization_config("pow2", layers, is_aligned))
            sent = pickle.loads(pickle.dumps(method))
            assert (sent.is_aligned, sent.fp8_layers) == (is_aligned, layers)


def test_vllm_builds_ours_in_an_aligned_engine_alone():
    with build(True):
        norm, activation, rope = RMSNorm(8), SiluAndMul(), get_rope(D, LENGTH, True, dict(THETA))
        assert all(layer._forward_method == layer.shared_forward for layer in (norm, activation, rope))
    with build(False):
        others = RMSNorm(8), SiluAndMul(), get_rope(D, LENGTH, True, dict(THETA))
        assert not any(layer._forward_method == layer.shared_forward for layer in others)
    assert issubclass(AttentionBackendEnum.CUSTOM.get_class(), SharedAttentionBackend)


def test_a_norm_adds_the_residual_first():
    x, residual = values(5, 8), values(5, 8, seed=1)
    with build(True):
        norm = RMSNorm(8).bfloat16()
    assert all(map(torch.equal, norm(x, residual), add_rms_norm(x, residual, norm.weight, norm.variance_epsilon)))


@pytest.mark.parametrize("parameters", ROPES, ids=lambda rope: rope["rope_type"])
def test_the_table_of_a_rotation_is_the_trainers(parameters, tmp_path):
    from transformers import LlamaConfig

    size = {"hidden_size": 4 * D, "num_attention_heads": 4, "head_dim": D, "max_position_embeddings": LENGTH}
    LlamaConfig(**size, rope_parameters=THETA | parameters).save_pretrained(tmp_path)
    hf = SimpleNamespace(head_dim=D, rope_factor=parameters.get("factor", 1.0), **THETA, **parameters)
    hf.rope_factor = hf.rope_factor if hf.rope_type == "linear" else 1.0
    cos, sin = read_rope(tmp_path, hf).table(LENGTH, torch.bfloat16, torch.device("cpu"))
    with build(True):
        rope = get_rope(D, LENGTH, True, THETA | parameters, torch.bfloat16)
    assert type(rope) in LAYERS.values()
    table = torch.cat((cos, sin), -1).view(LENGTH, D)
    assert torch.equal(rope.cos_sin_cache[:LENGTH], table)
    qkv, positions = values(5, 6 * D), torch.tensor([0, 7, 7, 4000, 1])
    q, k, _ = qkv.split([4 * D, D, D], -1)
    rotated_q, rotated_k = rope(positions, q, k)
    assert torch.equal(rotated_q, rotate(q.unflatten(-1, (4, D)), positions, table).flatten(1))
    assert torch.equal(rotated_k, rotate(k.unflatten(-1, (1, D)), positions, table).flatten(1))


def test_a_name_that_another_plugin_has_taken_is_refused(monkeypatch):
    monkeypatch.setitem(op_registry_oot, "RMSNorm", RMSNorm)
    with pytest.raises(
        ValueError, match=r"another plugin of vLLM has replaced RMSNorm by vllm\..*set nemo_fp8rl.align"
    ):
        registration.register_shared_operations()


def test_attention_refuses_what_its_kernel_lacks():
    with pytest.raises(ValueError, match="does not do a KV cache of fp8_e5m2 or a sliding window"):
        SharedAttention(4, 64, 0.1, 2, None, 128, "fp8_e5m2")


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_a_library_multiplies_only_if_its_bits_are_the_shared_ones(monkeypatch, factor):
    """vLLM's Triton kernel stands for DeepGEMM, which needs a GPU."""
    monkeypatch.setattr(linears, "is_deep_gemm", lambda kernel: True)
    monkeypatch.setattr(linears, "_SHARED_PRODUCTS", {})
    real = TritonFp8BlockScaledMMKernel.apply_block_scaled_mm
    calls = []

    def fake_deep_gemm(self, **operands):
        calls.append(len(operands["A"]))
        return real(self, **operands) * factor

    monkeypatch.setattr(TritonFp8BlockScaledMMKernel, "apply_block_scaled_mm", fake_deep_gemm)
    x, weight = values((3, 256), seed=1), values((128, 256), seed=2)
    with set_current_vllm_config(VllmConfig()):
        out = linears.fp8_product(x, weight, True)
        assert len(calls) == (4 if factor == 1.0 else 1)  # three numbers of rows, and the product; or the first of them
        calls.clear()
        again = linears.fp8_product(x, weight, True)
        assert len(calls) == (1 if factor == 1.0 else 0)  # the answer is known for this shape
    assert torch.equal(out, shared_fp8_product(x, weight, True))
    assert torch.equal(again, out)


def test_the_name_of_the_kernel_says_why_a_library_is_left_out(monkeypatch):
    monkeypatch.setattr(linears, "is_deep_gemm", lambda kernel: True)
    monkeypatch.setattr(linears, "is_shared_product", lambda *_: False)
    monkeypatch.setattr(linears, "_SHARED_PRODUCTS", {})
    method = linears.SharedFp8LinearMethod(LinearRecipe())
    with set_current_vllm_config(VllmConfig()):
        method.prepare(SimpleNamespace(weight=values((128, 256), seed=2)), torch.bfloat16)
    assert method.kernel_name == "nemo_fp8rl.ops.fp8_linear (DeepGEMM has other bits)"
