"""Convert between NeMo RL's batches (BatchedDataDict) and this package's: same field names, other dtypes."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor

from nemo_fp8rl.batch import Completion, TrainBatch, padded_routes

INTEGER_FIELDS = ("input_ids", "input_lengths", "routed_experts")


def to_train_batch(data: Mapping[str, Any]) -> TrainBatch:
    """Return the fields of NeMo RL's batch that a TrainBatch has: integers unchanged, masks and log-probs in float32.

    NeMo RL pads routed_experts with 0, which is the index of an expert; the padding becomes -1, unknown.
    """
    known = {name: data[name] for name in TrainBatch.__annotations__ if isinstance(data.get(name), Tensor)}
    if (routes := known.get("routed_experts")) is not None:
        is_padding = torch.arange(routes.shape[1]) >= known["input_lengths"][:, None]
        known["routed_experts"] = routes.masked_fill(is_padding[:, :, None, None], -1)
    batch = {name: field if name in INTEGER_FIELDS else field.to(torch.float32) for name, field in known.items()}
    return cast(TrainBatch, batch)


def unpad_prompts(input_ids: Tensor, input_lengths: Tensor) -> list[tuple[int, ...]]:
    """Return the token ids of each row without padding.

    input_ids:      int64 [B, S], right-padded
    input_lengths:  int [B]
    """
    return [tuple(row[:length]) for row, length in zip(input_ids.tolist(), input_lengths.tolist(), strict=True)]


def merge_repeats(rows: list[tuple[int, ...]]) -> tuple[list[tuple[int, ...]], int]:
    """Return (prompts, n) such that the rows are n copies of each prompt in turn; n is 1 if the counts differ.

    NeMo RL repeats a prompt for each of its samples; an engine that is asked for n samples reads the prompt once.
    """
    groups = [(row, len(list(same))) for row, same in groupby(rows)]
    sizes = {size for _, size in groups}
    return ([row for row, _ in groups], sizes.pop()) if len(sizes) == 1 else (rows, 1)


def to_generation_output(
    prompts: list[tuple[int, ...]], completions: list[Completion], width: int, pad_token_id: int
) -> dict[str, Tensor]:
    """Return NeMo RL's GenerationOutputSpec of one completion per prompt, right-padded to W tokens, `width` or more.

    output_ids:                 int64 [B, W], prompt and completion
    logprobs:                   float32 [B, W], 0 where nothing was generated
    generation_lengths:         int64 [B], tokens of the completion
    unpadded_sequence_lengths:  int64 [B], tokens of prompt and completion
    truncated:                  bool [B]
    routed_experts:             int16 [B, W, layers, top k], -1 where unknown; only if completions have them
    """
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
    generated = torch.tensor([len(completion.token_ids) for completion in completions])
    width = max(width, int((prompt_lengths + generated).max()))
    output_ids = torch.full((len(prompts), width), pad_token_id, dtype=torch.int64)
    logprobs = torch.zeros(len(prompts), width)
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
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
