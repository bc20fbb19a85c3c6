"""Scorers: what turns the answers of a rollout into rewards, for this package's loop and for NeMo RL's.

`load_scorer` makes one of `data.default.env_name`: a verifier of this package, or a function of the user.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

from nemo_fp8rl.data.rewards.math_process import MAX_PROCESSES
from nemo_fp8rl.data.rewards.reward_function import RewardFunction, is_function_name
from nemo_fp8rl.data.rewards.verifiers import VERIFIERS, check_verifier


@dataclass(frozen=True)
class Answered:
    """A completion with what its prompt's line says.

    answers:  accepted answers as text, for verifiers
    fields:   the fields of the line, and `prompt`, `answer` and `rendered_prompt`, for a function of the user
    place:    the sample's name in messages
    """

    completion: str
    answers: tuple[str, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)
    place: str = ""


class Scorer(Protocol):
    def check_fields(self, samples: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Raise UserError, with the place, for a sample, given as (place, fields), that lacks what a reward reads."""

    def score(self, samples: Sequence[Answered]) -> list[float]:
        """Return a finite reward of each sample. Raises UserError, with the place, where there is none."""


@cache
def load_scorer(name: str) -> Scorer:
    """Return the scorer of this name.

    name:    of a verifier, or package.module:function
    Raises:  UserError for a name that is neither, and for a function that cannot be imported or called
    """
    if is_function_name(name):
        return FunctionScorer(RewardFunction(name))
    check_verifier(name)
    return VerifierScorer(name)


class VerifierScorer:
    """A verifier of this package: the best reward over the accepted answers; equal questions are asked once."""

    def __init__(self, name: str) -> None:
        self.verify = VERIFIERS[name]

    def check_fields(self, samples: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Do nothing: records without an answer are refused when they are read."""

    def score(self, samples: Sequence[Answered]) -> list[float]:
        pairs = [(sample.completion, answer) for sample in samples for answer in sample.answers]
        unique_pairs = list(dict.fromkeys(pairs))
        with ThreadPoolExecutor(MAX_PROCESSES, "verify") as pool:
            results = pool.map(lambda pair: self.verify(*pair), unique_pairs)
            rewards = dict(zip(unique_pairs, results, strict=True))
        return [max(rewards[sample.completion, answer] for answer in sample.answers) for sample in samples]


class FunctionScorer:
    """A function of the user, called once for each sample in turn, or once for all."""

    def __init__(self, function: RewardFunction) -> None:
        self.function = function

    def check_fields(self, samples: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        self.function.check_fields(samples)

    def score(self, samples: Sequence[Answered]) -> list[float]:
        rows = [({**sample.fields, "completion": sample.completion}, sample.place) for sample in samples]
        return self.function.call_for_batch(rows) if self.function.takes_batch else self.function.call_for_each(rows)
