"""Remembers from which versions of the weights the answers of NeMo RL's asynchronous loop were sampled.

NeMo RL's rollouts keep tokens and log-probs of an answer and drop everything else that an engine says of it. So the
engines' side, in the process of NeMo RL's collector, records the versions of each answer in this ledger, an actor; the
trainer's side, in the driver, looks them up by the answer itself.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.batch import Completion, ScoredBatch

MAX_ANSWERS = 1 << 20
"""Answers that the ledger remembers; the oldest are forgotten first."""
Versions = tuple[int, tuple[int, ...]]
"""(`Completion.policy_version`, `Completion.token_versions`)."""


class VersionLedger:
    """The versions of answers by their keys (`answer_key`)."""

    def __init__(self) -> None:
        self.versions = OrderedDict[bytes, Versions]()

    def record(self, key: bytes, versions: Versions) -> None:
        self.versions[key] = versions
        while len(self.versions) > MAX_ANSWERS:
            self.versions.popitem(last=False)

    def look_up(self, keys: Sequence[bytes]) -> list[Versions | None]:
        return [self.versions.get(key) for key in keys]


def start_ledger() -> Any:
    """Return a VersionLedger that is a Ray actor, which every process can call."""
    import ray

    return ray.remote(num_cpus=0)(VersionLedger).remote()


def record_answer(ledger: Any, prompt: Sequence[int], completion: Completion) -> None:
    """Record an answer, and return once the ledger has it.

    ledger:  of `start_ledger`
    prompt:  all tokens before the answer
    """
    import ray

    tokens = torch.tensor([*prompt, *completion.token_ids])
    key = answer_key(tokens, torch.tensor(completion.logprobs))
    ray.get(ledger.record.remote(key, (completion.policy_version, completion.token_versions)))


def with_versions(ledger: Any, batch: ScoredBatch) -> ScoredBatch:
    """Return the batch with `token_versions`: -1 for a row with an answer that the ledger does not know.

    ledger:  of `start_ledger`
    """
    import ray

    spans = [(row, *span) for row in range(batch.num_rows) for span in _answers(batch.token_mask[row])]
    keys = [answer_key(batch.input_ids[row, :b], batch.generation_logprobs[row, a:b]) for row, a, b in spans]
    versions = torch.full(batch.input_ids.shape, -1, dtype=torch.int64)
    for (row, start, end), known in zip(spans, ray.get(ledger.look_up.remote(keys)), strict=True):
        if known is not None:
            taken, of_tokens = known
            before = versions[row, :start]
            before[before < 0] = taken  # of a conversation's earlier turn the version is there already
            versions[row, start:end] = torch.tensor(of_tokens)
    inside = torch.arange(versions.size(1)) < batch.input_lengths[:, None]
    return replace(batch, token_versions=torch.where(inside, versions, -1))


def answer_key(tokens: Tensor, logprobs: Tensor) -> bytes:
    """Return 16 bytes that tell an answer from every other one.

    tokens:    int64 [n], prompt and answer
    logprobs:  float32 [m], of the answer's tokens: they tell equal answers of two versions apart
    """
    content = tokens.to(torch.int64).numpy().tobytes() + logprobs.to(torch.float32).numpy().tobytes()
    return blake2b(content, digest_size=16).digest()


def _answers(mask: Tensor) -> list[tuple[int, int]]:
    """Return (first, end) of every run of nonzero values; mask: float32 [T]."""
    edges = torch.diff((mask > 0).to(torch.int8), prepend=mask.new_zeros(1, dtype=torch.int8))
    edges = torch.cat([edges, edges.new_tensor([-int(edges.sum())])])
    starts, ends = ((edges == sign).nonzero().flatten().tolist() for sign in (1, -1))
    return list(zip(starts, ends, strict=True))
