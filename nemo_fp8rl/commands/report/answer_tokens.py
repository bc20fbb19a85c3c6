"""Sample answers, each token coloured by how much its probability differs between trainer and engine."""

import math
from dataclasses import dataclass

from nemo_fp8rl.commands.report.charts.scale import format_number
from nemo_fp8rl.commands.report.run_data import Run, Sample

MAX_STEPS = 4
"""The page shows at most so many recorded steps of a run: the first, the last, and some between them."""
PALEST_LOG10 = -4.0
"""log10 of the difference of probabilities above which a token is coloured; a difference of 1 gets the full colour."""


@dataclass(frozen=True)
class Token:
    """A token of an answer and its colour.

    side:   "up" if the trainer finds the token likelier, "down" if the engine does, "unknown" without log-probs
    depth:  0 to 1, the depth of the colour
    title:  the figures of both sides
    """

    text: str
    side: str
    depth: float
    title: str


@dataclass(frozen=True)
class Answer:
    """A sample answer; reason: why the run recorded it."""

    reason: str
    prompt: str
    reward: str
    omitted_tokens: int
    tokens: list[Token]


@dataclass(frozen=True)
class StepAnswers:
    step: int
    answers: list[Answer]


def collect_answers(run: Run) -> list[StepAnswers]:
    """Return the sample answers of at most MAX_STEPS recorded steps."""
    steps = list(run.samples)
    if len(steps) > MAX_STEPS:
        steps = [steps[round(i * (len(steps) - 1) / (MAX_STEPS - 1))] for i in range(MAX_STEPS)]
    return [StepAnswers(step, [_make_answer(sample) for sample in run.samples[step]]) for step in steps]


def _make_answer(sample: Sample) -> Answer:
    logprobs = zip(sample.tokens, sample.prev_logprobs, sample.generation_logprobs, strict=True)
    tokens = [_make_token(*token) for token in logprobs]
    omitted_tokens = sample.num_tokens - len(tokens)
    prompt = sample.rendered_prompt or sample.prompt  # what the model saw
    return Answer(sample.chosen, prompt, format_number(sample.reward), omitted_tokens, tokens)


def _make_token(text: str, trainer: float | None, engine: float | None) -> Token:
    visible_text = text.replace("\n", "\u23ce\n").replace("\t", "\u21e5")
    if trainer is None or engine is None:
        return Token(visible_text, "unknown", 1.0, "no log-prob on one of the sides")
    difference = math.exp(trainer) - math.exp(engine)
    depth = 1 - math.log10(abs(difference)) / PALEST_LOG10 if difference else 0.0
    side = "" if depth <= 0 else "up" if difference > 0 else "down"
    figures = f"trainer {math.exp(trainer):.5f}, engine {math.exp(engine):.5f}, difference {difference:+.2g}"
    return Token(visible_text, side, round(min(max(depth, 0.0), 1.0), 2), figures)
