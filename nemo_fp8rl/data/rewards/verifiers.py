"""Verifiers: functions of (completion text, expected answer) to a reward in 0..1, chosen by `data.default.env_name`."""

import re
from collections.abc import Callable
from importlib.util import find_spec

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.data.rewards import math_process

Verifier = Callable[[str, str], float]
DELIMITED = re.compile(r"(?<!\\)\$|\\boxed")  # an escaped dollar is a currency


def exact_match(completion: str, answer: str) -> float:
    """Return 1 when the text equals the answer, apart from surrounding white space."""
    return float(completion.strip() == answer.strip())


def math(completion: str, answer: str) -> float:
    """Return 1 when both texts have the same mathematical value, by math-verify: LaTeX, fractions, sets, boxed answers.

    An answer without math delimiters is read as LaTeX, as in NeMo RL. A comparison that is not finished in time (of a
    sampled tower of exponents, for example) scores 0; `math_process` has the limits, and logs when its process hangs.
    """
    gold = answer if DELIMITED.search(answer) else f"\\boxed{{{answer}}}"
    return float(math_process.is_equal(gold, completion))


VERIFIERS: dict[str, Verifier] = {"exact_match": exact_match, "math": math}


def check_verifier(name: str) -> None:
    """Raise UserError for an unknown name, or when the verifier's package is not installed."""
    if name not in VERIFIERS:
        raise UserError(f"data.default.env_name={name!r} is no verifier; choose one of {', '.join(VERIFIERS)}")
    if name == "math" and find_spec("math_verify") is None:
        raise UserError("data.default.env_name=math needs math-verify: pip install math-verify")
