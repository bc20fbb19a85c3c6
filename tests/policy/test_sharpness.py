"""Sharpness of a token's logits: the closed form is the maximum over the box, on one rank and on several."""

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from scipy import optimize
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_fp8rl.batch import SequenceBatch, split_shards
from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.policy.sharpness import combine, sharpness, sharpness_metrics, sum_columns
from tests.policy import ranks
from tests.policy.test_worker import new_worker, random_batch

V = 16
EPSILONS = (5e-4, 0.01, 0.1)


def random_logits(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return logits, some of them far from 0, and targets; row 0 is nearly sure of its target, row 1 of another."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, columns, generator=random) * torch.tensor([1.0, 4.0, 12.0]).repeat(rows)[:rows, None]
    targets = torch.randint(0, columns, (rows,), generator=random)
    logits[0, targets[0]], logits[1, (targets[1] + 1) % columns] = 25.0, 25.0
    return logits, targets


def phi(points: Tensor, logits: Tensor, target: int) -> Tensor:
    """Return the definition at the points, float64 [n], of one token's logits [V]."""
    first = F.cross_entropy(logits[None], torch.tensor([target]))
    entropies = F.cross_entropy(points, torch.full((len(points),), target), reduction="none")
    return 100 * (entropies - first) / (1 + first)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_no_vertex_and_no_point_of_the_box_is_above_it(epsilon):
    logits, targets = random_logits(6, V)
    found = sharpness(logits, targets, epsilon)
    assert found.dtype == torch.float32
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=V)), dtype=torch.float64)
    points = torch.rand(100_000, V, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2 - 1
    for row, target, value in zip(logits.double(), targets.tolist(), found.tolist(), strict=True):
        sides = epsilon * (row.abs() + 1)
        worst = float(phi(row + signs * sides, row, target).max())
        assert value == pytest.approx(worst, rel=2e-6)
        inside = float(phi(row + points * sides, row, target).max())
        assert 0.3 * worst < inside < worst
        shrunk = torch.where(torch.arange(V) == target, -1.0, 1.0) * (1 - 0.01 * points.abs())
        near = float(phi(row + shrunk * sides, row, target).max())
        assert 0.98 * worst < near <= worst


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_l_bfgs_b_finds_the_same_maximum(epsilon):
    logits, targets = random_logits(6, V, seed=2)
    for row, target, value in zip(logits.double(), targets, sharpness(logits, targets, epsilon).tolist(), strict=True):
        sides = epsilon * (row.abs() + 1)

        def rise(u, row=row, target=int(target), sides=sides):
            """Return phi at the point u of the box, whose sides have length 1, and its gradient."""
            place = torch.from_numpy(u).requires_grad_()
            value = phi((row + sides * place)[None], row, target).squeeze()
            return float(value.detach()), torch.autograd.grad(value, place)[0].numpy()

        scale = np.abs(rise(np.zeros(V))[1]).max()
        best = optimize.minimize(
            lambda u, rise=rise, scale=scale: [-x / scale for x in rise(u)],
            np.zeros(V),
            jac=True,
            method="L-BFGS-B",
            bounds=[(-1, 1)] * V,
            options={"ftol": 0.0, "gtol": 0.0},
        )
        assert value == pytest.approx(rise(best.x)[0], rel=1e-5)


def test_a_sure_token_keeps_its_digits():
    """The difference of two float32 cross entropies would be 0 here."""
    logits, targets = torch.zeros(1, V), torch.tensor([3])
    logits[0, 3] = 30.0
    value, exact = sharpness(logits, targets, 5e-4), phi_at_worst(logits.double(), targets, 5e-4)
    assert 0 < exact < 1e-8
    assert float(value) == pytest.approx(exact, rel=1e-4)


def phi_at_worst(logits: Tensor, targets: Tensor, epsilon: float) -> float:
    """Return phi of one token without a difference: CE is log1p of a sum over the other tokens."""
    sides, target = epsilon * (logits.abs() + 1), int(targets)
    others = torch.arange(logits.size(1)) != target
    gaps = (logits - logits[:, target, None])[:, others]
    worst = gaps + (sides + sides[:, target, None])[:, others]
    first, last = gaps.exp().sum().log1p(), worst.exp().sum().log1p()
    return float(100 * (last - first) / (1 + first))


def test_excluded_tokens_take_no_part():
    logits, targets = random_logits(6, V)
    padded = torch.full((6, V + 9), -torch.inf)
    padded[:, 4 : 4 + V] = logits
    torch.testing.assert_close(
        sharpness(padded, targets + 4, 0.01), sharpness(logits, targets, 0.01), rtol=1e-6, atol=0
    )


def _of_rank(rank: int, cut: int, store: str) -> tuple[Tensor, Tensor]:
    """Return the values that two ranks compute, each from its side of the cut, and those of one rank."""
    has_group = dist.is_initialized()  # an earlier test of these processes leaves its group of both
    if not has_group:
        dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    logits, targets = random_logits(64, 1001, seed=3)
    part = slice(0, cut) if rank == 0 else slice(cut, 1001)
    try:
        shared = sharpness(logits[:, part].contiguous(), targets, 5e-4, part.start, dist.group.WORLD)
    finally:
        if not has_group:
            dist.destroy_process_group()
    return shared, sharpness(logits, targets, 5e-4)


def test_ranks_that_share_the_vocabulary_agree_with_one_rank(two, tmp_path):
    (first, alone), (second, _) = two.run(_of_rank, [(rank, 500, str(tmp_path / "store")) for rank in range(2)])
    assert torch.equal(first, second)
    torch.testing.assert_close(first, alone, rtol=1e-6, atol=1e-6)
    assert alone.max() > 0.1


def test_a_rank_whose_columns_are_all_excluded_adds_nothing():
    logits, targets = random_logits(6, V)
    sums = sum_columns(logits, targets, 0.01, first_token=0)
    nothing = sum_columns(torch.full((6, 5), -torch.inf), targets, 0.01, first_token=V)
    assert not nothing[1:].any()
    assert torch.equal(combine(sums, 0.01), sharpness(logits, targets, 0.01))


@pytest.mark.parametrize("values", [[[0.0, 2.0, 4.0, 9.0], [1.0, 7.0, 5.0, 3.0]]])
def test_metrics_are_means_over_tokens_and_over_last_tokens(values):
    mask = torch.tensor([[0, 1, 1, 0], [0, 1, 1, 1]])
    assert sharpness_metrics(torch.tensor(values), mask) == {
        "sharpness": pytest.approx((2 + 4 + 7 + 5 + 3) / 5),
        "sharpness_last_token": pytest.approx((4 + 3) / 2),
    }
    only_first = sharpness_metrics(torch.tensor(values), mask * torch.tensor([[1], [0]]))
    assert only_first == {"sharpness": 3.0, "sharpness_last_token": 4.0}
    assert sharpness_metrics(torch.tensor(values), mask * 0) == {}


FLOAT32 = (
    "policy.precision=float32",
    "nemo_fp8rl.flow=bf16",
    "policy.generation.temperature=0.7",
    "policy.max_total_sequence_length=20",
)
PACKED = (
    "policy.sequence_packing.enabled=true",
    "policy.sequence_packing.train_mb_tokens=40",
    "policy.sequence_packing.logprob_mb_tokens=40",
)
DYNAMIC = (
    "policy.dynamic_batching.enabled=true",
    "policy.dynamic_batching.train_mb_tokens=40",
    "policy.dynamic_batching.logprob_mb_tokens=40",
)


def sharpness_of_hf(model: str, batch: SequenceBatch, temperature: float, epsilon: float) -> Tensor:
    """Return the sharpness of input_ids[:, 1:] by HF's logits, float32 [B, T-1]."""
    ids, inside = batch.input_ids, torch.arange(batch.input_ids.size(1)) < batch.input_lengths[:, None]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids, attention_mask=inside).logits
    logits = logits[:, :-1].flatten(0, 1) / temperature
    return sharpness(logits, ids[:, 1:].flatten(), epsilon).view(ids[:, 1:].shape)


