"""A rank that trains in FP4: random bits repeat after a resume and a recomputation; no two microbatches share them."""

from typing import Any

import pytest
import torch

from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.policy.layers.linears import QuantizedMatmul
from nemo_fp8rl.policy.rank.worker import MegatronWorker
from tests.policy import ranks
from tests.policy.test_worker import new_worker, random_batch, train

NATIVE = ("nemo_fp8rl.flow=nvfp4_e2e", "nemo_fp8rl.backward=native")
SMALL_BATCHES = ("policy.train_micro_batch_size=4",)


def gradients(worker: MegatronWorker) -> dict[str, torch.Tensor]:
    return {name: parameter.main_grad.clone() for name, parameter in worker.model.named_parameters()}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_resumed_run_draws_the_same_numbers(recipe, tmp_path, family):
    write_model(tmp_path / "model", family=family)
    cfg = recipe(f"policy.model_name={tmp_path}/model", *NATIVE, *SMALL_BATCHES)
    whole = new_worker(cfg)
    expected = [train(whole, random_batch(step)) for step in range(3)]
    first = new_worker(cfg)
    train(first, random_batch(0))
    first.save(str(tmp_path / "checkpoint"))
    resumed = new_worker(cfg)
    resumed.load(str(tmp_path / "checkpoint"))
    torch.rand(5)  # torch's own generator has no part in it
    assert [train(resumed, random_batch(step)) for step in (1, 2)] == expected[1:]
    weights, reference = dict(resumed.weights().for_checkpoint()), dict(whole.weights().for_checkpoint())
    assert all(torch.equal(weights[name], reference[name]) for name in reference)


def test_recomputed_layers_round_as_others(recipe):
    found = []
    for recomputes in ("false", "true"):
        key = f"policy.megatron_cfg.activation_checkpointing={recomputes}"
        worker = new_worker(recipe(*NATIVE, *SMALL_BATCHES, key))
        train(worker, random_batch(3))
        found.append(gradients(worker))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_steps_microbatches_and_seeds_have_draws_of_their_own(recipe):
    """The same rows twice in a batch: with one draw for both, each gradient would be that of one of them, doubled."""
    batch = random_batch(3, b=4)
    rows = torch.arange(8) % 4
    twice = batch.take_trimmed_rows(rows)
    once, seeded = new_worker(recipe(*NATIVE, *SMALL_BATCHES)), new_worker(recipe(*NATIVE, "grpo.seed=7"))
    twofold = new_worker(recipe(*NATIVE, *SMALL_BATCHES))
    train(once, batch), train(seeded, batch), train(twofold, twice)
    single, other, double = gradients(once), gradients(seeded), gradients(twofold)
    quantized = [name for name in single if ".linear_" in name and name.endswith(".weight")]
    assert len(quantized) == 8
    for name in quantized:
        assert not torch.equal(single[name], other[name])
        # train() divides by the tokens of the batch, so the sum over both microbatches has the size of one
        assert not torch.allclose(single[name], double[name], rtol=1e-3, atol=0)
        assert torch.corrcoef(torch.stack([single[name].flatten(), double[name].flatten()]))[0, 1] > 0.8


def test_off_it_rounds_to_nearest_and_seeds_change_nothing(recipe):
    off = (*NATIVE, "nemo_fp8rl.fp4.stochastic_rounding=false")
    a, b = new_worker(recipe(*off)), new_worker(recipe(*off, "grpo.seed=7"))
    assert train(a, random_batch(0)) == train(b, random_batch(0))


def layer_names() -> dict[str, Any]:
    modules = ranks.worker.model.named_modules()
    return {name: layer.gradient_bits.layer for name, layer in modules if isinstance(layer, QuantizedMatmul)}


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (("tensor_model_parallel_size=2",), {"linear_qkv": 2, "linear_fc1": 2, "linear_proj": 1, "linear_fc2": 1}),
        ((), {"linear_qkv": 2, "linear_fc1": 2, "linear_proj": 2, "linear_fc2": 2}),
    ],
    ids=["tensor", "data"],
)
def test_ranks_share_draws_where_they_round_the_same_gradient(recipe, two, layout, expected):
    keys = (f"policy.megatron_cfg.{key}" for key in layout)
    of_two = ("cluster.backend=ray", "cluster.train_ranks=2", "policy.train_micro_batch_size=16")
    two.setup(recipe(*NATIVE, *of_two, *keys))
    of_ranks = two.run(layer_names, [(), ()])
    assert len(set(of_ranks[0].values())) == 8
    for name in of_ranks[0]:
        kind = name.rpartition(".")[2]
        assert len({of_rank[name] for of_rank in of_ranks}) == expected[kind]


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", ("tensor_model_parallel_size=2", "sequence_parallel=true")),
        ("qwen3_moe", ("expert_model_parallel_size=2",)),
    ],
    ids=["tensor", "expert"],
)
def test_ranks_have_the_log_probs_of_one_rank_and_nearly_its_gradient(recipe, tmp_path, two, family, layout):
    write_model(tmp_path / "model", family=family)
    model = (*NATIVE, f"policy.model_name={tmp_path}/model", "policy.train_micro_batch_size=4")
    alone, batch = new_worker(recipe(*model)), random_batch(3)
    expected, norm = alone.logprobs(batch), train(alone, batch)["grad_norm"]
    parallel = ("cluster.backend=ray", "cluster.train_ranks=2", *(f"policy.megatron_cfg.{key}" for key in layout))
    logprobs, norm_of_two = ranks.logprobs_and_norm(two, recipe(*model, *parallel), batch)
    inside = batch.token_mask > 0
    assert torch.equal(logprobs[inside], expected[inside])
    assert norm_of_two != norm  # other draws
    assert norm_of_two == pytest.approx(norm, rel=0.03)
