"""Batches as NeMo RL passes them (BatchedDataDict) and as we do: same names, other dtypes."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor

from nemo_fp8rl.batch import Completion, TrainBatch, padded_routes

INTEGERS = ("input_ids", "input_lengths", "routed_experts")


def to_train_batch(data: Mapping[str, Any]) -> TrainBatch:
    """NeMo RL's fields that a TrainBatch has: integers as they are, masks and log-probs in float32.

    NeMo RL pads routed_experts with zeros, which are experts; beyond a sequence they are -1, not known, here.
    """
    known = {name: data[name] for name in TrainBatch.__annotations__ if isinstance(data.get(name), Tensor)}
    if (routes := known.get("routed_experts")) is not None:
        beyond = torch.arange(routes.shape[1]) >= known["input_lengths"][:, None]
        known["routed_experts"] = routes.masked_fill(beyond[:, :, None, None], -1)
    return cast(
        TrainBatch, {name: field if name in INTEGERS else field.to(torch.float32) for name, field in known.items()}
    )


def unpad_prompts(input_ids: Tensor, input_lengths: Tensor) -> list[tuple[int, ...]]:
    """input_ids: int64 [B, S], right-padded; input_lengths: int [B]."""
    return [tuple(row[:length]) for row, length in zip(input_ids.tolist(), input_lengths.tolist(), strict=True)]


def merge_repeats(rows: list[tuple[int, ...]]) -> tuple[list[tuple[int, ...]], int]:
    """(prompts, n) so that each of them, n times, gives the rows; n is 1 where they do not come in equal numbers.

    NeMo RL repeats a prompt for each of its samples; an engine reads it once where it is asked for n samples.
    """
    groups = [(row, len(list(same))) for row, same in groupby(rows)]
    sizes = {size for _, size in groups}
    return ([row for row, _ in groups], sizes.pop()) if len(sizes) == 1 else (rows, 1)


def to_generation_output(
    asked: list[tuple[int, ...]], completions: list[Completion], width: int, pad_token_id: int
) -> dict[str, Tensor]:
    """NeMo RL's GenerationOutputSpec of row-wise completions, right-padded to `width` tokens or more.

    output_ids int64 and logprobs float32 [B, W], 0 where nothing was generated; generation_lengths and
    unpadded_sequence_lengths int64 [B]; truncated bool [B]; routed_experts int16 [B, W, layers, top k], -1 where not
    known, when completions have them.
    """
    prompt_lengths = torch.tensor([len(prompt) for prompt in asked])
    generated = torch.tensor([len(completion.token_ids) for completion in completions])
    width = max(width, int((prompt_lengths + generated).max()))
    output_ids = torch.full((len(asked), width), pad_token_id, dtype=torch.int64)
    logprobs = torch.zeros(len(asked), width)
    for i, (prompt, completion) in enumerate(zip(asked, completions, strict=True)):
        start, end = len(prompt), len(prompt) + len(completion.token_ids)
        output_ids[i, :end] = torch.tensor(prompt + completion.token_ids)
        logprobs[i, start:end] = torch.tensor(completion.logprobs)
    output = {
        "output_ids": output_ids,
        "logprobs": logprobs,
        "generation_lengths": generated,
        "unpadded_sequence_lengths": prompt_lengths + generated,
        "truncated": torch.tensor([completion.finish_reason == "length" for completion in completions]),
    }
    if (routes := padded_routes([completion.routed_experts for completion in completions], width)) is not None:
        output["routed_experts"] = routes
    return output
