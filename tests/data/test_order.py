"""The order of prompts: epochs of permutations, a function of (seed, step) alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_fp8rl.data.order import PromptOrder
from nemo_fp8rl.generation.interface import sample_seed

sizes = {"num_prompts": st.integers(1, 12), "per_step": st.integers(1, 30), "seed": st.integers(0, 2**31)}


@settings(deadline=None, max_examples=60)
@given(**sizes)
def test_every_epoch_visits_every_prompt_once(num_prompts, per_step, seed):
    order = PromptOrder(num_prompts, per_step, seed)
    steps = range(1, 4 * num_prompts // per_step + 2)
    visited = [i for step in steps for i in order.indices(step)]
    assert len(visited) == per_step * len(steps)
    for start in range(0, len(visited) - num_prompts + 1, num_prompts):
        assert sorted(visited[start : start + num_prompts]) == list(range(num_prompts))


@settings(deadline=None, max_examples=60)
@given(**sizes, step=st.integers(1, 40))
def test_a_resumed_run_sees_what_the_uninterrupted_one_would(num_prompts, per_step, seed, step):
    whole = PromptOrder(num_prompts, per_step, seed)
    for earlier in range(1, step):
        whole.indices(earlier)
    assert PromptOrder(num_prompts, per_step, seed).indices(step) == whole.indices(step)


def test_seeds_and_epochs_shuffle_differently():
    first = PromptOrder(100, 100, 0)
    orders = [first.indices(1), first.indices(2), PromptOrder(100, 100, 1).indices(1)]
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert len({tuple(order) for order in [*orders, range(100)]}) == 4


@pytest.mark.parametrize("seed", [0, -1, 20261120235959, 2**63, -(2**70)])
def test_any_integer_is_a_seed(seed):
    assert sorted(PromptOrder(5, 5, seed).indices(3)) == [0, 1, 2, 3, 4]


def test_a_prompt_drawn_twice_in_a_step_is_sampled_anew():
    """A step across an epoch's border may hold a prompt twice: then by other seeds."""
    order = PromptOrder(100, 64, 42)
    step = next(s for s in range(1, 20) if len(set(order.indices(s))) < 64)
    seeds = [sample_seed(42, step, position) for position in range(64)]
    assert len(set(seeds)) == 64
