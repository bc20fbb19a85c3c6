"""Convert NeMo RL's batches (BatchedDataDict, a mapping) to this package's stages: same field names, other dtypes.

This is the only place where a batch is a mapping.
"""

from collections.abc import Collection, Mapping
from dataclasses import fields
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.batch import Completion, ScoredBatch, SequenceBatch, TrainBatch, pad_routes

IDS = {field.name for field in fields(SequenceBatch)}
COLUMNS = {field.name for field in fields(TrainBatch)}
UNFILTERED = "curr_logprobs_unfiltered"
"""NeMo RL's column of log-probs without top-k and top-p, [B, T-1]; ours are an argument of the loss."""


def to_sequence_batch(data: Mapping[str, Any]) -> SequenceBatch:
    """Return the columns of NeMo RL's batch that a model reads.

    NeMo RL pads routed_experts with 0, which is the index of an expert; the padding becomes -1, unknown. A prompt ends
    before the first token that token_mask marks; a batch without this column has no prompt lengths.
    """
    routes = data.get("routed_experts")
    if routes is not None:
        is_padding = torch.arange(routes.shape[1]) >= data["input_lengths"][:, None]
        routes = routes.masked_fill(is_padding[:, :, None, None], -1)
    prompts = None
    if (mask := data.get("token_mask")) is not None:
        mask = mask != 0
        prompts = torch.where(mask.any(1), mask.int().argmax(1), data["input_lengths"].to(torch.int64))
    return SequenceBatch(
        input_ids=data["input_ids"],
        input_lengths=data["input_lengths"],
        routed_experts=routes,
        prompt_lengths=prompts,
    )


def count_turns(token_mask: Tensor) -> Tensor:
    """Return how often each row goes from read tokens to generated ones, int64 [B]; token_mask: [B, S]."""
    is_generated = (token_mask != 0).int()
    return (is_generated.diff(prepend=torch.zeros_like(is_generated[:, :1])) > 0).sum(1)


def to_scored_batch(data: Mapping[str, Any], optional: Collection[str]) -> ScoredBatch:
    """Return NeMo RL's batch as our second stage: integers as they are, masks and log-probs in float32.

    optional:  columns that may be absent, because nothing reads them; they are zeros then
    Raises:    KeyError on another column that is absent
    """
    floats = {name: data[name].to(torch.float32) for name in COLUMNS - IDS if isinstance(data.get(name), Tensor)}
    return build_batch(vars(to_sequence_batch(data)) | floats, optional)


def build_batch(columns: Mapping[str, Any], optional: Collection[str]) -> ScoredBatch:
    """Return a TrainBatch where there are importance weights, else a ScoredBatch; see `to_scored_batch`.

    A loss does not read the ids of tokens, so their columns may be absent.
    """
    mask = columns["token_mask"]
    present = {name: columns[name] for name in COLUMNS if name in columns}
    absent = {
        "input_ids": torch.zeros(mask.shape, dtype=torch.int64, device=mask.device),
        "input_lengths": torch.full(mask.shape[:1], mask.size(1), device=mask.device),
        **{name: torch.zeros(mask.shape, device=mask.device) for name in optional if name != "rewards"},
    }
    if "rewards" in optional:
        absent["rewards"] = torch.zeros(mask.shape[:1], device=mask.device)
    if "importance_weights" in columns:
        return TrainBatch(**{"out_of_bounds": torch.zeros_like(mask, dtype=torch.bool), **absent, **present})
    for field in ("rewards", "prev_logprobs", "advantages", "generation_logprobs"):
        if field not in present and field not in absent:
            raise KeyError(field)
    return ScoredBatch(**absent | present)


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
    if (routes := pad_routes([completion.routed_experts for completion in completions], width)) is not None:
        output["routed_experts"] = routes
    return output
