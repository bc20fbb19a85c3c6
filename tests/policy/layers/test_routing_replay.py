"""Routers choose the experts of the batch, on one rank and on ranks that share the model. float32 where bits differ."""

from dataclasses import replace

import pytest
import torch

from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.policy.rank.worker import MegatronWorker
from tests.batches import loss_totals
from tests.policy.ranks import logprobs_and_norm
from tests.policy.test_worker import new_worker, random_batch

EXPERTS, TOP, LAYERS = 8, 2, 2
FP32 = ("policy.precision=float32", "nemo_fp8rl.flow=bf16")


@pytest.fixture
def moe(recipe, tmp_path):
    write_model(tmp_path / "model", family="qwen3_moe")
    return lambda *overrides: recipe(f"policy.model_name={tmp_path}/model", *overrides)


def random_routes(seed: int, b: int = 8, t: int = 10) -> torch.Tensor:
    """Return two different experts for each token in each layer."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(b, t, LAYERS, EXPERTS, generator=generator).argsort(-1)[..., :TOP].to(torch.int16)


def own_routes(worker: MegatronWorker, batch) -> torch.Tensor:
    """Return the routers' own choices in the form of a batch."""
    taken: list[list[torch.Tensor]] = [[] for _ in range(LAYERS)]
    hooks = []
    for i, replay in enumerate(worker.pipeline.replay.routers):
        ask = replay.get_replay_topk

        def spy(*arguments, i=i, ask=ask):
            scores, experts = ask(*arguments)
            taken[i].append(experts)
            return scores, experts

        replay.get_replay_topk = spy
        hooks.append((replay, ask))
    worker.logprobs(batch)
    for replay, ask in hooks:
        replay.get_replay_topk = ask
    b, t = batch.input_ids.shape
    per_layer = [torch.cat(parts).view(t - 1, b, TOP).transpose(0, 1) for parts in taken]
    return torch.nn.functional.pad(torch.stack(per_layer, 2), (0, 0, 0, 0, 0, 1), value=-1)


def step(worker, batch) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    metrics = worker.train_step(batch, NllLoss(), loss_totals(8.0, batch.token_mask[:, 1:].sum()))
    return metrics, dict(worker.weights().for_checkpoint())


@pytest.mark.parametrize("flow", ["bf16", "fp8_e2e"])
def test_replaying_the_routers_own_choice_changes_no_bit(moe, flow):
    worker, batch = new_worker(moe(f"nemo_fp8rl.flow={flow}")), random_batch(0)
    routes = own_routes(worker, batch)
    assert torch.equal(worker.logprobs(replace(batch, routed_experts=routes)), worker.logprobs(batch))


def test_the_experts_of_the_batch_override_the_router(moe):
    worker, batch = new_worker(moe(*FP32)), random_batch(0)
    routes = own_routes(worker, batch)
    expected = worker.logprobs(batch)
    other = random_routes(1)
    moved = worker.logprobs(replace(batch, routed_experts=other))
    assert not torch.allclose(moved, expected, atol=1e-3)
    assert torch.equal(own_routes(worker, replace(batch, routed_experts=other))[:, :-1], other[:, :-1].long())
    assert torch.equal(worker.logprobs(batch), expected)  # of the batch before nothing is left
    assert torch.equal(worker.logprobs(replace(batch, routed_experts=routes)), expected)


def test_the_router_places_tokens_without_known_experts(moe):
    worker, batch = new_worker(moe(*FP32)), random_batch(0)
    routes, expected = random_routes(1), worker.logprobs(batch)
    assert torch.equal(worker.logprobs(replace(batch, routed_experts=torch.full_like(routes, -1))), expected)
    routes[:, 5:] = -1
    mixed = own_routes(worker, replace(batch, routed_experts=routes))
    assert torch.equal(mixed[:, :5], routes[:, :5].long())
    late = routes.clone()
    late[:, :6] = -1
    late[:, 6:] = random_routes(2)[:, 6:]
    moved = worker.logprobs(replace(batch, routed_experts=late))
    torch.testing.assert_close(moved[:, :7], expected[:, :7], rtol=1e-5, atol=1e-5)  # t reads tokens before t
    assert not torch.allclose(moved[:, 7:], expected[:, 7:], rtol=1e-2, atol=1e-2)


