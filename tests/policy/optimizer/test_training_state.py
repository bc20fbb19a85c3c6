"""Optimizer states of few bytes in a rank: bytes between steps, resume, zeros, and the checkpoint of another dtype."""

import pytest
import torch

from benchmarks.gpu.training_state import bytes_of_a_parameter
from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.policy.rank.worker import MegatronWorker
from nemo_fp8rl.policy.weights.optimizer_state import state_slices
from tests.batches import loss_totals
from tests.policy.test_worker import new_worker, random_batch, train

OPTIMIZER = "policy.megatron_cfg.optimizer"
AWARE = (f"{OPTIMIZER}.use_precision_aware_optimizer=true", f"{OPTIMIZER}.lr=0.001")
BF16_GRADIENTS = "policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32=false"


def states(mean: str, square: str, master: str = "fp32", remainders: bool = True) -> tuple[str, ...]:
    names = {"exp_avg_dtype": mean, "exp_avg_sq_dtype": square, "main_params_dtype": master}
    names["store_param_remainders"] = str(remainders).lower()
    return (*AWARE, *(f"{OPTIMIZER}.{name}={value}" for name, value in names.items()))


CHOICES = {
    "remainders": states("fp32", "fp32"),
    "masters": states("fp32", "fp32", remainders=False),
    "bf16": states("bf16", "bf16"),
    "fp8-fp16": states("fp8", "fp16"),
    "fp16-fp8": states("fp16", "fp8", remainders=False),
    "bf16-fp32-fp16": states("bf16", "fp32", "fp16"),
    "fp8-fp8-fp16": states("fp8", "fp8", "fp16"),
}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ((), 18),
        ((BF16_GRADIENTS,), 16),
        (states("fp32", "fp32", remainders=False), 18),
        (states("fp32", "fp32"), 16),
        (states("bf16", "bf16"), 12),
        ((*states("bf16", "bf16"), BF16_GRADIENTS), 10),
        ((*states("fp8", "fp16"), BF16_GRADIENTS), 9),
    ],
    ids=["default", "gradients", "masters", "remainders", "bf16", "bf16-gradients", "fp8-fp16-gradients"],
)
def test_bytes_of_a_parameter_between_steps(recipe, tmp_path, family, keys, expected):
    write_model(tmp_path / "model", family=family)
    worker = new_worker(recipe(f"policy.model_name={tmp_path}/model", *keys))
    train(worker, random_batch(0))
    assert bytes_of_a_parameter(worker) == pytest.approx(expected, rel=0.01)  # buffers are padded


def all_states(worker: MegatronWorker) -> dict[str, torch.Tensor]:
    slices = state_slices(worker.model, worker.optimizer)
    return {f"{n}.{k}": s.values(k).clone() for n, s in slices.items() for k in ("master", "exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize("keys", CHOICES.values(), ids=CHOICES)
def test_a_run_goes_on_from_a_checkpoint_to_the_bit(recipe, tmp_path, keys):
    worker = new_worker(recipe(*keys))
    for seed in range(3):
        train(worker, random_batch(seed))
    worker.save(str(tmp_path / "saved"))
    saved, expected = all_states(worker), [train(worker, random_batch(seed)) for seed in (3, 4)]
    last = all_states(worker)
    worker.shutdown()
    resumed = new_worker(recipe(*keys))
    resumed.load(str(tmp_path / "saved"))
    assert all(torch.equal(values, saved[name]) for name, values in all_states(resumed).items())
    assert [train(resumed, random_batch(seed)) for seed in (3, 4)] == expected
    assert all(torch.equal(values, last[name]) for name, values in all_states(resumed).items())


def test_exact_states_train_as_the_default(recipe):
    """The two AdamW differ in the order of their roundings: by a few last bits of an update."""
    default, aware = new_worker(recipe(f"{OPTIMIZER}.lr=0.001")), new_worker(recipe(*CHOICES["remainders"]))
    pairs = [[train(worker, random_batch(0))["loss"] for worker in (default, aware)]]
    expected = all_states(default)
    for name, values in all_states(aware).items():
        if name.endswith("master"):
            torch.testing.assert_close(values, expected[name], rtol=2e-7, atol=2e-9)
    pairs += [[train(worker, random_batch(seed))["loss"] for worker in (default, aware)] for seed in range(1, 5)]
    assert all(loss == pytest.approx(other, rel=1e-4) for loss, other in pairs)


@pytest.mark.parametrize("keys", CHOICES.values(), ids=CHOICES)
def test_steps_without_gradients_leave_finite_states(recipe, keys):
    """Advantages of 0, or an expert without tokens: Transformer Engine's FP8 makes NaN of a moment of zeros."""
    worker, batch = new_worker(recipe(*keys)), random_batch(0)

    class NoLoss(NllLoss):
        def __call__(self, *arguments, **keywords):
            loss, metrics = super().__call__(*arguments, **keywords)
            return 0.0 * loss, metrics

    totals = loss_totals(len(batch.input_ids), batch.token_mask[:, 1:].sum())
    weights = [parameter.clone() for parameter in worker.model.parameters()]
    assert worker.train_step(batch, NoLoss(), totals)["grad_norm"] == 0
    assert all(torch.equal(old, new) for old, new in zip(weights, worker.model.parameters(), strict=True))
    assert not any(values.any() for name, values in all_states(worker).items() if "exp_avg" in name)
    train(worker, batch)
    for _ in range(3):
        worker.train_step(batch, NoLoss(), totals)
    assert all(values.isfinite().all() for values in all_states(worker).values())
