"""A few answers of a step for people to read: each token with the log-probs of both sides."""

import math

import torch
from torch import Tensor

from nemo_fp8rl.batch import ScoredBatch
from nemo_fp8rl.data.tokenizer import PromptTokenizer
from nemo_fp8rl.rollout.collect import Rollout
from nemo_fp8rl.run.step_log import Sample

MAX_LENGTH = 512
"""Tokens of an answer, and characters of a prompt, that are recorded."""


def pick_samples(rollout: Rollout, batch: ScoredBatch, tokenizer: PromptTokenizer) -> list[Sample]:
    """Return the first answers with the highest and the lowest reward, and the answer with the largest mismatch."""
    distance = (batch.prev_logprobs - batch.generation_logprobs).abs().nan_to_num(nan=math.inf)
    largest = torch.where(batch.token_mask > 0, distance, 0.0).amax(-1)
    chosen: dict[int, str] = {}
    for row, reason in (
        (rollout.rewards.argmax(), "highest reward"),
        (rollout.rewards.argmin(), "lowest reward"),
        (largest.argmax(), "largest difference"),
    ):
        chosen.setdefault(int(row), reason)
    return [_sample(rollout, batch, tokenizer, row, reason) for row, reason in chosen.items()]


def _sample(rollout: Rollout, batch: ScoredBatch, tokenizer: PromptTokenizer, row: int, reason: str) -> Sample:
    prompt, completion = rollout.prompts[row], rollout.completions[row]
    start, token_ids = len(prompt.token_ids), completion.token_ids[:MAX_LENGTH]
    part = slice(start, start + len(token_ids))
    return Sample(
        chosen=reason,
        prompt=prompt.text[:MAX_LENGTH],
        rendered_prompt=shorten_prompt(prompt.rendered),
        reward=float(rollout.rewards[row]),
        policy_version=completion.policy_version,
        num_tokens=len(completion.token_ids),
        tokens=tokenizer.decode_each(token_ids),
        prev_logprobs=_round_logprobs(batch.prev_logprobs[row, part]),
        generation_logprobs=_round_logprobs(batch.generation_logprobs[row, part]),
        hint_stage=prompt.hint_stage,
    )


def shorten_prompt(text: str) -> str:
    """Return the beginning and the end of a long prompt: the end shows how the template opens the answer."""
    half = MAX_LENGTH // 2
    return text if len(text) <= MAX_LENGTH else f"{text[:half]} ... {text[-half:]}"


def _round_logprobs(logprobs: Tensor) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in logprobs.tolist()]