def test_the_router_learns_from_the_experts_of_the_batch(moe):
    worker, batch = new_worker(moe(*FP32)), random_batch(0)
    only = torch.zeros(8, 10, LAYERS, TOP, dtype=torch.int16)
    only[..., 1] = 1
    worker.train_step(replace(batch, routed_experts=only), NllLoss(), loss_totals(8.0, 10.0))
    gradients = {n: p.main_grad for n, p in worker.model.named_parameters()}
    for layer in range(LAYERS):
        router = gradients[f"decoder.layers.{layer}.mlp.router.weight"]
        assert router[:2].abs().min() > 0
        assert (router[2:] == 0).all()
        experts = f"decoder.layers.{layer}.mlp.experts.local_experts."
        assert gradients[experts + "1.linear_fc1.weight"].abs().max() > 0
        assert (gradients[experts + "2.linear_fc1.weight"] == 0).all()


@pytest.mark.parametrize("size", [8, 2], ids=["one microbatch", "four"])
def test_recomputed_layers_take_the_same_experts(moe, size):
    batch = replace(random_batch(0), routed_experts=random_routes(3))
    small = (f"policy.train_micro_batch_size={size}", "policy.train_global_batch_size=8")
    keep, again = (
        "policy.megatron_cfg.activation_checkpointing=false",
        "policy.megatron_cfg.activation_checkpointing=true",
    )
    (a, plain), (b, recomputed) = (step(new_worker(moe(*small, key)), batch) for key in (keep, again))
    assert a == b
    assert all(torch.equal(plain[n], recomputed[n]) for n in plain)


PP_AGAIN = ("pipeline_model_parallel_size=2", "activation_checkpointing=true")


@pytest.mark.parametrize(
    "layout",
    [
        ("pipeline_model_parallel_size=2",),
        PP_AGAIN,
        ("tensor_model_parallel_size=2", "sequence_parallel=true"),
        ("expert_model_parallel_size=2",),
        ("context_parallel_size=2",),
    ],
    ids=["pp", "pp-recomputed", "sp", "ep", "cp"],
)
def test_ranks_that_share_the_model_replay_alike(two, moe, layout):
    batch = replace(random_batch(0), routed_experts=random_routes(4))
    small = (*FP32, "policy.train_micro_batch_size=2", "policy.train_global_batch_size=8")
    single_rank = new_worker(moe(*small))
    expected = single_rank.logprobs(batch)
    assert not torch.allclose(single_rank.logprobs(replace(batch, routed_experts=None)), expected)
    metrics, _ = step(single_rank, batch)
    keys = (f"policy.megatron_cfg.{key}" for key in layout)
    actual, norm = logprobs_and_norm(two, moe(*small, "cluster.backend=ray", "cluster.train_ranks=2", *keys), batch)
    inside = torch.arange(10) < batch.input_lengths[:, None]
    torch.testing.assert_close(actual[inside], expected[inside], rtol=1e-5, atol=1e-5)
    assert norm == pytest.approx(metrics["grad_norm"], rel=1e-5)


def test_routes_of_another_model_are_refused(moe):
    worker = new_worker(moe())
    with pytest.raises(ValueError, match=r"routed_experts must be \[B, T, 2 layers, 2 experts\], got \[8, 10, 3, 2\]"):
        worker.logprobs(replace(random_batch(0), routed_experts=torch.zeros(8, 10, 3, 2, dtype=torch.int16)))


@pytest.mark.parametrize("unknown", [(3, -1), (-1, 3), (0, 0), (7, 7)], ids=str)
def test_the_router_places_tokens_with_invalid_experts(moe, unknown):
    """Zeros are NeMo RL's padding; Megatron's dispatcher counts `top k` experts of each token."""
    worker, batch = new_worker(moe(*FP32)), random_batch(0)
    routes = random_routes(1)
    routes[:, 5:] = -1
    expected = own_routes(worker, replace(batch, routed_experts=routes))
    routes[:, 5:] = torch.tensor(unknown)
    assert torch.equal(own_routes(worker, replace(batch, routed_experts=routes)), expected)


@pytest.mark.parametrize("expert", [8, 300])
def test_experts_that_the_model_does_not_have_are_refused(moe, expert):
    routes = random_routes(1)
    routes[3, 4, 1, 1] = expert
    with pytest.raises(ValueError, match=rf"names expert {expert}, and the model has 8, 0 to 7"):
        new_worker(moe()).logprobs(replace(random_batch(0), routed_experts=routes))
