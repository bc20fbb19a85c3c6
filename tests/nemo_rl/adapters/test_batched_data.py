"""NeMo RL's batches and ours."""

from typing import Any

import pytest
import torch

from nemo_fp8rl.batch import Completion, TrainBatch
from nemo_fp8rl.nemo_rl.adapters.batched_data import (
    build_batch,
    count_turns,
    merge_repeats,
    to_generation_output,
    to_scored_batch,
    to_sequence_batch,
    unpad_prompts,
)


def test_rows_of_equal_prompts_are_asked_once_for_n_samples():
    a, b = (1, 2), (3,)
    assert merge_repeats([a, a, a, b, b, b]) == ([a, b], 3)
    assert merge_repeats([a, b, a, b]) == ([a, b, a, b], 1)
    assert merge_repeats([a, a, b]) == ([a, a, b], 1)  # not in equal numbers
    assert merge_repeats([a]) == ([a], 1)


def test_prompts_are_cut_at_their_lengths():
    ids = torch.tensor([[5, 6, 0], [7, 8, 9]])
    assert unpad_prompts(ids, torch.tensor([2, 3], dtype=torch.int32)) == [(5, 6), (7, 8, 9)]


def test_completions_become_right_padded_rows_with_logprobs_where_they_were_generated():
    answers = [Completion((8, 1), (-0.5, -0.25), "stop", 3), Completion((), (), "length", 3)]
    out = to_generation_output([(5, 6), (7, 7, 7)], answers, width=3, pad_token_id=99)
    assert out["output_ids"].tolist() == [[5, 6, 8, 1], [7, 7, 7, 99]]
    assert out["logprobs"].tolist() == [[0, 0, -0.5, -0.25], [0, 0, 0, 0]]
    assert out["generation_lengths"].tolist() == [2, 0]
    assert out["unpadded_sequence_lengths"].tolist() == [4, 3]
    assert out["truncated"].tolist() == [False, True]
    assert "routed_experts" not in out


def test_routes_are_minus_one_where_no_engine_said_them():
    known = torch.arange(12, dtype=torch.int16).view(3, 2, 2)
    answers = [Completion((8, 1), (0.0, 0.0), "stop", 0, known), Completion((4,), (0.0,), "length", 0)]
    routes = to_generation_output([(5, 6), (7,)], answers, width=2, pad_token_id=0)["routed_experts"]
    assert routes.shape == (2, 4, 2, 2)
    assert torch.equal(routes[0, :3], known)
    assert (routes[0, 3:] == -1).all() and (routes[1] == -1).all()


def test_routes_beyond_a_sequence_are_not_known_whatever_nemo_rl_pads_with():
    routes = torch.ones(2, 3, 2, 2, dtype=torch.int16)
    data = {"input_ids": torch.ones(2, 3), "input_lengths": torch.tensor([3, 1]), "routed_experts": routes}
    taken = to_sequence_batch(data).routed_experts
    assert taken.dtype == torch.int16
    assert taken[:, :, 0, 0].tolist() == [[1, 1, 1], [1, -1, -1]]
    assert (routes == 1).all()  # NeMo RL's own


def test_a_prompt_ends_before_the_first_token_to_train_on():
    mask = torch.tensor([[0, 0, 1, 1, 0], [0, 1, 0, 1, 1], [0, 0, 0, 0, 0]])
    data = {"input_ids": torch.ones(3, 5), "input_lengths": torch.tensor([5, 5, 4], dtype=torch.int32)}
    assert to_sequence_batch(data).prompt_lengths is None
    prompts = to_sequence_batch(data | {"token_mask": mask}).prompt_lengths
    assert prompts.dtype == torch.int64
    assert prompts.tolist() == [2, 1, 4]
    assert count_turns(mask).tolist() == [1, 2, 0]
    assert count_turns(torch.ones(1, 2)).tolist() == [1]


def columns() -> dict[str, Any]:
    return {
        "input_ids": torch.ones(2, 3, dtype=torch.int64),
        "input_lengths": torch.tensor([3, 2], dtype=torch.int32),
        "token_mask": torch.ones(2, 3, dtype=torch.int64),
        "sample_mask": torch.ones(2),
        "advantages": torch.ones(2, 3, dtype=torch.float64),
        "prev_logprobs": torch.ones(2, 3),
        "generation_logprobs": torch.ones(2, 3),
        "content": ["a", "b"],
        "idx": torch.arange(2),
    }


def test_a_scored_batch_has_float_masks_and_zeros_for_what_may_be_absent():
    batch = to_scored_batch(columns(), {"rewards"})
    assert batch.token_mask.dtype == batch.advantages.dtype == torch.float32
    assert batch.input_ids.dtype == torch.int64
    assert batch.rewards.tolist() == [0, 0]
    assert batch.reference_policy_logprobs is None


def test_a_column_that_is_read_may_not_be_absent():
    data = columns()
    del data["prev_logprobs"]
    with pytest.raises(KeyError, match="prev_logprobs"):
        to_scored_batch(data, {"rewards"})


def test_a_batch_with_importance_weights_is_ready_for_the_loss():
    batch = build_batch(columns() | {"importance_weights": torch.ones(2, 3)}, {"rewards"})
    assert isinstance(batch, TrainBatch)
    assert not batch.out_of_bounds.any()
