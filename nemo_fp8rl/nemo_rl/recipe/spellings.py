"""Values that NeMo RL takes for another value of the same key: recipes use both, and the package's code reads one."""

from collections.abc import Mapping
from typing import Any

from nemo_fp8rl.nemo_rl.recipe.keys import at

TOP_K_KEYS = ("policy.generation.top_k", "policy.generation.val_top_k")
"""-1 stands for all tokens, as in vLLM."""


def normalize(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's values with the spellings that the package reads."""
    changed = dict(values)
    for key in TOP_K_KEYS:
        if at(values, key, None) == -1:
            changed = replace(changed, key, None)
    period = at(values, "grpo.val_period", None)
    if isinstance(period, int) and period < 0:  # NeMo RL validates where it is above 0
        changed = replace(changed, "grpo.val_period", 0)
    return changed


def replace(values: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a copy of the tree with this value at a dotted key; blocks on the way to it are copied, too."""
    name, _, rest = key.partition(".")
    return {**values, name: replace(values[name], rest, value) if rest else value}
