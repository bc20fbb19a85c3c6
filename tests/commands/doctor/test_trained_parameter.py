"""Bytes of a trained parameter: what the doctor says, and what the tensors of a trainer have."""

from dataclasses import asdict
from itertools import product

import pytest
import torch

from benchmarks.measure import trained_bytes
from nemo_fp8rl.commands.doctor.memory.trained_parameter import WIDTHS, trained_parameter
from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.policy.on_cpu.megatron_on_cpu import megatron_on_cpu
from nemo_fp8rl.policy.optimizer.builders import build_optimizer
from tests.policy.optimizer.test_training_state import BF16_GRADIENTS, states
from tests.policy.test_worker import new_worker, random_batch, train

AWARE = {"use_precision_aware_optimizer": True}
STATE_MASTERS = (("fp32", True), ("fp32", False), ("fp16", False))
LOW = {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16"}


@pytest.mark.parametrize("gradient", [4, 2])
def test_it_is_what_a_trainer_has_between_steps_for_every_choice(recipe, tmp_path, gradient):
    """One trainer gets an optimizer of each choice in turn."""
    write_model(tmp_path / "model", num_hidden_layers=1)
    keys = (f"policy.model_name={tmp_path}/model", *([BF16_GRADIENTS] if gradient == 2 else []))
    worker = new_worker(recipe(*keys))
    choices = [(), *(states(*moments, *master) for moments in product(WIDTHS, WIDTHS) for master in STATE_MASTERS)]
    found, said = {}, {}
    for choice in choices:
        cfg = recipe(*keys, *choice)
        with megatron_on_cpu():
            worker.optimizer = build_optimizer(cfg.policy, worker.ddp, torch.bfloat16, False)
        train(worker, random_batch(0))
        optimizer = asdict(cfg.policy.megatron_cfg.optimizer)
        found[choice] = trained_bytes(worker)
        said[choice] = pytest.approx(trained_parameter(optimizer, 2, gradient, False).between_steps, rel=0.01)
    assert found == said  # buffers are padded


@pytest.mark.parametrize(
    ("keys", "gradient", "between", "in_step"),
    [
        ({}, 4, 18, 18),
        ({}, 2, 16, 20),  # the float32 copy of the gradient
        (AWARE, 4, 16, 16),
        (AWARE | {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}, 4, 12, 12),
        (AWARE | {"exp_avg_dtype": "bf16"}, 4, 14, 18),  # one moment in bfloat16 is copied, two are not
        (AWARE | LOW, 2, 9, 17),
        (AWARE | LOW | {"main_params_dtype": "fp16"}, 2, 9, 21),
    ],
)
def test_bytes_between_steps_and_in_one(keys, gradient, between, in_step):
    found = trained_parameter(keys, 2, gradient, has_recipe=False)
    assert (found.between_steps, found.in_step) == (between, in_step)


def test_with_an_fp8_recipe_float32_masters_are_megatrons():
    found = trained_parameter(AWARE | LOW, 2, 2, has_recipe=True)
    assert (found.master, found.gradient_copy, found.between_steps) == (4, 4, 11)
    half = trained_parameter(AWARE | LOW | {"main_params_dtype": "fp16"}, 2, 2, has_recipe=True)
    assert (half.master, half.gradient_copy) == (2, 0)


def test_a_float16_weight_has_no_bits_of_its_master():
    found = trained_parameter(AWARE, 2, 4, has_recipe=False, in_bfloat16=False)
    assert (found.master, found.between_steps) == (4, 18)


def test_the_line_says_the_parts():
    assert str(trained_parameter(AWARE | LOW, 2, 2, False)) == (
        "bytes of a trained parameter: weight 2, gradient 2, master 2, moments 1 + 2; 9 between optimizer steps, "
        "17 in one; replicas share masters and moments"
    )
    adapter = trained_parameter({}, 2, 4, has_recipe=False, keeps_gradient=False)
    assert "; 14 between optimizer steps, 18 in one;" in str(adapter)
