"""Sample answers, each token coloured by how much its probability differs between trainer and engine."""

import math
from dataclasses import dataclass

from nemo_fp8rl.commands.report.run_data import Run, Sample
from nemo_fp8rl.commands.report.scale import number

MOST_STEPS = 4
"""Recorded steps of a run that are shown: the first, the last, and between them."""
PALEST = -4.0
"""log10 of the difference of probabilities from which on a token has colour; 1 has all of it."""


@dataclass(frozen=True)
class Token:
    """side: "up" where the trainer likes it more, "down" where the engine does. depth: 0..1. title: the figures."""

    text: str
    side: str
    depth: float
    title: str


@dataclass(frozen=True)
class Answer:
    chosen: str
    prompt: str
    reward: str
    left_out: int
    tokens: list[Token]


@dataclass(frozen=True)
class AnswersOfStep:
    step: int
    answers: list[Answer]


def answers(run: Run) -> list[AnswersOfStep]:
    steps = list(run.samples)
    if len(steps) > MOST_STEPS:
        steps = [steps[round(i * (len(steps) - 1) / (MOST_STEPS - 1))] for i in range(MOST_STEPS)]
    return [AnswersOfStep(step, [_answer(sample) for sample in run.samples[step]]) for step in steps]


def _answer(sample: Sample) -> Answer:
    logprobs = zip(sample.tokens, sample.prev_logprobs, sample.generation_logprobs, strict=True)
    tokens = [_token(*token) for token in logprobs]
    left_out = sample.num_tokens - len(tokens)
    return Answer(sample.chosen, sample.prompt, number(sample.reward), left_out, tokens)


def _token(text: str, trainer: float | None, engine: float | None) -> Token:
    shown = text.replace("\n", "\u23ce\n").replace("\t", "\u21e5")
    if trainer is None or engine is None:
        return Token(shown, "lost", 1.0, "no log-prob on one of the sides")
    difference = math.exp(trainer) - math.exp(engine)
    depth = 1 - math.log10(abs(difference)) / PALEST if difference else 0.0
    side = "" if depth <= 0 else "up" if difference > 0 else "down"
    figures = f"trainer {math.exp(trainer):.5f}, engine {math.exp(engine):.5f}, difference {difference:+.2g}"
    return Token(shown, side, round(min(max(depth, 0.0), 1.0), 2), figures)
