"""Calls of FlashAttention 3, which is on GPUs alone: a stand-in checks them and answers by `ops.attention`."""

import importlib.util
import sys
from dataclasses import replace

import pytest
import torch
from vllm.config import VllmConfig

from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.generation import engine_checks
from nemo_fp8rl.generation.fp8_method.shared_ops.fingerprint import engine_fingerprint
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.hf.shared_operations import check_shared_operations, differing_operations, operation_shapes
from nemo_fp8rl.ops import alignment, flash_attention
from nemo_fp8rl.ops.attention import attention
from nemo_fp8rl.policy.layer_specs import trainer_fingerprint
from nemo_fp8rl.policy.layers.shared_ops import attention as trainer_attention
from tests.batches import loss_totals
from tests.conftest import RECIPES, SMALL
from tests.generation.pair import Pair
from tests.gpu_engine import fake_flash_attention
from tests.gpu_engine.test_ops import values
from tests.gpu_engine.test_zero_mismatch import SAMPLING, check

ENGINE = "policy.generation.vllm_cfg"
KEYS = (f"{ENGINE}.attention_backend=flash_attn", "nemo_fp8rl.align=vllm")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    def make(family, *keys):
        folder = tmp_path_factory.mktemp(family) / "tiny"
        make_tiny(folder, "add", 0, family)
        paths = (f"policy.model_name={folder}/model", f"data.train.data_path={folder}/data.jsonl")
        return load(RECIPES / "tiny_cpu.yaml", [*SMALL, *paths, *KEYS, *keys])

    return make


@pytest.fixture(scope="module")
def patch():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alignment, "has_gpu", lambda: True)
        patch.setattr(engine_checks, "_check_cpu", lambda hf, cfg: None)  # it refuses the backend's name
        yield patch


def test_trainer_and_engine_give_each_token_the_same_log_prob(recipe, patch):
    fake = fake_flash_attention.install(patch)
    pair = Pair(recipe("qwen3", "nemo_fp8rl.flow=bf16"))
    try:
        pair.prompts = pair.prompts[:1]
        for side in (pair.policy, pair.generation):
            assert flash_attention.NAME in side.describe().kernels
        for _ in range(2):
            pair.refit()
            before = dict(fake.calls)
            batch = pair.samples(SAMPLING)
            generated = dict(fake.calls)
            assert generated["pages"] > before["pages"]
            assert generated["sequences"] == before["sequences"]
            check(pair, batch)
            assert fake.calls["sequences"] > generated["sequences"]
            assert fake.calls["pages"] == generated["pages"]
            pair.worker.train_step(batch, NllLoss(), loss_totals(4.0, float(batch.token_mask.sum())))
    finally:
        pair.close()


@pytest.mark.parametrize("install", [fake_flash_attention.install, fake_flash_attention.install_package])
def test_either_package_gives_output_and_gradients(install, monkeypatch):
    install(monkeypatch)
    tokens, d = 2 * 9, 128
    leaves = [values(tokens, heads, d, seed=heads).requires_grad_() for heads in (4, 2, 1)]
    leaves[2] = values(tokens, 4, d, seed=7)[:, ::2].requires_grad_()  # heads apart, as in a product of q, k and v
    grad, arguments = values(tokens, 4, d, seed=8), (*leaves, 2, d**-0.5)
    kernels = trainer_attention.attend_by_flash_attention_3, trainer_attention.attend_by_shared_kernel
    outputs = [trainer_attention.SequenceAttention.apply(kernel, *arguments) for kernel in kernels]
    assert torch.equal(*outputs)
    assert all(map(torch.equal, *(torch.autograd.grad(out, leaves, grad) for out in outputs)))


def test_fingerprints_compare_the_calls_of_both_sides(recipe, patch):
    cfg = recipe("qwen3", "nemo_fp8rl.flow=bf16")
    shapes = operation_shapes(read_hf_config(cfg.policy.model_name), cfg)
    fake = fake_flash_attention.install(patch)
    trainer, engine = trainer_fingerprint(shapes, CPU), engine_fingerprint(shapes, CPU, VllmConfig())
    assert fake.calls == {"sequences": 3, "pages": 3}
    assert differing_operations(trainer, engine) == []
    real = fake_flash_attention.attention

    def other_bits_in_pages(q, k, *further):
        out, lse = real(q, k, *further)
        return out * (1.01 if k.size(1) > 1 else 1), lse

    patch.setattr(fake_flash_attention, "attention", other_bits_in_pages)
    (name,) = differing_operations(trainer, engine_fingerprint(shapes, CPU, VllmConfig()))
    patch.setattr(fake_flash_attention, "attention", attention)
    assert name.startswith("attention by FlashAttention 3 [")
    assert name in dict(trainer)


@pytest.mark.parametrize(
    ("head_dim", "key", "message"),
    [
        (
            64,
            "nemo_fp8rl.flow=bf16",
            r"tiles depend on the batch for heads of 64 values.*attention_backend=null",
        ),
        (
            128,
            f"{ENGINE}.kv_cache_dtype=fp8",
            r"kv_cache_dtype=fp8: .* in FP8 .*attention_backend=null",
        ),
        (128, f"{ENGINE}.attention_backend=FLASHINFER", "FLASHINFER: attention by a backend of vLLM is not aligned on"),
    ],
)
def test_what_is_not_aligned_with_it_is_refused(recipe, head_dim, key, message):
    cfg = recipe("qwen3", key)
    hf = read_hf_config(cfg.policy.model_name)
    check_shared_operations(hf, recipe("qwen3"))
    with pytest.raises(UserError, match=message):
        check_shared_operations(replace(hf, head_dim=head_dim), cfg)


def test_a_machine_without_it_is_refused(monkeypatch):
    fake_flash_attention.install(monkeypatch)
    flash_attention.check_machine()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    missing = r"=FLASH_ATTN with .*neither in vllm\.vllm_flash_attn nor in .*leave attention_backend out"
    with pytest.raises(UserError, match=missing):
        flash_attention.check_machine()
    for package in ("vllm.vllm_flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=missing):
        flash_attention.load()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    with pytest.raises(UserError, match=r"FLASH_ATTN with .* needs a Hopper GPU .* has 10\.0; .* leave attention_back"):
        flash_attention.check_machine()
