"""The data of the loop: prompts, completions, and the batch in the stages that it passes through.

    Prompt --generation--> Completion --collate--> RolloutBatch --rewards, log-probs, advantages--> ScoredBatch
    --rollout correction--> TrainBatch --policy--> optimizer step

Each stage has the fields of the stage before it and adds its own. A batch is never changed: a stage makes a new one.
Field names are NeMo RL's, so that its loss functions can read the same columns (`nemo_rl.adapters.batched_data`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One question.

    index:          position in the dataset, stable over a run
    text:           the question as the dataset has it
    answer:         the reference answer that the verifier compares with, the first of several
    token_ids:      the question after the chat template, ready for the engine
    other_answers:  further answers that count as right
    rendered:       the text of token_ids: what the model sees
    fields:         the fields of its line, for a reward of the user's own
    place:          file and line
    chat:           JSON of a conversation's messages and tools, as a `Record` has it; "" for a prompt that is text
    solution:       a reference solution, for grpo.hints; "" without one
    hint_stage:     which of grpo.hints.shares the hint in token_ids has, from 1; 0 without a hint
    """

    index: int
    text: str
    answer: str
    token_ids: tuple[int, ...]
    other_answers: tuple[str, ...] = ()
    rendered: str = field(default="", repr=False)
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    place: str = field(default="", compare=False)
    chat: str = field(default="", repr=False)
    solution: str = field(default="", repr=False)
    hint_stage: int = 0


