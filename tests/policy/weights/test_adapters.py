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

from nemo_fp8rl.commands.sft import sft
from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.hf.adapter_folder import BASE, CONFIG, WEIGHTS
from nemo_fp8rl.hf.adapters import is_adapter
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.policy.model_digests import model_digests
from nemo_fp8rl.policy.on_cpu.megatron_on_cpu import megatron_on_cpu
from nemo_fp8rl.policy.rank.worker import MegatronWorker
from nemo_fp8rl.policy.rank_group import MegatronPolicy
from nemo_fp8rl.run.directory import RunDirectory
from tests.conftest import RECIPES
from tests.policy.test_worker import random_batch, train
from tests.run.test_directory import FakePolicy

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


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tiny_overrides) -> Path:
    """The checkpoint of a run with adapters of rank 8 in all modules."""
    folder = tmp_path_factory.mktemp("adapters")
    worker = MegatronWorker()
    worker.setup(load(RECIPES / "tiny_cpu.yaml", [*tiny_overrides, *FLOAT32, *LORA]), 0, 1, None)
    worker.save(str(folder))
    return folder


def test_a_rank_loads_what_it_saved(new_worker, saved, tmp_path):
    worker = new_worker("grpo.seed=7")
    worker.load(str(saved))
    worker.save(str(tmp_path))
    for name in (WEIGHTS, CONFIG, BASE):
        assert (tmp_path / "adapter" / name).read_bytes() == (saved / "adapter" / name).read_bytes()
    assert (
        new_worker("grpo.seed=7")
        .model.decoder.layers[0]
        .mlp.linear_fc1.lora_A.ne(worker.model.decoder.layers[0].mlp.linear_fc1.lora_A)
        .any()
    )


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_training_goes_on_to_the_bit_and_leaves_the_base(new_worker, tmp_path, precision):
    keys = (f"policy.precision={precision}", "policy.megatron_cfg.optimizer.lr=0.01")
    through, first, second = (new_worker(*keys) for _ in range(3))
    before = {name: p.detach().clone() for name, p in through.model.named_parameters()}
    for step in range(4):
        train(through, random_batch(step))
    for step in range(2):
        train(first, random_batch(step))
    first.save(str(tmp_path))
    second.load(str(tmp_path))
    for step in range(2, 4):
        train(second, random_batch(step))
    for (name, expected), (_, actual) in zip(
        through.model.named_parameters(), second.model.named_parameters(), strict=True
    ):
        assert torch.equal(actual, expected), name
        assert torch.equal(expected, before[name]) != is_adapter(name), name


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("dim=4",), r"has adapters of dim=8, alpha=32; set policy\.megatron_cfg\.peft\.dim and alpha to these"),
        (("alpha=16",), r"has adapters of dim=8, alpha=32; set policy\.megatron_cfg\.peft\.dim and alpha to these"),
        (("target_modules=[linear_qkv]",), r"has .*mlp.*lora_A.*, for which policy\.megatron_cfg\.peft has no module"),
        (("enabled=false",), r"has adapters and no weights; set policy\.megatron_cfg\.peft\.enabled=true, or merge"),
    ],
)
def test_other_adapters_are_refused(new_worker, saved, keys, message):
    with pytest.raises(UserError, match=message):
        new_worker(*(f"{BLOCK}.{key}" for key in keys)).load(str(saved))


def _edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors[min(tensors)]
    save_file(tensors, folder / WEIGHTS)


