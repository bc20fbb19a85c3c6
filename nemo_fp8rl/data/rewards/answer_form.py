"""Whether a text holds anything that its verifier could compare, apart from whether that is right."""

import re

MATH = re.compile(r"\d|\\boxed|(?<!\\)\$")
"""What math-verify reads: numbers, boxed answers, LaTeX between dollars."""


def may_lack_answer(env_name: str) -> bool:
    """Return True for a verifier that searches a text for an answer; others compare whatever they are given."""
    return env_name == "math"


def has_answer(env_name: str, completion: str) -> bool:
    return not may_lack_answer(env_name) or MATH.search(completion) is not None