@dataclass(frozen=True)
class Completion:
    """One sampled answer.

    token_ids:      generated tokens; the end-of-sequence token is the last one when finish_reason is "stop"
    logprobs:       log-probability of each token under the distribution that it was sampled from; empty when the
                    request did not ask for log-probs
    policy_version: the version of the weights, as its refit counts it, that the engine had when it took the prompt: no
                    token and no key in the answer's context is of an older one
    version_starts: (first token, version) in order, where the weights changed under the answer or before its first
                    token; empty: every token was sampled from policy_version
    routed_experts: int16 [computed tokens of prompt and answer, layers, top k], -1 where an expert is unknown; None
                    without `policy.router_replay`
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    policy_version: int
    routed_experts: Tensor | None = field(default=None, compare=False, repr=False)
    version_starts: tuple[tuple[int, int], ...] = ()

    @property
    def token_versions(self) -> tuple[int, ...]:
        """The version that each token was sampled from."""
        starts = self.version_starts or ((0, self.policy_version),)
        ends = [start for start, _ in starts[1:]] + [len(self.token_ids)]
        return tuple(version for (start, version), end in zip(starts, ends, strict=True) for _ in range(start, end))


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceBatch:
    """B sequences (prompt + completion), right-padded to T: what a model reads.

    A log-prob at position t, in any stage, is of token t; position 0 is 0.
    """

    input_ids: Tensor  # int64 [B, T]
    input_lengths: Tensor  # int64 [B], without padding
    routed_experts: Tensor | None = None  # int [B, T, layers, top k], the engine's choice; -1 where it is unknown
    prompt_lengths: Tensor | None = None  # int64 [B], tokens before the first generated one; None where it is unknown

    @property
    def num_rows(self) -> int:
        return self.input_ids.size(0)

    def take_rows(self, rows: slice | Tensor) -> Self:
        """Return these rows of every field, with their padding; rows: a slice, or int64 [rows]."""
        return self._map(lambda column: column[rows])

    def take_trimmed_rows(self, rows: slice | Tensor, multiple: int = 1) -> Self:
        """Return these rows, cut to the longest of them, so that no padding is computed.

        rows:      a slice, or int64 [rows]
        multiple:  the length is rounded up to a multiple of it, as far as there is padding
        """
        part = self.take_rows(rows)
        longest = -(-int(part.input_lengths.max()) // multiple) * multiple
        return part._map(lambda column: column[:, :longest] if column.dim() >= 2 else column)

    def to(self, device: torch.device) -> Self:
        return self._map(lambda column: column.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        columns = {column.name: getattr(self, column.name) for column in fields(self)}
        return replace(self, **{name: change(column) for name, column in columns.items() if column is not None})


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutBatch(SequenceBatch):
    """Stage 1: what the engine sampled."""

    token_mask: Tensor  # float32 [B, T], 1 where the token was generated
    sample_mask: Tensor  # float32 [B], 0 drops the whole sample
    generation_logprobs: Tensor  # float32 [B, T], the engine's; 0 where no engine sampled
    # int64 [B, T]: the version that a token was sampled from; of a prompt's token, the version that the engine had when
    # it took the prompt; -1 for padding and where it is unknown. None where a run does not ask for it
    token_versions: Tensor | None = None

    @property
    def loss_mask(self) -> Tensor:
        """float32 [B, T], 1 for generated tokens of samples that are not dropped."""
        return self.token_mask * self.sample_mask[:, None]

    def has_tokens(self) -> bool:
        """Return whether the batch has a token to train on.

        A batch without one is to be skipped: Adam would move on a gradient of 0.
        """
        return bool(self.loss_mask.any())


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredBatch(RolloutBatch):
    """Stage 2: what the verifier and the trainer say of the rollout."""

    rewards: Tensor  # float32 [B], the verifier's
    prev_logprobs: Tensor  # float32 [B, T], the trainer's before the update
    advantages: Tensor  # float32 [B, T], 0 where nothing was generated
    reference_policy_logprobs: Tensor | None = None  # float32 [B, T], where the recipe has a KL term


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainBatch(ScoredBatch):
    """Stage 3: the batch with its rollout correction, ready for the loss."""

    importance_weights: Tensor  # float32 [B, T], 0 where a token is rejected
    out_of_bounds: Tensor  # bool [B, T], where the correction changed the weight or rejected the token

    def has_tokens(self) -> bool:
        return bool((self.loss_mask * self.importance_weights).any())


@dataclass(frozen=True)
class LossTotals:
    """Counts of a whole optimizer step, by which a loss divides.

    valid_seqs:     float32 [], samples that are not dropped, with a token or not (as NeMo RL counts)
    valid_toks:     float32 [], tokens with mask 1, without position 0
    positive_toks:  float32 [], tokens of samples with a positive reward; None where the batch has no rewards
    """

    valid_seqs: Tensor
    valid_toks: Tensor
    positive_toks: Tensor | None = None

    @classmethod
    def of_batch(cls, batch: RolloutBatch) -> Self:
        positive_toks = None
        if isinstance(batch, ScoredBatch):
            positive_toks = (batch.token_mask * (batch.sample_mask * (batch.rewards > 0))[:, None]).sum()
        mask = batch.token_mask[:, 1:] * batch.sample_mask[:, None]
        return cls(batch.sample_mask.sum(), mask.sum(), positive_toks)


BatchT = TypeVar("BatchT", bound=SequenceBatch)


def collate(
    prompts: Sequence[Prompt], completions: Sequence[Completion], pad_token_id: int, with_versions: bool = False
) -> RolloutBatch:
    """Return the batch whose row i is prompts[i] followed by completions[i]; every sample_mask is 1.

    with_versions:  fill `token_versions`
    """
    rows = [(*p.token_ids, *c.token_ids) for p, c in zip(prompts, completions, strict=True)]
    b, t = len(rows), max(len(row) for row in rows)
    input_ids = torch.full((b, t), pad_token_id, dtype=torch.int64)
    token_mask, generation_logprobs = torch.zeros(b, t), torch.zeros(b, t)
    token_versions = torch.full((b, t), -1, dtype=torch.int64) if with_versions else None
    for i, (row, prompt, completion) in enumerate(zip(rows, prompts, completions, strict=True)):
        start, end = len(prompt.token_ids), len(row)
        input_ids[i, :end] = torch.tensor(row)
        token_mask[i, start:end] = 1.0
        if completion.logprobs:
            generation_logprobs[i, start:end] = torch.tensor(completion.logprobs)
        if token_versions is not None:
            versions = (completion.policy_version,) * start + completion.token_versions
            token_versions[i, :end] = torch.tensor(versions)
    return RolloutBatch(
        input_ids=input_ids,
        input_lengths=torch.tensor([len(row) for row in rows]),
        routed_experts=pad_routes([completion.routed_experts for completion in completions], t),
        prompt_lengths=torch.tensor([len(prompt.token_ids) for prompt in prompts]),
        token_mask=token_mask,
        sample_mask=torch.ones(b),
        generation_logprobs=generation_logprobs,
        token_versions=token_versions,
    )


def pad_routes(routes: Sequence[Tensor | None], length: int) -> Tensor | None:
    """Return int16 [B, length, layers, top k] from each sample's [tokens, layers, top k].

    Unknown experts are -1. The result is None when no sample has routes.
    """
    known = [(i, route) for i, route in enumerate(routes) if route is not None]
    if not known:
        return None
    padded = known[0][1].new_full((len(routes), length, *known[0][1].shape[1:]), -1)
    for i, route in known:
        padded[i, : len(route)] = route[:length]
    return padded


def collate_prompts(prompts: Sequence[Prompt], pad_token_id: int) -> RolloutBatch:
    """Return a batch of the prompts alone, without a token to train on."""
    return collate(prompts, [Completion((), (), "length", 0)] * len(prompts), pad_token_id)


def split_by_tokens(lengths: Tensor, tokens: int, multiple: int = 1) -> list[Tensor]:
    """Return the rows of each microbatch, int64 [rows], so that rows * longest <= tokens.

    Rows are ordered from the shortest to the longest; equal lengths keep their order. A row that is longer than
    `tokens` has a microbatch to itself.

        lengths:   int64 [B], each rounded up to a multiple of `multiple`
    """
    order = torch.argsort(lengths, stable=True)
    ends: list[int] = []
    for i, length in enumerate((-(-lengths[order] // multiple) * multiple).tolist()):
        if i and (i + 1 - (ends[-1] if ends else 0)) * length > tokens:
            ends.append(i)
    return list(order.tensor_split(ends))


def pack_by_tokens(lengths: Tensor, tokens: int) -> list[Tensor]:
    """Return the rows of each packed microbatch, int64 [rows], whose lengths add up to at most `tokens`.

    First fit, longest first. A row that is longer than `tokens` has a microbatch to itself.

        lengths:  int64 [B]
    """
    bins: list[list[int]] = []
    free: list[int] = []
    for row in torch.argsort(lengths, descending=True, stable=True).tolist():
        length = int(lengths[row])
        index = next((i for i, room in enumerate(free) if room >= length), len(bins))
        if index == len(bins):
            bins.append([])
            free.append(tokens)
        bins[index].append(row)
        free[index] -= length
    return [torch.tensor(sorted(rows)) for rows in bins]


def token_coordinates(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return (row, position), int64 [tokens] each, of every token of sequences of these lengths, int64 [rows]."""
    starts = lengths.cumsum(0) - lengths
    row = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    return row, torch.arange(len(row), device=lengths.device) - starts[row]


