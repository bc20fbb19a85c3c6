"""A verifier takes (completion text, expected answer), returns a reward in 0..1. `data.default.env_name` picks one."""

from collections.abc import Callable

Verifier = Callable[[str, str], float]


def exact_match(completion: str, answer: str) -> float:
    """1 when the text is the answer, apart from surrounding white space."""
    return float(completion.strip() == answer.strip())


def math(completion: str, answer: str) -> float:
    """1 when both hold the same mathematical value, by math-verify: LaTeX, fractions, sets, boxed answers."""
    from math_verify import parse, verify  # sympy is slow to import

    # Without its own SIGALRM timeouts: they work in the main thread only, and a Ray actor is not one.
    gold = parse(answer, parsing_timeout=None)
    return float(verify(gold, parse(completion, parsing_timeout=None), timeout_seconds=None))


VERIFIERS: dict[str, Verifier] = {"exact_match": exact_match, "math": math}
