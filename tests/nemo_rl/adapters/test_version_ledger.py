"""The versions of answers survive NeMo RL's rollouts, which keep only tokens and log-probs; the ledger is an actor."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import ray
import torch

from nemo_fp8rl.batch import Completion, ScoredBatch
from nemo_fp8rl.nemo_rl.adapters import version_ledger
from nemo_fp8rl.nemo_rl.adapters.version_ledger import VersionLedger, record_answer, start_ledger, with_versions


@pytest.fixture(scope="module")
def ledger() -> Iterator[Any]:
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield start_ledger()
    ray.shutdown()


def scored(rows: list[list[tuple[str, tuple[int, ...], tuple[float, ...]]]]) -> ScoredBatch:
    """Rows of turns: ("asked" or "answered", tokens, log-probs of an answer)."""
    width = max(sum(len(tokens) for _, tokens, _ in row) for row in rows)
    ids, mask, logprobs = torch.zeros(len(rows), width, dtype=torch.int64), *torch.zeros(2, len(rows), width)
    lengths = []
    for i, row in enumerate(rows):
        at = 0
        for kind, tokens, of_tokens in row:
            span = slice(at, at := at + len(tokens))
            ids[i, span] = torch.tensor(tokens)
            if kind == "answered":
                mask[i, span], logprobs[i, span] = 1.0, torch.tensor(of_tokens)
        lengths.append(at)
    zeros = torch.zeros(mask.shape)
    return ScoredBatch(
        input_ids=ids,
        input_lengths=torch.tensor(lengths),
        token_mask=mask,
        sample_mask=torch.ones(len(rows)),
        generation_logprobs=logprobs,
        rewards=torch.zeros(len(rows)),
        prev_logprobs=zeros,
        advantages=zeros,
    )


def test_every_turn_finds_its_versions(ledger):
    first = Completion((5, 6), (-0.1, -0.2), "stop", 3)
    second = Completion((8, 9, 10), (-0.3, -0.4, -0.5), "stop", 3, version_starts=((0, 3), (1, 4)))
    same_tokens = replace(first, logprobs=(-0.7, -0.2), policy_version=4)
    record_answer(ledger, (1, 2), first)
    record_answer(ledger, (1, 2, 5, 6, 7), second)
    record_answer(ledger, (1, 2), same_tokens)
    asked, again = ("asked", (1, 2), ()), ("asked", (7,), ())
    answers = [("answered", c.token_ids, c.logprobs) for c in (first, second, same_tokens)]
    unknown = ("answered", (5, 6), (-0.9, -0.9))
    rows = [[asked, answers[0], again, answers[1]], [asked, answers[2]], [asked, unknown]]
    versions = with_versions(ledger, scored(rows)).token_versions
    assert versions.tolist() == [[3, 3, 3, 3, 3, 3, 4, 4], [4] * 4 + [-1] * 4, [-1] * 8]


def test_the_oldest_answers_are_forgotten(monkeypatch):
    monkeypatch.setattr(version_ledger, "MAX_ANSWERS", 2)
    ledger = VersionLedger()
    for key in (b"a", b"b", b"c"):
        ledger.record(key, (1, (1,)))
    assert ledger.look_up([b"a", b"b", b"c"]) == [None, (1, (1,)), (1, (1,))]
