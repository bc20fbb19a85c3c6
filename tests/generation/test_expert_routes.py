"""The experts that the engine chose come with its answers, and the trainer takes them."""

from dataclasses import replace

import pytest
import torch

from nemo_fp8rl.batch import Prompt
from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.rollout.step_metrics import known_route_share
from tests.conftest import BATCH_INVARIANT, RECIPES, SMALL
from tests.generation.pair import FREE, GREEDY, Pair, outputs
from tests.policy.sent import sent_tensors


@pytest.fixture(scope="module", params=["vllm", "none"])
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe") / "tiny"
    make_tiny(folder, "add", 0, "qwen3_moe")
    overrides = (
        f"policy.model_name={folder}/model",
        f"data.train.data_path={folder}/data.jsonl",
        f"nemo_fp8rl.align={request.param}",
        "policy.router_replay.enabled=true",
        "policy.max_total_sequence_length=256",
        "policy.generation.vllm_cfg.max_model_len=200",
    )
    pair = Pair(load(RECIPES / "tiny_cpu.yaml", [*SMALL, *overrides]))
    pair.refit()
    yield pair
    pair.close()


def trainers_choice(pair: Pair, batch) -> torch.Tensor:
    """[B, T, layers, 2], sorted: what the trainer's routers choose by themselves."""
    taken = [[] for _ in pair.worker.pipeline.replay.routers]
    for i, replay in enumerate(pair.worker.pipeline.replay.routers):
        ask = type(replay).get_replay_topk

        def spy(*arguments, i=i, replay=replay, ask=ask):
            scores, experts = ask(replay, *arguments)
            taken[i].append(experts)
            return scores, experts

        replay.get_replay_topk = spy
    pair.worker.logprobs(replace(batch, routed_experts=None))
    for replay in pair.worker.pipeline.replay.routers:
        del replay.get_replay_topk
    b, t = batch.input_ids.shape
    return torch.stack([torch.cat(parts).view(t - 1, b, 2).transpose(0, 1) for parts in taken], 2).sort(-1).values


def test_every_token_that_the_engine_read_has_its_experts(pair):
    for group, prompt in zip(pair.generate(FREE), pair.prompts, strict=True):
        for completion in group:
            routes = completion.routed_experts
            assert routes.shape == (len(prompt.token_ids) + len(completion.token_ids) - 1, 2, 2)
            assert routes.min() >= 0  # prompts are shorter than a block of the prefix cache
            assert routes.max() < 8
            assert (routes[..., 0] != routes[..., 1]).all()


def test_a_single_answer_to_a_prompt_has_them_too(pair):
    groups = pair.generate(GREEDY)
    assert all(len(c.routed_experts) == len(p.token_ids) + 15 for (c,), p in zip(groups, pair.prompts, strict=True))


def test_the_batch_carries_them_and_the_trainer_agrees_with_almost_all(pair):
    batch = pair.samples()
    routes = batch.routed_experts[:, :-1].long().sort(-1).values
    known = (torch.arange(routes.size(1)) < batch.input_lengths[:, None] - 1)[..., None, None].expand_as(routes)
    assert (routes[known] >= 0).all()
    assert (routes[~known] == -1).all()
    assert known_route_share(batch) == {"routes_known": 1.0}
    batch.routed_experts[:, 0] = -1
    assert known_route_share(batch)["routes_known"] == pytest.approx(1 - 64 / float((batch.input_lengths - 1).sum()))
    batch = pair.samples()
    differ = (trainers_choice(pair, batch) != routes)[known].float().mean()
    assert differ < (0.001 if pair.cfg.nemo_fp8rl.align == "vllm" else 0.05)


def test_replay_does_not_raise_the_mismatch(pair):
    batch = pair.samples()
    inside = batch.token_mask > 0
    own = replace(batch, routed_experts=None)
    errors = [(pair.worker.logprobs(part) - batch.generation_logprobs)[inside].abs().mean() for part in (batch, own)]
    assert errors[0] <= errors[1] * 1.01


def test_routes_of_one_round_are_not_kept_for_the_next(pair):
    recorder = pair.engine.core.llm.model_executor.driver_worker.worker.routes
    pair.generate(GREEDY)
    assert not recorder._forwards
    ((completion,), *_) = pair.generate(replace(GREEDY, logprobs=False))
    assert completion.routed_experts is None
    assert not recorder._forwards


def test_samples_and_experts_outlast_a_cache_that_fills_while_they_are_generated(pair, tmp_path, monkeypatch):
    """vLLM then puts a sequence off, drops its keys, and computes them again when there is room."""
    if pair.cfg.nemo_fp8rl.align == "none":
        pytest.skip("one engine will do")
    five_blocks = 6 * 128 * 2 * 2 * 2 * 128 * 2 / 2**30  # and one that vLLM keeps; a sequence here comes to need two
    tight = pair.fresh_engine(sent_tensors(pair.worker), tmp_path / "tight", kv_cache_memory_gib=five_blocks)
    scheduler, put_off = tight.core.llm.engine_core.engine_core.scheduler, []
    preempt = scheduler._preempt_request

    def counted(request, *arguments, **keywords):
        put_off.append(request.request_id)
        return preempt(request, *arguments, **keywords)

    monkeypatch.setattr(scheduler, "_preempt_request", counted)
    prompts = [Prompt(i, "", "", tuple(2 + (i * j + j) % 12 for j in range(1, 121))) for i in range(4)]
    sampling = replace(FREE, num_generations=2, max_new_tokens=20, stop_token_ids=())
    with_room, without = pair.generate(sampling, prompts=prompts), pair.generate(sampling, tight, prompts)
    assert put_off
    assert outputs(without, same_batches=False) == outputs(with_room, same_batches=False)
    for group, expected in zip(without, with_room, strict=True):
        for completion, other in zip(group, expected, strict=True):
            differ = (completion.routed_experts != other.routed_experts).float().mean()
            assert differ <= (0 if BATCH_INVARIANT else 0.01)
            assert completion.routed_experts.min() >= 0
