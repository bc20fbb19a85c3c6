"""Rules of grpo.hints: shares grow from stage to stage, and a template has one place for each of its two parts."""

from itertools import pairwise

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.grpo_schema import HintsConfig

PLACES = "{prompt}", "{hint}"


def check_hints(hints: HintsConfig) -> None:
    """Raise UserError for shares that are no growing parts of a solution, and for a template without its places."""
    bounds = (0.0, *hints.shares, 1.0)
    grow = all(first < second for first, second in pairwise(bounds))
    if not (hints.shares and grow):
        raise UserError(
            f"grpo.hints.shares={list(hints.shares)} must grow strictly and lie between 0 and 1, as [0.25, 0.5, 0.75] "
            "do; at 1 the hint would be the whole solution"
        )
    if missing := [place for place in PLACES if hints.template.count(place) != 1]:
        raise UserError(
            f"grpo.hints.template={hints.template!r} must have {' and '.join(PLACES)} once each, and has not so "
            f"{missing[0]}: write the question with its hint, as {{prompt}} {{hint}}"
        )
