"""Verifiers: functions of (completion text, expected answer) to a reward in 0..1, chosen by `data.default.env_name`."""

import re
from collections.abc import Callable
from importlib.util import find_spec

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.data.rewards import math_process
from nemo_fp8rl.data.rewards.final_answer import (
    after_thinking,
    choice_of,
    final_part,
    final_words,
    is_words,
    marked_result,
    plain_words,
)

Verifier = Callable[[str, str], float]
DELIMITED = re.compile(r"(?<!\\)\$|\\boxed")  # an escaped dollar is a currency


def exact_match(completion: str, answer: str) -> float:
    """Return 1 when the text equals the answer, apart from surrounding white space and a closed think block."""
    if completion.strip() == answer.strip():
        return 1.0
    return float(after_thinking(completion).strip() == after_thinking(answer).strip() != "")


def math(completion: str, answer: str) -> float:
    """Return 1 when the final answer has the same mathematical value, by math-verify, or is the same words.

    The final answer is the last boxed value, or what follows GSM8K's ####, else what math-verify finds
    (`final_answer`). An answer without math delimiters is read as LaTeX, as in NeMo RL. A comparison that is not
    finished in time (of a sampled tower of exponents, for example) scores 0; `math_process` has the limits, and logs
    when its process hangs.
    """
    answer = after_thinking(answer)
    answer = marked_result(answer) or answer
    expected, words = plain_words(answer), final_words(completion)
    if expected and expected in (words, choice_of(words) if len(expected) == 1 else words):
        return 1.0
    if is_words(expected) and is_words(words):  # math-verify reads words as products of letters, in any order
        return 0.0
    gold = answer if DELIMITED.search(answer) else f"\\boxed{{{answer}}}"
    return float(math_process.is_equal(gold, final_part(completion)))


def hf_math_verify(completion: str, answer: str) -> float:
    """Return the reward of NeMo RL's environment `math`: math-verify on the whole completion, the answer in a box."""
    return float(math_process.is_equal(f"\\boxed{{{answer}}}", completion, as_nemo_rl=True))


VERIFIERS: dict[str, Verifier] = {"exact_match": exact_match, "math": math, "hf_math_verify": hf_math_verify}
USES_MATH_VERIFY = ("math", "hf_math_verify")


def check_verifier(name: str) -> None:
    """Raise UserError for an unknown name, or when the verifier's package is not installed."""
    if name not in VERIFIERS:
        raise UserError(
            f"data.default.env_name={name!r} is no verifier; choose one of {', '.join(VERIFIERS)}, or name a function "
            "of your own as package.module:function"
        )
    if name in USES_MATH_VERIFY and find_spec("math_verify") is None:
        raise UserError(f"data.default.env_name={name} needs math-verify: pip install math-verify")
