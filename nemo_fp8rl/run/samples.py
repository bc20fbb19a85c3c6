"""A few answers of a step, to be read by people: each token with the log-probs that both sides gave it."""

import math

import torch
from torch import Tensor

from nemo_fp8rl.batch import ScoredBatch
from nemo_fp8rl.data.tokenizer import PromptTokenizer
from nemo_fp8rl.rollout import Rollout
from nemo_fp8rl.run.step_log import Sample

LONGEST = 512
"""Tokens of an answer, and letters of a prompt, that are kept."""


def pick(rollout: Rollout, batch: ScoredBatch, tokenizer: PromptTokenizer) -> list[Sample]:
    """The first best and the first worst answer by reward, and the one with the token that the sides differ most on."""
    distance = (batch.prev_logprobs - batch.generation_logprobs).abs().nan_to_num(nan=math.inf)
    largest = torch.where(batch.token_mask > 0, distance, 0.0).amax(-1)
    chosen: dict[int, str] = {}
    for row, why in (
        (rollout.rewards.argmax(), "highest reward"),
        (rollout.rewards.argmin(), "lowest reward"),
        (largest.argmax(), "largest difference"),
    ):
        chosen.setdefault(int(row), why)
    return [_sample(rollout, batch, tokenizer, row, why) for row, why in chosen.items()]


def _sample(rollout: Rollout, batch: ScoredBatch, tokenizer: PromptTokenizer, row: int, why: str) -> Sample:
    prompt, completion = rollout.prompts[row], rollout.completions[row]
    start, shown = len(prompt.token_ids), completion.token_ids[:LONGEST]
    part = slice(start, start + len(shown))
    return Sample(
        chosen=why,
        prompt=prompt.text[:LONGEST],
        reward=float(rollout.rewards[row]),
        policy_version=completion.policy_version,
        num_tokens=len(completion.token_ids),
        tokens=tokenizer.pieces(shown),
        prev_logprobs=_rounded(batch.prev_logprobs[row, part]),
        generation_logprobs=_rounded(batch.generation_logprobs[row, part]),
    )


def _rounded(logprobs: Tensor) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in logprobs.tolist()]
