"""What an engine samples: seeds, stop strings, top-p and top-k, prompts that fill the context."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from nemo_fp8rl.batch import Prompt
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.generation.core import Request
from nemo_fp8rl.generation.interface import Sampling
from nemo_fp8rl.refit.manifest import RefitError
from tests.conftest import RECIPES
from tests.generation.pair import FREE, GREEDY, Pair, outputs
from tests.policy.sent import sent_tensors


@pytest.fixture(scope="module")
def pair(tiny_overrides) -> Iterator[Pair]:
    long = ("policy.max_total_sequence_length=256", "policy.generation.vllm_cfg.max_model_len=200")
    learning = ("policy.megatron_cfg.optimizer.lr=0.002", "policy.megatron_cfg.scheduler.lr_warmup_iters=0")
    overrides = [*tiny_overrides, *long, *learning, "policy.generation.stop_strings=[zz]"]
    pair = Pair(load(RECIPES / "tiny_cpu.yaml", overrides))
    pair.refit()
    yield pair
    pair.close()


def test_a_prompt_without_room_for_an_answer_gets_empty_ones(pair):
    full, almost = Prompt(0, "", "", (2,) * 200), Prompt(1, "", "", (2,) * 199)
    groups = pair.generate(FREE, prompts=[pair.prompts[0], full, almost, pair.prompts[1]])
    assert [(c.token_ids, c.logprobs, c.finish_reason) for c in groups[1]] == [((), (), "length")] * 4
    assert [len(c.token_ids) for c in groups[2]] == [1] * 4
    assert outputs([groups[0], groups[3]]) == outputs(pair.generate(FREE, prompts=pair.prompts[:2]))


def test_more_prompts_than_a_forward_holds_are_answered(pair):
    """vLLM would split one between two forwards, which it cannot do with a seed on a CPU."""
    prompts = [Prompt(i, "", "", tuple(2 + (i * j + j) % 12 for j in range(1, 151))) for i in range(70)]
    groups = pair.generate(replace(FREE, num_generations=1), prompts=prompts)
    assert [len(group) for group in groups] == [1] * 70
    assert outputs(groups[:3]) == outputs(pair.generate(replace(FREE, num_generations=1), prompts=prompts[:3]))


def test_samples_of_a_prompt_have_a_seed_each(pair):
    for group in pair.generate(replace(FREE, num_generations=8, stop_token_ids=())):
        assert len({c.token_ids for c in group}) > 4


def request(pair: Pair, prompt: tuple[int, ...], sampling: Sampling) -> Request:
    return Request(prompt, pair.engine._sampling_params(sampling, len(prompt), 7))


WHOLE_BLOCK = (*range(2, 12),) * 15
"""A prompt of one whole block of the cache, and a bit."""


def test_samples_of_a_prompt_share_its_cache(pair):
    """The later samples read what the first has computed."""
    ((_, output),) = pair.engine.core.stream([request(pair, WHOLE_BLOCK, replace(FREE, num_generations=4))])
    assert output.num_cached_tokens == 128


def test_a_stop_string_ends_an_answer_and_stays_in_it(pair):
    decode = pair.tokenizer.decode
    whole = [c for (c,) in pair.generate(GREEDY)]
    text = decode(whole[0].token_ids)[2:4]
    cut = [c for (c,) in pair.generate(replace(GREEDY, stop_strings=(text,)))]
    assert cut[0].finish_reason == "stop"
    assert len(cut[0].token_ids) < len(whole[0].token_ids)
    for short, full in zip(cut, whole, strict=True):
        assert short.token_ids == full.token_ids[: len(short.token_ids)]
        assert short.logprobs == full.logprobs[: len(short.logprobs)]
        held = text in decode(full.token_ids)
        assert decode(short.token_ids).endswith(text) == held
        assert short.finish_reason == ("stop" if held else "length")


@pytest.mark.parametrize(
    "restriction",
    [{"top_p": 0.6}, {"top_k": 3}, {"top_k": 10, "top_p": 0.8}, {"temperature": 0.6, "top_p": 0.6}],
    ids=str,
)
def test_both_sides_take_the_tokens_that_were_left_to_sample_from(pair, restriction):
    sampling = replace(FREE, **restriction)
    generation = pair.cfg.policy.generation
    blind = pair.mismatch(sampling)
    pair.worker.pipeline.policy = replace(pair.cfg.policy, generation=replace(generation, **restriction))
    batch = pair.samples(sampling)
    seen, both = pair.worker.logprobs(batch), batch.token_mask > 0
    aligned = pair.mismatch(sampling)
    pair.worker.pipeline.policy = pair.cfg.policy
    assert aligned < 1.001
    assert blind > 1.1
    free = pair.worker.logprobs(batch)
    assert (seen[both] >= free[both]).all()
    assert torch.equal(pair.worker.logprobs(batch, filter_tokens=False), free)


def test_both_sides_are_at_the_temperature(pair):
    sampling, generation = replace(FREE, temperature=0.6), pair.cfg.policy.generation
    blind = pair.mismatch(sampling)
    pair.worker.pipeline.policy = replace(pair.cfg.policy, generation=replace(generation, temperature=0.6))
    aligned = pair.mismatch(sampling)
    pair.worker.pipeline.policy = pair.cfg.policy
    assert aligned < 1.001
    assert blind > 1.05


# At the end: these move the weights that the tests above share


def test_a_refit_drops_the_keys_of_the_old_weights(pair, tmp_path):
    prompts = [Prompt(i, "", "", (2 + i, *WHOLE_BLOCK)) for i in range(2)]
    stale = outputs(pair.generate(GREEDY, prompts=prompts))
    first = request(pair, prompts[0].token_ids, GREEDY)
    ((_, output),) = pair.engine.core.stream([first])
    assert output.num_cached_tokens == 128
    pair.train(1)
    pair.refit()
    ((_, output),) = pair.engine.core.stream([first])
    assert output.num_cached_tokens == 0
    answers = outputs(pair.generate(GREEDY, prompts=prompts))
    assert answers != stale
    fresh = pair.fresh_engine(sent_tensors(pair.worker), tmp_path / "fresh")
    assert answers == outputs(pair.generate(GREEDY, fresh, prompts))


def test_a_refit_amid_answers_is_refused_for_their_keys_stay(pair):
    short, long = (
        request(pair, prompt.token_ids, replace(GREEDY, max_new_tokens=new))
        for prompt, new in zip(pair.prompts, (1, 50), strict=False)
    )
    under_way = pair.engine.core.stream([short, long])
    next(under_way)
    with pytest.raises(RefitError, match="the engine kept its prefix cache, which holds the old weights' keys"):
        pair.refit()
    under_way.close()
    with pytest.raises(RefitError, match="has not received weights"):
        pair.generate(GREEDY)
    pair.refit()
    pair.generate(GREEDY)