@pytest.mark.parametrize("rows", [(), PACKED, DYNAMIC], ids=["padded", "packed", "dynamic"])
def test_a_rank_measures_the_sharpness_at_its_models_logits(recipe, tmp_path, rows):
    write_model(tmp_path / "model", seed=3)
    epsilon = "nemo_fp8rl.sharpness.epsilon=0.02"
    worker = new_worker(recipe(f"policy.model_name={tmp_path}/model", *FLOAT32, epsilon, *rows))
    batch = random_batch(0)
    expected = sharpness_of_hf(f"{tmp_path}/model", batch, 0.7, 0.02)
    logprobs, values = worker.logprobs_and_sharpness(batch)
    assert torch.equal(logprobs, worker.logprobs(batch))
    inside = torch.arange(10) < batch.input_lengths[:, None]
    torch.testing.assert_close(values[:, 1:][inside[:, 1:]], expected[inside[:, 1:]], rtol=1e-4, atol=1e-5)
    assert not values[:, 0].any()


def _measure(part: SequenceBatch) -> tuple[Tensor, Tensor, Tensor]:
    return *ranks.worker.logprobs_and_sharpness(part), ranks.worker.logprobs(part)


@pytest.mark.parametrize("align", ["vllm", "none"])
@pytest.mark.parametrize(
    ("layout", "rows"),
    [
        (("tensor_model_parallel_size=2", "sequence_parallel=true"), ()),
        (("pipeline_model_parallel_size=2",), PACKED),
        (("context_parallel_size=2",), PACKED),
        ((), DYNAMIC),
    ],
    ids=["tp-sp", "pp-packed", "cp-packed", "dp-dynamic"],
)
def test_two_ranks_measure_what_one_rank_measures(two, recipe, tmp_path, layout, rows, align):
    write_model(tmp_path / "model", seed=3, vocab_size=97)  # does not divide: the last rank has fewer
    base = (f"policy.model_name={tmp_path}/model", *FLOAT32, f"nemo_fp8rl.align={align}")
    batch = random_batch(1)
    _, expected = new_worker(recipe(*base)).logprobs_and_sharpness(batch)
    keys = (f"policy.megatron_cfg.{key}" for key in layout)
    cfg = recipe(*base, *rows, "cluster.backend=ray", "cluster.train_ranks=2", *keys)
    infos = two.setup(cfg)
    parts = split_shards(batch, cfg.data_parallel_size)
    results = two.run(_measure, [(parts[info.shard],) for info in infos])
    answers = {info.shard: result for info, result in zip(infos, results, strict=True) if info.is_reporter}
    assert all(torch.equal(logprobs, plain) for logprobs, _, plain in answers.values())
    values = torch.cat([answers[shard][1] for shard in sorted(answers)])
    inside = torch.arange(10) < batch.input_lengths[:, None]
    torch.testing.assert_close(values[inside], expected[inside], rtol=1e-5, atol=1e-6)