def split_further(parts: list[Tensor], count: int) -> list[Tensor]:
    """Cut the largest microbatch in two until there are `count` of them; their order is kept."""
    parts = list(parts)
    while len(parts) < count:
        largest = max(range(len(parts)), key=lambda i: len(parts[i]))
        parts[largest : largest + 1] = parts[largest].tensor_split(2)
    return parts


def split_shards(batch: BatchT, count: int, order: Tensor | None = None) -> list[BatchT]:
    """Return `count` contiguous parts of the rows, as even as possible, with their padding.

    Parts are copies: a view that goes to another process takes the whole storage along.

        order:  int64 [rows], the order of the rows before they are cut; None leaves it
    """
    order = torch.arange(batch.num_rows) if order is None else order
    return [batch.take_rows(part) for part in order.tensor_split(count)]


def balanced_order(lengths: Tensor, count: int) -> Tensor:
    """Return the order of rows, int64 [rows], in which each of `count` shards has about as many tokens.

    The longest rows go to one shard each, the next longest in the opposite direction, and so on. Rows keep their order
    within a shard.
    """
    rank = torch.arange(len(lengths))
    turn, shard = rank // count, rank % count
    back = (turn % 2 == 1) & (turn < len(lengths) // count)
    shard_of_row = torch.empty_like(rank)
    shard_of_row[lengths.argsort(descending=True, stable=True)] = torch.where(back, count - 1 - shard, shard)
    return shard_of_row.argsort(stable=True)
