"""Adapters of a checkpoint: HF's `peft` reads them, a rank loads them again, and wrong ones are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.hf.adapter_folder import BASE, CONFIG, WEIGHTS
from nemo_fp8rl.hf.adapters import adapter_tensors
from nemo_fp8rl.policy.on_cpu.megatron_on_cpu import megatron_on_cpu
from nemo_fp8rl.policy.rank_group import MegatronPolicy
from nemo_fp8rl.policy.worker import MegatronWorker

BLOCK = "policy.megatron_cfg.peft"
FLOAT32 = ("policy.precision=float32", "nemo_fp8rl.flow=bf16", "nemo_fp8rl.align=none")
LORA = (f"{BLOCK}.enabled=true", f"{BLOCK}.lora_B_init_method=kaiming")


@pytest.fixture
def new_worker(recipe) -> Callable[..., MegatronWorker]:
    def make(*overrides: str) -> MegatronWorker:
        worker = MegatronWorker()
        worker.setup(recipe(*FLOAT32, *LORA, *overrides), 0, 1, None)
        return worker

    return make


def logits(worker: MegatronWorker, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), megatron_on_cpu():
        return worker.ddp(ids, torch.arange(ids.size(1)).expand_as(ids), None) @ worker.model.head.t()


@pytest.mark.parametrize(
    "modules", [(), ("linear_qkv", "linear_fc2"), ("*.layers.0.*",)], ids=["all", "two kinds", "one layer"]
)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_peft_gives_the_trainers_logits(new_worker, tmp_path: Path, family, modules):
    write_model(tmp_path / "model", seed=3, family=family)
    chosen = f"{BLOCK}.target_modules=[{','.join(map(repr, modules))}]"
    worker = new_worker(f"policy.model_name={tmp_path}/model", f"{BLOCK}.dim=6", chosen)
    worker.save(str(tmp_path / "saved"))
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    ids = torch.randint(1, 64, (3, 41), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        base = hf(ids).logits
        expected = peft.PeftModel.from_pretrained(hf, str(tmp_path / "saved/adapter"))(ids).logits
    actual = logits(worker, ids)
    assert (expected - base).abs().max() > 0.01
    assert (actual - expected).abs().max() < 1e-5
