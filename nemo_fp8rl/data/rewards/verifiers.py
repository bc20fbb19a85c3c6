"""A verifier takes (completion text, expected answer), returns a reward in 0..1. `data.default.env_name` picks one."""

import re
from collections.abc import Callable
from importlib.util import find_spec

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.data.rewards import math_process

Verifier = Callable[[str, str], float]
DELIMITED = re.compile(r"(?<!\\)\$|\\boxed")  # an escaped dollar is a sum of money


def exact_match(completion: str, answer: str) -> float:
    """1 when the text is the answer, apart from surrounding white space."""
    return float(completion.strip() == answer.strip())


def math(completion: str, answer: str) -> float:
    """1 when both hold the same mathematical value, by math-verify: LaTeX, fractions, sets, boxed answers.

    An answer without math delimiters is taken as LaTeX, as NeMo RL takes it. What cannot be decided in
    time (a sampled tower of exponents, say) scores 0; `math_process` has the limits, and logs it when its child hangs.
    """
    gold = answer if DELIMITED.search(answer) else f"\\boxed{{{answer}}}"
    return float(math_process.agree(gold, completion))


VERIFIERS: dict[str, Verifier] = {"exact_match": exact_match, "math": math}


def check_verifier(name: str) -> None:
    """Raise UserError where there is none of this name, or what it needs is not installed."""
    if name not in VERIFIERS:
        raise UserError(f"data.default.env_name={name!r} is no verifier; choose one of {', '.join(VERIFIERS)}")
    if name == "math" and find_spec("math_verify") is None:
        raise UserError("data.default.env_name=math needs math-verify: pip install math-verify")
