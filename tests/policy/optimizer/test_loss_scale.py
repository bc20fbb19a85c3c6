"""Training in float16: the loss scale, steps that overflow, and a resume to the bit."""

import json
import math
from itertools import pairwise

import pytest
import torch

from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.policy.interface import DivergenceError
from nemo_fp8rl.policy.rank.worker import MegatronWorker
from tests.batches import loss_totals
from tests.policy import ranks
from tests.policy.optimizer.test_training_state import all_states
from tests.policy.ranks import Ranks
from tests.policy.test_worker import new_worker, random_batch, train

MEGATRON, OPTIMIZER = "policy.megatron_cfg", "policy.megatron_cfg.optimizer"
FLOAT16 = ("policy.precision=float16", "nemo_fp8rl.flow=bf16", f"{OPTIMIZER}.lr=0.001")
AWARE = (f"{OPTIMIZER}.use_precision_aware_optimizer=true", f"{OPTIMIZER}.exp_avg_dtype=bf16")
TWO_RANKS = ("cluster.backend=ray", "cluster.train_ranks=2", "policy.train_micro_batch_size=4")
TOO_LARGE = 2.0**40
"""A scale at which gradients of the tiny model are above 65504."""


def scale_from(start: float, hysteresis: int = 1) -> tuple[str, ...]:
    return (f"{OPTIMIZER}.initial_loss_scale={start}", f"{OPTIMIZER}.hysteresis={hysteresis}")


def weights(worker: MegatronWorker) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in worker.weights().for_checkpoint()}


def are_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("flow", ["bf16", "fp8_e2e"])
@pytest.mark.parametrize("align", ["none", "vllm"])
def test_a_step_is_close_to_that_in_float32(recipe, flow, align):
    """The norm and the moments are of gradients without the scale; FP8 rounds more than float16 does."""
    batch, keys = random_batch(1), (f"{OPTIMIZER}.lr=0.001", f"nemo_fp8rl.align={align}")
    exact = new_worker(recipe("policy.precision=float32", "nemo_fp8rl.flow=bf16", *keys))
    half = new_worker(recipe(*FLOAT16, f"nemo_fp8rl.flow={flow}", f"nemo_fp8rl.align={align}"))
    expected, metrics = train(exact, batch), train(half, batch)
    limit = 0.002 if flow == "bf16" else 0.05
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=limit)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=limit)
    assert metrics["loss_scale"] == 65536
    assert metrics["overflow_ratio"] == 0
    moments, of_exact = all_states(half), all_states(exact)
    for name in (name for name in moments if name.endswith(".exp_avg")):
        difference = (moments[name] - of_exact[name]).norm()
        assert difference <= 10 * limit * of_exact[name].norm(), name


@pytest.mark.parametrize("states", [(), AWARE], ids=["float32", "aware"])
def test_a_step_that_overflows_is_skipped_and_counted(recipe, states):
    warm_up = "policy.megatron_cfg.scheduler.lr_warmup_iters=10"
    worker = new_worker(recipe(*FLOAT16, *states, *scale_from(TOO_LARGE, hysteresis=2), warm_up))
    batch, start, taken = random_batch(2), weights(worker), []
    for _ in range(40):
        taken.append(train(worker, batch))
        if not taken[-1]["overflow_ratio"]:
            break
        assert are_equal(weights(worker), start)
        assert not worker.optimizer_steps
        assert taken[-1]["grad_norm"] == 0
        assert math.isfinite(taken[-1]["loss"])
    skipped, step = taken[:-1], taken[-1]
    assert len(skipped) > 3
    # the first overflow only counts, each of the others halves
    expected = [TOO_LARGE, TOO_LARGE, *(TOO_LARGE / 2**i for i in range(1, len(skipped)))]
    assert [metrics["loss_scale"] for metrics in taken] == expected
    assert not are_equal(weights(worker), start)
    assert worker.scheduler.num_steps == worker.optimizer_steps == 1
    usual = train(new_worker(recipe(*FLOAT16, *states, warm_up)), batch)
    assert step["lr"] == usual["lr"]
    assert step["grad_norm"] == pytest.approx(usual["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("states", [(), AWARE], ids=["float32", "aware"])
def test_a_run_goes_on_with_its_scale_to_the_bit(recipe, tmp_path, states):
    """Within the two windows saved in the middle: before the scale falls, and before it rises."""
    keys = (*FLOAT16, *states, *scale_from(2.0**28, hysteresis=2), f"{OPTIMIZER}.loss_scale_window=3")
    worker = new_worker(recipe(*keys))
    metrics: list[dict[str, float]] = []
    for step in range(30):
        if step in (1, 20):
            worker.save(str(tmp_path / f"at_{step}"))
        metrics.append(train(worker, random_batch(step)))
    last = all_states(worker)
    worker.shutdown()
    scales = [row["loss_scale"] for row in metrics]
    assert scales[0] == scales[1]
    assert any(a > b for a, b in pairwise(scales))
    assert any(a < b for a, b in pairwise(scales[20:]))
    for start in (1, 20):
        resumed = new_worker(recipe(*keys))
        resumed.load(str(tmp_path / f"at_{start}"))
        assert [train(resumed, random_batch(step)) for step in range(start, 30)] == metrics[start:]
        assert are_equal(all_states(resumed), last)
        resumed.shutdown()


def test_a_checkpoint_without_a_scale_that_can_be_is_refused(recipe, tmp_path):
    worker = new_worker(recipe(*FLOAT16))
    train(worker, random_batch(0))
    worker.save(str(tmp_path))
    path = tmp_path / "optimizer/steps.json"
    record = json.loads(path.read_text())
    assert record.pop("loss_scale") == {"scale": 65536, "growth_tracker": 1, "hysteresis_tracker": 2}
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"loss_scale.*not complete"):
        worker.load(str(tmp_path))
    for scale in (0, -1, math.inf, math.nan):
        damaged = {"scale": scale, "growth_tracker": 1, "hysteresis_tracker": 2}
        path.write_text(json.dumps(record | {"loss_scale": damaged}))
        with pytest.raises(UserError, match=r"a loss scale of .*not complete"):
            worker.load(str(tmp_path))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ((f"{OPTIMIZER}.loss_scale={TOO_LARGE}",), "loss_scale=null"),
        ((*scale_from(TOO_LARGE), f"{OPTIMIZER}.min_loss_scale={TOO_LARGE}"), "min_loss_scale"),
    ],
    ids=["constant", "smallest"],
)
def test_an_overflow_at_a_scale_that_cannot_fall_ends_the_run(recipe, keys, words):
    worker = new_worker(recipe(*FLOAT16, *keys))
    start = weights(worker)
    with pytest.raises(DivergenceError, match=f"65504.*{words}"):
        train(worker, random_batch(0))
    assert are_equal(weights(worker), start)
    assert worker.scheduler.num_steps == 0


