"""The rewards of this package that a recipe's data name, for NeMo RL's loop; read without importing NeMo RL."""

from collections.abc import Mapping
from typing import Any

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.data.rewards import load_scorer
from nemo_fp8rl.data.rewards.scoring import FunctionScorer

VERIFIER_NAMES = ("exact_match",)
"""Verifiers of this package that are environments under their own names; `math` is NeMo RL's own environment."""


def reward_names(data: Mapping[str, Any]) -> list[str]:
    """Return the names of this package's rewards, verifiers and functions, in the block `data`, each once."""
    names = [str(entry["env_name"]) for entry in dataset_blocks(data) if entry.get("env_name")]
    return list(dict.fromkeys(name for name in names if name in VERIFIER_NAMES or ":" in name))


def dataset_blocks(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the block `default`, and that of each dataset, in a list or not."""
    blocks = [data.get(name) for name in ("default", "train", "validation")]
    datasets = [entry for block in blocks for entry in (block if isinstance(block, list) else [block])]
    return [entry for entry in datasets if isinstance(entry, Mapping)]


def check_rewards(data: Mapping[str, Any]) -> None:
    """Raise UserError, with the key, for a function that cannot be called in NeMo RL's loop."""
    for name in reward_names(data):
        scorer = load_scorer(name)
        if isinstance(scorer, FunctionScorer):
            lacking = scorer.function.required_fields() - {"completion", "answer", "rendered_prompt"}
            if lacking:
                raise UserError(
                    f"data.default.env_name={name} has the parameter {sorted(lacking)[0]}, and NeMo RL's loop hands on "
                    "completion, answer and rendered_prompt alone; use `nemo-fp8rl train`, or give it a default"
                )
