"""Pairs and draws, held against the released rule in float64 and against exact probabilities."""

import itertools

import pytest
import torch

from nemo_fp8rl.algorithms.trajectories import draw_pairs, pair_by_contrast


def pairs_of_the_rule(advantages: list[float], group_ids: list[int], count: int) -> list[list[int]]:
    """The rule in words: sort a group by advantage, take the best with the worst, then what is left in the same way."""
    pairs = []
    for group in sorted(set(group_ids)):
        rows = [row for row, other in enumerate(group_ids) if other == group]
        rows.sort(key=lambda row: -advantages[row])
        while rows:
            pairs.append([rows.pop(0), rows.pop()])
        del pairs[len(pairs) - len([g for g in group_ids if g == group]) // 2 + count :]
    return pairs


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("size", "count"), [(2, 1), (6, 1), (8, 4), (16, 8), (16, 4)])
def test_pairs_are_those_of_the_rule(seed, size, count):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randint(3, (5 * size,), generator=generator).double()  # ties, and whole groups of equal rewards
    group_ids = torch.arange(5).repeat_interleave(size)[torch.randperm(5 * size, generator=generator)]
    advantages = rewards - rewards.mean()
    found = pair_by_contrast(advantages.float(), group_ids, count)
    assert found.tolist() == pairs_of_the_rule(advantages.tolist(), group_ids.tolist(), count)


def test_groups_that_do_not_fall_into_pairs_are_refused():
    for group_ids, count in (([0, 0, 0], 1), ([0, 0, 0, 0, 1, 1], 1), ([0, 0], 2), ([0, 0], 0)):
        with pytest.raises(ValueError, match="groups must be even and alike"):
            pair_by_contrast(torch.zeros(len(group_ids)), torch.tensor(group_ids), count)


def test_draws_have_the_law_of_draws_one_after_another():
    """Every order of two of four pairs, against its exact probability."""
    weights, rounds = torch.tensor([1.0, 2.0, 0.0, 4.0, 3.0]), 100_000
    draws, num_filled = draw_pairs(weights, rounds, 2, torch.Generator().manual_seed(5))
    assert (draws.shape, num_filled) == ((rounds, 2), 0)
    for first, second in itertools.permutations(range(5), 2):
        a, b = float(weights[first]), float(weights[second])
        exact = a / 10 * b / (10 - a)
        share = float(((draws[:, 0] == first) & (draws[:, 1] == second)).double().mean())
        assert share == pytest.approx(exact, abs=5 * (exact * (1 - exact) / rounds) ** 0.5)


def test_a_round_without_enough_weights_fills_up_from_those_that_have_one():
    weights = torch.tensor([0.0, 1.0, 0.0, 100.0, 0.0, 0.0])
    draws, num_filled = draw_pairs(weights, 20_000, 3, torch.Generator().manual_seed(1))
    assert num_filled == 20_000
    assert set(draws.flatten().tolist()) == {1, 3}
    assert all(set(row) == {1, 3} for row in draws[:, :2].tolist()), "those with a weight come first, each of them once"
    assert float((draws[:, 2] == 1).double().mean()) == pytest.approx(0.5, abs=5 * 0.5 / 20_000**0.5)


def test_a_step_of_equal_advantages_draws_from_all_pairs():
    draws, num_filled = draw_pairs(torch.zeros(4), 10_000, 2, torch.Generator().manual_seed(2))
    assert num_filled == 20_000
    assert (draws[:, 0] != draws[:, 1]).all()
    for pair in range(4):
        assert float((draws == pair).any(1).double().mean()) == pytest.approx(0.5, abs=5 * 0.5 / 100)


def test_the_same_generator_draws_the_same():
    weights = torch.rand(64)
    first, second = (draw_pairs(weights, 8, 8, torch.Generator().manual_seed(7))[0] for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, draw_pairs(weights, 8, 8, torch.Generator().manual_seed(8))[0])


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_weights_that_are_none_are_refused(weights):
    with pytest.raises(ValueError, match="2 draws from"):
        draw_pairs(torch.tensor(weights), 1, 2, torch.Generator())
