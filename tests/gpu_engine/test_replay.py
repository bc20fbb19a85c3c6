"""Routing replay in a mixture of experts by the shared operations."""

from dataclasses import replace

import pytest
import torch

from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.ops import alignment
from nemo_fp8rl.policy.layers.shared_ops.experts import SharedMoELayer
from nemo_fp8rl.policy.rank.worker import MegatronWorker
from tests.batches import loss_totals
from tests.conftest import RECIPES, SMALL
from tests.gpu_engine.test_aligned_trainer import make_batch
from tests.policy.layers.test_routing_replay import own_routes, random_routes


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe") / "tiny"
    make_tiny(folder, "add", 0, "qwen3_moe")
    paths = (f"policy.model_name={folder}/model", f"data.train.data_path={folder}/data.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alignment, "has_gpu", lambda: True)
        worker = MegatronWorker()
        worker.setup(load(RECIPES / "tiny_cpu.yaml", [*SMALL, *paths, "nemo_fp8rl.align=vllm"]), 0, 1, None)
        yield worker


@pytest.fixture
def choices(worker, monkeypatch):
    """(Logits, weights, experts) of every call of a layer's `_choose`, in order."""
    made, choose = [], SharedMoELayer._choose

    def keep(layer, logits):
        weights, ids = choose(layer, logits)
        made.append((logits, weights, ids))
        return weights, ids

    monkeypatch.setattr(SharedMoELayer, "_choose", keep)
    return made


@pytest.mark.long
def test_the_routers_own_choice_gives_the_bits_without_replay(worker):
    batch = make_batch()
    routes, expected = own_routes(worker, batch), worker.logprobs(batch)
    assert torch.equal(worker.logprobs(replace(batch, routed_experts=routes)), expected)


def test_a_token_goes_to_the_experts_of_the_batch_with_their_softmax(worker, choices):
    batch = make_batch()
    routes = random_routes(1, *batch.input_ids.shape)
    routes[:, 5:] = -1  # the router chooses
    expected = worker.logprobs(batch)
    chosen = [ids for _, _, ids in choices]
    choices.clear()
    moved = worker.logprobs(replace(batch, routed_experts=routes))
    assert not torch.allclose(moved[:, :4], expected[:, :4], atol=1e-4)
    assert len(choices) == len(chosen) == 2
    for layer, (logits, weights, ids) in enumerate(choices):
        shape = batch.input_ids.size(1) - 1, len(batch.input_ids), 2
        of_batch = routes[:, :-1, layer].transpose(0, 1).long()
        assert torch.equal(ids.view(shape)[:5], of_batch[:5])
        torch.testing.assert_close(weights, logits.float().gather(1, ids).softmax(-1), rtol=1e-6, atol=1e-7)
        best = logits.float().topk(2).indices.sort(-1).values
        assert torch.equal(ids.view(shape)[5:].sort(-1).values, best.view(shape)[5:])


def test_the_router_and_the_named_experts_learn(worker):
    batch = make_batch()
    only = torch.zeros(*batch.input_ids.shape, 2, 2, dtype=torch.int16)
    only[..., 1] = 3
    worker.train_step(replace(batch, routed_experts=only), NllLoss(), loss_totals(4.0, 10.0))
    gradients = {n: p.main_grad for n, p in worker.model.named_parameters()}
    for layer in range(2):
        router = gradients[f"decoder.layers.{layer}.mlp.router.weight"]
        assert router[[0, 3]].abs().amax(1).min() > 0
        assert (router[[1, 2, 4, 5, 6, 7]] == 0).all()
        torch.testing.assert_close(router[0], -router[3], rtol=0.02, atol=1e-4)  # of a softmax over two
        experts = f"decoder.layers.{layer}.mlp.experts.local_experts."
        assert all(gradients[f"{experts}{e}.linear_fc1.weight"].abs().max() > 0 for e in (0, 3))
        assert all((gradients[f"{experts}{e}.linear_fc1.weight"] == 0).all() for e in (1, 2, 7))