def _change_a_of_v_proj(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors[next(name for name in tensors if "v_proj.lora_A" in name)] += 1
    save_file(tensors, folder / WEIGHTS)


def _transpose(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    name = min(tensors)
    tensors[name] = tensors[name].t().contiguous()
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / BASE).unlink(), "cannot be read as adapters .*base.json.*not complete"),
        (lambda folder: (folder / CONFIG).write_text("{"), "cannot be read as adapters .*not complete"),
        (lambda folder: _edit(folder / CONFIG, r=None), "cannot be read as adapters .*not complete"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"\x10"), "cannot be read as adapters .*not complete"),
        (
            lambda folder: _edit(folder / BASE, digest="0" * 16),
            "of another base .* give the one on which they were trained: policy.model_name",
        ),
        (_drop_tensor, "lacks .*; policy.megatron_cfg.peft asks for other modules"),
        (_change_a_of_v_proj, "self_attn.qkv_proj have different lora_A"),
        (_transpose, r"has shape \[512, 8\], .* asks for \[8, 512\]"),
        (shutil.rmtree, "cannot be read as adapters .*not complete"),
    ],
)
def test_a_damaged_folder_is_refused(new_worker, saved, tmp_path, damage, message):
    shutil.copytree(saved, tmp_path / "copy")
    damage(tmp_path / "copy/adapter")
    with pytest.raises(UserError, match=message):
        new_worker().load(str(tmp_path / "copy"))


def test_weights_are_no_adapters(new_worker, tmp_path):
    new_worker(f"{BLOCK}.enabled=false").save(str(tmp_path))
    with pytest.raises(UserError, match=r"has weights and no adapters; set policy\.megatron_cfg\.peft\.enabled=false"):
        new_worker().load(str(tmp_path))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("target_modules=[linear_qvk]",), r"peft\.target_modules: .*no linear module 'linear_qvk'.*mean linear_qkv\?"),
        (("exclude_modules=[q_proj]",), r"peft\.exclude_modules: the model has no linear module 'q_proj'; .*It has"),
        (("target_modules=[linear_qkv]", "exclude_modules=[linear_fc1]"), "are both set: .*leave one empty"),
        (("exclude_modules=['*']",), "leaves no module; remove names"),
    ],
)
def test_a_recipe_with_other_modules_is_refused_before_ranks_start(recipe, keys, message):
    with pytest.raises(UserError, match=message):
        MegatronPolicy(recipe(*LORA, *(f"{BLOCK}.{key}" for key in keys)))


def test_a_run_with_adapters_is_resumed_with_the_same(recipe, tmp_path, tiny):
    digests = model_digests(recipe(*LORA), read_hf_config(tiny / "model"))
    with RunDirectory(recipe(*LORA), resume=False, data=digests) as run:
        run.log(1, {"train/reward": 0.5})
        run.save_checkpoint(1, FakePolicy())
    assert RunDirectory(recipe(*LORA), resume=True, data=digests).completed_steps == 1
    record = json.loads((tmp_path / "run/environment.json").read_text())
    assert record["choices"]["adapters"] == "rank 8, alpha 32, all linear modules"
    for change in ("dim=4", "alpha=8", "target_modules=[linear_fc1]", "enabled=false"):
        with pytest.raises(UserError, match=rf"--resume: policy\.megatron_cfg\.peft\.{change.partition('=')[0]} was"):
            RunDirectory(recipe(*LORA, f"{BLOCK}.{change}"), resume=True, data=digests)
    write_model(tmp_path / "other", seed=9)
    other = recipe(*LORA, f"policy.model_name={tmp_path}/other")
    with pytest.raises(UserError, match=r"--resume: the weights of the base .* are not .*policy\.model_name the model"):
        RunDirectory(other, resume=True, data=model_digests(other, read_hf_config(tmp_path / "other")))


def test_the_policy_of_all_ranks_saves_adapters(recipe, tmp_path):
    (tmp_path / "saved").mkdir()
    policy = MegatronPolicy(recipe(*LORA))
    policy.save(tmp_path / "saved")
    policy.shutdown()
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"adapter", "optimizer"}


def test_supervised_training_writes_adapters(recipe, tmp_path):
    assert sft(recipe(*LORA, "sft.max_num_steps=1"), tmp_path / "new")
    written = (tmp_path / "new/adapter_model.safetensors").read_bytes()
    assert (tmp_path / "run/checkpoints/step_1/policy/adapter/adapter_model.safetensors").read_bytes() == written