def test_a_constant_scale_trains_and_resumes(recipe, tmp_path):
    worker = new_worker(recipe(*FLOAT16, f"{OPTIMIZER}.loss_scale=1024"))
    usual = new_worker(recipe(*FLOAT16))
    first, second = train(worker, random_batch(0)), train(usual, random_batch(0))
    assert first["loss_scale"] == 1024
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-3)
    worker.save(str(tmp_path))
    expected = train(worker, random_batch(1))
    worker.load(str(tmp_path))
    assert train(worker, random_batch(1)) == expected


def test_activations_above_float16_are_no_overflow_of_a_gradient(recipe):
    worker = new_worker(recipe(*FLOAT16))
    with torch.no_grad():
        worker.model.decoder.final_layernorm.weight.fill_(60000.0)
    with pytest.raises(DivergenceError, match=r"loss is not finite.*policy\.precision=bfloat16"):
        train(worker, random_batch(0))


@pytest.mark.parametrize(
    "layout",
    [
        (),
        ("policy.megatron_cfg.tensor_model_parallel_size=2",),
        ("policy.megatron_cfg.pipeline_model_parallel_size=2",),
    ],
    ids=["data", "tensor", "pipeline"],
)
def test_ranks_skip_a_step_together(two: Ranks, recipe, layout):
    cfg = recipe(*FLOAT16, *scale_from(4096.0), *TWO_RANKS, *layout)
    infos = two.setup(cfg)
    assert two.run(_overflow_on_second, [(info.shard, infos[-1].shard + 1, "") for info in infos]) == [1, 1]


def test_scales_of_experts_and_dense_weights_stay_equal(two: Ranks, recipe, tmp_path):
    """Megatron gives each of the two a scaler; an overflow in experts alone, of one rank alone, would part them."""
    write_model(tmp_path / "model", family="qwen3_moe")
    layout = *TWO_RANKS, "policy.megatron_cfg.expert_model_parallel_size=2"
    two.setup(recipe(*FLOAT16, *scale_from(4096.0), f"policy.model_name={tmp_path}/model", *layout))
    assert two.run(_overflow_on_second, [(0, 2, ".experts."), (1, 2, ".experts.")]) == [2, 2]


def _overflow_on_second(shard: int, shards: int, word: str) -> int:
    """Overflow on rank 1, in a parameter with the word in its name, then train; return the number of scalers.

    Asserts that the first step changed nothing, and that all scalers fell with it.
    """
    worker, batch = ranks.worker, random_batch(3)
    part = batch.take_trimmed_rows(slice(shard * 8 // shards, (shard + 1) * 8 // shards))
    totals = loss_totals(len(batch.input_ids), batch.token_mask[:, 1:].sum())
    start = weights(worker)
    parameter = next(p for name, p in worker.model.named_parameters() if word in name)
    handle = parameter.register_hook(lambda gradient: gradient + torch.nan if worker.rank == 1 else gradient)
    skipped = worker.train_step(part, NllLoss(), totals)
    assert skipped["overflow_ratio"] == 1
    assert are_equal(weights(worker), start)
    handle.remove()
    taken = worker.train_step(part, NllLoss(), totals)
    assert (taken["overflow_ratio"], taken["loss_scale"]) == (0, 2048)
    assert not are_equal(weights(worker), start)
    assert taken["grad_norm"] > 0
    states = [scaler.state_dict() for scaler in worker.loss_scale.scalers]
    assert all(state == states[0] for state in states)
    return len(states)
