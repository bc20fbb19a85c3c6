"""The bytes of adapters: of a refit after the first, by the manifest alone, and of a trainer between steps."""

import json
import math

import pytest
import torch

from nemo_fp8rl.commands.doctor.known_models import QWEN2_7B
from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.config.policy_schema import PeftConfig
from nemo_fp8rl.fp8 import BlockScaled
from nemo_fp8rl.hf.adapters import adapter_tensors, is_adapter, read_adapters
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.hf.model_tensors import expected_tensors
from nemo_fp8rl.policy.layers.linears import QuantizedMatmul
from nemo_fp8rl.policy.optimizer.builders import optimizer_tensors
from nemo_fp8rl.refit.manifest import TensorPart
from tests.policy.test_worker import new_worker, random_batch, train


def test_a_later_refit_of_qwen_7b_at_rank_32_brings_at_most_one_and_a_half_percent(tmp_path):
    further = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "eos_token_id": 151645}
    (tmp_path / "config.json").write_text(json.dumps({**QWEN2_7B, **further}))
    hf = read_hf_config(tmp_path)
    adapters = read_adapters(hf, PeftConfig(enabled=True, dim=32))
    parts = [TensorPart.of(name, torch.bfloat16, shape) for name, shape in adapter_tensors(hf, adapters).items()]
    model = sum(2 * math.prod(shape) for shape in expected_tensors(hf).values())
    share = sum(part.nbytes for part in parts) / model
    assert len(parts) == 28 * (4 + 7)
    assert 0.009 < share < 0.0095


@pytest.mark.parametrize("flow", ["nvfp4_a16_e2e", "fp8_e2e"])
def test_a_trainer_has_14_bytes_for_a_parameter_of_an_adapter_and_the_base_once(recipe, tmp_path, flow):
    write_model(tmp_path / "model", seed=3)
    keys = (f"policy.model_name={tmp_path}/model", f"nemo_fp8rl.flow={flow}", "policy.megatron_cfg.peft.enabled=true")
    worker = new_worker(recipe(*keys))
    for _ in range(2):
        train(worker, random_batch(0))
    parameters = dict(worker.model.named_parameters())
    trained = [p for name, p in parameters.items() if is_adapter(name)]
    count = sum(p.numel() for p in trained)
    buffers = worker.offload.buffers
    assert sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers) == 0
    of_optimizer = sum(tensor.nbytes for tensor in optimizer_tensors(worker.optimizer) if tensor.dim())
    of_parameters = sum(buffer.param_data.untyped_storage().nbytes() for buffer in buffers)
    padding = sum(buffer.param_data.numel() for buffer in buffers) - count
    assert padding < 1024 * len(buffers)
    assert of_optimizer + of_parameters - 2 * padding == 14 * count
    format = worker.cfg.nemo_fp8rl.format
    layers = [layer for layer in worker.model.modules() if isinstance(layer, QuantizedMatmul)]
    assert layers
    for layer in layers:
        assert layer.weight.untyped_storage().nbytes() == 0
        assert isinstance(layer.base, BlockScaled)
        bits = 8 * (layer.base.data.nbytes + layer.base.scale_inv.nbytes)
        values = layer.base.data.numel() * format.values_per_byte
        scales = layer.base.scale_inv.numel() * 8 * format.scale_itemsize
        assert bits == values * 8 / format.values_per_byte + scales
        assert bits / values <= 1.01 * format.bits_per_value
    frozen = [p for name, p in parameters.items() if not is_adapter(name) and p.numel()]
    assert not any(p.requires_grad for p in frozen)
    assert not any(
        ".linear_" in name and name.endswith("weight") and p.dim() == 2 and p.numel() for name, p in parameters.items()
    )
