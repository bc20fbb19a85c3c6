"""Optimizer states of few bytes on ranks that share a model. bfloat16 and FP8, processes on gloo."""

import pytest
import torch

from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.hf.model_tensors import expected_tensors
from tests.batches import loss_totals
from tests.policy.optimizer.test_training_state import BF16_GRADIENTS, CHOICES
from tests.policy.ranks import worker as rank_of_process
from tests.policy.test_parallel_state import DP, EP, MOE, PP, SP, TP_EP, are_equal, single_rank, state, train, weights
from tests.policy.test_worker import new_worker, random_batch

DENSE = {"family": "qwen3"}


def keys_of(folder, layout, states, ranks=2) -> tuple[str, ...]:
    return (
        f"policy.model_name={folder}",
        "cluster.backend=ray",
        f"cluster.train_ranks={ranks}",
        "policy.train_micro_batch_size=2",
        "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
        *(f"policy.megatron_cfg.{key}" for key in layout),
        *CHOICES[states],
        BF16_GRADIENTS,
    )


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [(DENSE, DP), (DENSE, SP), (DENSE, (*PP, "peft.enabled=true")), (MOE, EP), (MOE, TP_EP)],
    ids=["dp", "sp", "pp-adapters", "moe-ep", "moe-tp-ep"],
)
def test_ranks_resume_to_the_bit(two, recipe, tmp_path, sizes, layout):
    write_model(tmp_path / "model", **sizes)
    cfg = recipe(*keys_of(tmp_path / "model", layout, "fp8-fp16"))
    infos = two.setup(cfg)
    train(two, infos, range(2))
    two.call("save", str(tmp_path / "middle"))
    expected = train(two, infos, range(2, 4))
    two.call("save", str(tmp_path / "end"))
    two.setup(cfg)
    two.call("load", str(tmp_path / "middle"))
    assert train(two, infos, range(2, 4)) == expected
    two.call("save", str(tmp_path / "resumed"))
    files = [sorted((tmp_path / name / "optimizer").iterdir()) for name in ("end", "resumed")]
    assert [file.name for file in files[0]] == [file.name for file in files[1]]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(*files, strict=True))


@pytest.mark.parametrize("layout", [DP, SP, PP], ids=["dp", "sp", "pp"])
def test_another_layout_rounds_a_moment_once(two, recipe, tmp_path, layout):
    """Masters and bfloat16 moments are exact; an FP8 or float16 moment has the scale of its new piece."""
    write_model(tmp_path / "model")
    shapes = expected_tensors(read_hf_config(tmp_path / "model"))
    for states, tolerance in (("bf16", 0.0), ("fp8-fp16", 1 / 16)):
        first = single_rank(recipe(*keys_of(tmp_path / "model", (), states, ranks=1)))
        for seed in range(2):
            batch = random_batch(seed)
            first.train_step(batch, NllLoss(), loss_totals(8.0, batch.token_mask[:, 1:].sum()))
        first.save(str(tmp_path / "one"))
        infos = two.setup(recipe(*keys_of(tmp_path / "model", layout, states)))
        two.call("load", str(tmp_path / "one"))
        two.call("save", str(tmp_path / "two"))
        saved, moved = (state(tmp_path / name, shapes) for name in ("one", "two"))
        assert are_equal(*(weights(tmp_path / name, shapes) for name in ("one", "two")))
        for name, values in saved.items():
            close = 0.0 if name.endswith("master") else tolerance
            torch.testing.assert_close(moved[name], values, rtol=close, atol=close * float(values.abs().max()) / 64)
        batch = random_batch(2)
        alone = first.train_step(batch, NllLoss(), loss_totals(8.0, batch.token_mask[:, 1:].sum()))
        (together,) = train(two, infos, range(2, 3))
        assert together["grad_norm"] == pytest.approx(alone["grad_norm"], rel=0.02)  # of bfloat16 gradients


def test_ranks_have_equal_weights_after_a_float32_checkpoint(two, recipe, tmp_path):
    """A float32 master midway between two bfloat16 numbers rounds to the even one, its remainder away from zero."""
    write_model(tmp_path / "model")
    default = new_worker(recipe(f"policy.model_name={tmp_path}/model"))
    with torch.no_grad():
        for group in default.optimizer.param_groups:
            for master in group["params"]:
                master.copy_((master.view(torch.int32) & -0x10000 | 0x8000).view(torch.float32))
        for parameter in default.model.parameters():
            bits = parameter.float().view(torch.int32) & -0x10000 | 0x8000
            parameter.copy_(bits.view(torch.float32))
    default.save(str(tmp_path / "saved"))
    two.setup(recipe(*keys_of(tmp_path / "model", DP, "remainders")))
    two.call("load", str(tmp_path / "saved"))
    first, second = two.run(_bits_of_weights, [()] * 2)
    assert first == second


def _bits_of_weights() -> list[int]:
    return [int(p.detach().view(torch.int16).long().sum()) for p in rank_of_process.model.parameters()]
