"""A trainer that is aligned by shared operations and multiplies by Transformer Engine, built as on a GPU.

The fake product adds as `ops.fp8_linear` does, which is what cuBLASLt has to be seen to do on a GPU
(`benchmarks/gpu/bits.py`); a fake of other sums shows the fallback.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.ops import alignment
from nemo_fp8rl.policy.layers.linears import Fp8MatmulLayer
from tests.conftest import RECIPES, SMALL
from tests.gpu_engine.test_aligned_trainer import make_batch
from tests.transformer_engine.fake_kernels import FakeKernels, fake_product_of_rows
from tests.transformer_engine.test_worker import rank, step

pytestmark = pytest.mark.transformer_engine


def fake_product_of_other_bits(x, weight, pow2):
    return x @ weight.t()


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def cfg(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "tiny"
    make_tiny(folder, "add", 0, request.param)
    paths = (f"policy.model_name={folder}/model", f"data.train.data_path={folder}/data.jsonl")
    with mock.patch.object(alignment, "has_gpu", lambda: True):
        yield load(RECIPES / "tiny_cpu.yaml", [*SMALL, *paths, "nemo_fp8rl.align=vllm"])


@pytest.fixture(scope="module")
def on_cpu(cfg):
    return results(cfg, gpu=False)


def results(cfg, gpu: bool):
    """Return (kernels, log-probs, fingerprint, loss of two steps)."""
    with rank(cfg, gpu) as worker:
        kernels = {m.kernel_name for m in worker.model.modules() if isinstance(m, Fp8MatmulLayer)}
        logprobs, fingerprint = worker.logprobs(make_batch()), worker.describe().fingerprint
        return kernels, logprobs, fingerprint, [step(worker, 0)["loss"] for _ in range(2)]


def test_transformer_engine_multiplies_where_its_bits_are_the_shared_ones(cfg, on_cpu, monkeypatch):
    _, expected, fingerprint, losses = on_cpu
    monkeypatch.setattr(FakeKernels, "product", staticmethod(fake_product_of_rows))
    kernels, logprobs, on_gpu, gpu_losses = results(cfg, gpu=True)
    assert kernels == {"Transformer Engine"}
    assert torch.equal(logprobs, expected)
    assert on_gpu == fingerprint
    assert gpu_losses == pytest.approx(losses, rel=1e-3)
    assert gpu_losses[1] < gpu_losses[0]


def test_the_shared_product_stands_for_one_with_other_bits(cfg, on_cpu, monkeypatch):
    for name in ("fp8_product", "fp8_expert_product"):
        monkeypatch.setattr(f"nemo_fp8rl.policy.layers.te_linears.{name}", fake_product_of_other_bits)
    kernels, logprobs, fingerprint, losses = results(cfg, gpu=True)
    reason = "(Transformer Engine has other bits in qkv, o, gate_up, down)"
    assert (
        kernels == {f"ops.fp8_linear {reason}", f"ops.experts {reason}"}
        if "moe" in cfg.policy.model_name
        else {f"ops.fp8_linear {reason}"}
    )
    assert torch.equal(logprobs, on_cpu[1])
    assert fingerprint == on_cpu[2]
    assert losses[1] < losses[0]


def test_fp8_weights_without_a_fallback_are_refused(cfg, monkeypatch):
    for name in ("fp8_product", "fp8_expert_product"):
        monkeypatch.setattr(f"nemo_fp8rl.policy.layers.te_linears.{name}", fake_product_of_other_bits)
    held_in_fp8 = replace(cfg, nemo_fp8rl=replace(cfg.nemo_fp8rl, fp8_param=True))
    with pytest.raises(UserError, match=r"nemo_fp8rl\.fp8_param: .* in qkv, o, gate_up, down, .*fp8_param=false"):
        results(held_in_fp8, gpu=True)


def test_experts_in_bfloat16_have_the_shared_values(cfg):
    if "moe" not in cfg.policy.model_name:
        pytest.skip("of a mixture alone")
    in_bf16 = replace(cfg, nemo_fp8rl=replace(cfg.nemo_fp8rl, flow="bf16"))
    kernels, logprobs, fingerprint, losses = results(in_bf16, gpu=True)
    _, expected, expected_fingerprint, expected_losses = results(in_bf16, gpu=False)
    assert not kernels
    assert torch.equal(logprobs, expected)
    assert fingerprint == expected_fingerprint
    assert losses == pytest.approx(expected_losses, rel=1e-3)
    assert losses[1] < losses[0]
