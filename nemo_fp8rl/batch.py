"""What flows through the loop: prompts, completions, and the batch that the policy trains on.

    Prompt --generation--> Completion --rewards, advantages--> TrainBatch --policy--> optimizer step

Field names are NeMo RL's, so that its loss functions and ours read the same batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypedDict, cast

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One question.

    index:      position in the dataset, stable over a run
    text:       as the dataset has it
    answer:     what the verifier compares with
    token_ids:  after the chat template, ready for the engine
    """

    index: int
    text: str
    answer: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """One sampled answer.

    token_ids:      generated tokens; the end-of-sequence token is the last one when finish_reason is "stop"
    logprobs:       log-probability of each token under the distribution it was sampled from; [] when not asked for
    policy_version: the refit whose weights produced every one of these tokens
    routed_experts: int16 [tokens of prompt and answer that were computed, layers, top k], -1 where not known; None when
                    not asked for (`policy.router_replay`)
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    policy_version: int
    routed_experts: Tensor | None = field(default=None, compare=False, repr=False)


class TrainBatch(TypedDict, total=False):
    """B sequences (prompt + completion), right-padded to T. Log-probs at position t are of token t; position 0 is 0.

    input_ids:            int64 [B, T]
    input_lengths:        int64 [B], prompt + completion, without padding
    token_mask:           float32 [B, T], 1 where the token was generated
    sample_mask:          float32 [B], 0 drops the whole sample
    rewards:              float32 [B]
    advantages:           float32 [B, T], the sample's advantage on every token
    generation_logprobs:  float32 [B, T], the engine's
    prev_logprobs:        float32 [B, T], the trainer's own, before the update
    reference_policy_logprobs:  float32 [B, T], the reference policy's, where the loss has a KL term
    importance_weights:   float32 [B, T], the rollout correction's, where it was decided for the whole batch
    out_of_bounds:        bool [B, T], where the correction changed or rejected the weight
    curr_logprobs_unfiltered:   float32 [B, T-1], the current policy without top-k and top-p, for the KL (NeMo RL)
    routed_experts:       int [B, T, layers, top k], the experts the engine chose for each token, -1 where not known
    positive_valid_toks:  float32 [B], tokens of the optimizer step's samples with a positive reward, on every row
    """

    input_ids: Tensor
    input_lengths: Tensor
    token_mask: Tensor
    sample_mask: Tensor
    rewards: Tensor
    advantages: Tensor
    generation_logprobs: Tensor
    prev_logprobs: Tensor
    reference_policy_logprobs: Tensor
    importance_weights: Tensor
    out_of_bounds: Tensor
    curr_logprobs_unfiltered: Tensor
    routed_experts: Tensor
    positive_valid_toks: Tensor


def collate(prompts: Sequence[Prompt], completions: Sequence[Completion], pad_token_id: int) -> TrainBatch:
    """Row i is prompts[i] followed by completions[i]. All fields but advantages and prev_logprobs are filled."""
    rows = [(*p.token_ids, *c.token_ids) for p, c in zip(prompts, completions, strict=True)]
    b, t = len(rows), max(len(row) for row in rows)
    input_ids = torch.full((b, t), pad_token_id, dtype=torch.int64)
    token_mask, generation_logprobs = torch.zeros(b, t), torch.zeros(b, t)
    for i, (row, prompt, completion) in enumerate(zip(rows, prompts, completions, strict=True)):
        start, end = len(prompt.token_ids), len(row)
        input_ids[i, :end] = torch.tensor(row)
        token_mask[i, start:end] = 1.0
        if completion.logprobs:
            generation_logprobs[i, start:end] = torch.tensor(completion.logprobs)
    batch = TrainBatch(
        input_ids=input_ids,
        input_lengths=torch.tensor([len(row) for row in rows]),
        token_mask=token_mask,
        sample_mask=torch.ones(b),
        generation_logprobs=generation_logprobs,
    )
    if (routes := padded_routes([completion.routed_experts for completion in completions], t)) is not None:
        batch["routed_experts"] = routes
    return batch


def padded_routes(routes: Sequence[Tensor | None], length: int) -> Tensor | None:
    """int16 [B, length, layers, top k] of each sample's [tokens, layers, top k], -1 where none is known; None when all
    are unknown.
    """
    known = [(i, route) for i, route in enumerate(routes) if route is not None]
    if not known:
        return None
    padded = known[0][1].new_full((len(routes), length, *known[0][1].shape[1:]), -1)
    for i, route in known:
        padded[i, : len(route)] = route[:length]
    return padded


def prompt_batch(prompts: Sequence[Prompt], pad_token_id: int) -> TrainBatch:
    """The prompts alone, nothing of which is to be trained on."""
    return collate(prompts, [Completion((), (), "length", 0)] * len(prompts), pad_token_id)


def rows(batch: TrainBatch, which: slice | Tensor, multiple: int = 1) -> TrainBatch:
    """These rows of every field, cut to the longest of them so that padding is not computed on.

    which: a slice, or int64 [rows]. multiple: the length is rounded up to one, as far as there is padding.
    """
    part = {name: cast(Tensor, field)[which] for name, field in batch.items()}
    longest = -(-int(part["input_lengths"].max()) // multiple) * multiple
    return cast(TrainBatch, {name: f[:, :longest] if f.dim() >= 2 else f for name, f in part.items()})


def microbatches(lengths: Tensor, tokens: int, multiple: int = 1) -> list[Tensor]:
    """Rows of microbatches, int64 [rows] each, so that rows * longest <= tokens; shortest first, ties in their order.

    lengths: int64 [B], each rounded up to `multiple`. A row that is longer than `tokens` has a microbatch of its own.
    """
    order = torch.argsort(lengths, stable=True)
    ends: list[int] = []
    for i, length in enumerate((-(-lengths[order] // multiple) * multiple).tolist()):
        if i and (i + 1 - (ends[-1] if ends else 0)) * length > tokens:
            ends.append(i)
    return list(order.tensor_split(ends))


def bins(lengths: Tensor, tokens: int) -> list[Tensor]:
    """Rows of packed microbatches, int64 [rows] each, whose lengths add up to at most `tokens`.

    lengths: int64 [B]. First fit, longest first; a row that is longer than `tokens` has a microbatch of its own.
    """
    held: list[list[int]] = []
    free: list[int] = []
    for row in torch.argsort(lengths, descending=True, stable=True).tolist():
        length = int(lengths[row])
        place = next((i for i, room in enumerate(free) if room >= length), len(held))
        if place == len(held):
            held.append([])
            free.append(tokens)
        held[place].append(row)
        free[place] -= length
    return [torch.tensor(sorted(rows)) for rows in held]


def flat_index(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """(row, position), int64 [tokens] each, of every token of sequences of these lengths, int64 [rows]."""
    starts = lengths.cumsum(0) - lengths
    row = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    return row, torch.arange(len(row), device=lengths.device) - starts[row]


def split_further(parts: list[Tensor], count: int) -> list[Tensor]:
    """The microbatches as `count` of them, the largest cut in two until there are as many; order is kept."""
    parts = list(parts)
    while len(parts) < count:
        largest = max(range(len(parts)), key=lambda i: len(parts[i]))
        parts[largest : largest + 1] = parts[largest].tensor_split(2)
    return parts


def on_device(batch: TrainBatch, device: torch.device) -> TrainBatch:
    return cast(TrainBatch, {name: cast(Tensor, field).to(device) for name, field in batch.items()})


def num_rows(batch: TrainBatch) -> int:
    return batch["input_ids"].size(0)


def has_tokens(batch: TrainBatch) -> bool:
    """Whether any token is to be trained on: none masked out, filtered, or rejected by the correction is.

    A batch without one is to be skipped: Adam would move on a gradient of 0.
    """
    mask = batch["token_mask"] * batch["sample_mask"][:, None]
    return bool((mask * batch["importance_weights"] if "importance_weights" in batch else mask).any())


def shards(batch: TrainBatch, count: int, order: Tensor | None = None) -> list[TrainBatch]:
    """`count` contiguous parts of the rows, as even as they go, padding kept. order: int64 [rows], theirs without one.

    Copies: a view that goes to another process takes along all of what it is a view of.
    """
    order = torch.arange(num_rows(batch)) if order is None else order
    parts = order.tensor_split(count)
    return [cast(TrainBatch, {name: cast(Tensor, field)[part] for name, field in batch.items()}) for part in parts]


def balanced_order(lengths: Tensor, count: int) -> Tensor:
    """int64 [rows]: the order in which each of so many `shards` has about as many tokens, and its rows in their order.

    The longest go to one part each, the next longest the other way round, and so on.
    """
    place = torch.arange(len(lengths))
    turn, part = place // count, place % count
    back = (turn % 2 == 1) & (turn < len(lengths) // count)
    of_row = torch.empty_like(place)
    of_row[lengths.argsort(descending=True, stable=True)] = torch.where(back, count - 1 - part, part)
    return of_row.argsort(stable=True)
