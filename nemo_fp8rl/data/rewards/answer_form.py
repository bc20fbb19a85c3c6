"""Recognizes texts that hold anything a verifier could compare, right or wrong."""

import re
from collections.abc import Iterable

from nemo_fp8rl.data.rewards.final_answer import ANSWER_WORD, after_thinking, is_words, plain_words
from nemo_fp8rl.data.rewards.verifiers import USES_MATH_VERIFY

MATH = re.compile(r"\d|\\boxed|(?<!\\)\$")
"""The forms that math-verify reads: numbers, boxed answers, LaTeX between dollars."""


def may_lack_answer(env_name: str) -> bool:
    """Return True for a verifier that searches a text for an answer; others compare whatever they are given."""
    return env_name in USES_MATH_VERIFY


def has_answer(completion: str, accepted: Iterable[str]) -> bool:
    """Return whether such a verifier finds anything to compare with these answers; words are compared as they are."""
    text = after_thinking(completion)
    if any(is_words(plain_words(answer)) for answer in accepted):
        return bool(text.strip())
    return bool(MATH.search(text) or ANSWER_WORD.search(text))
