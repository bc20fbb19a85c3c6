"""Checks that compared runs had the same prompts and model, because a path does not identify its content, and a name on
the hub does not identify a commit.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_fp8rl.commands.compare.run_files import read_recipe
from nemo_fp8rl.commands.compare.run_list import ON_HUB, PlannedRun
from nemo_fp8rl.common.errors import UserError

INPUT_KEYS = (
    "data.",
    "grpo.max_val_samples",
    "policy.generation.max_new_tokens",
    "policy.generation.vllm_cfg.max_model_len",
    "policy.max_total_sequence_length",
    "policy.model_name",
    "policy.tokenizer.",
)
"""Keys that determine prompts, tokens and model: runs with equal values must have had equal inputs."""
NAMES = {"training": "training prompts", "validation": "held-out prompts", "tokens": "tokens of the prompts"}


def check_same_inputs(runs: Sequence[PlannedRun], environments: Sequence[Mapping[str, Any]]) -> None:
    """Raise UserError for the first run that had other inputs by the same recipe.

    environments: the content of environment.json of each run
    """
    firsts: dict[str, tuple[PlannedRun, dict[str, Any]]] = {}
    for run, environment in zip(runs, environments, strict=True):
        alike = str(sorted((key, str(value)) for key, value in run.config.items() if key.startswith(INPUT_KEYS)))
        data, recipe = environment.get("data"), read_recipe(run.folder) or {}
        had = (data if isinstance(data, dict) else {}) | {key: recipe.get(key) for key in ON_HUB if recipe.get(key)}
        first, has = firsts.setdefault(alike, (run, had))
        for what in (what for what in had if what in has):
            pinned = what in ON_HUB and "@" in str(had[what])  # a path may have moved
            if had[what] != has[what] and (pinned or what not in ON_HUB):
                raise UserError(
                    f"{run.folder} had other {NAMES.get(what, what)} than {first.folder}, by the same recipe: what it "
                    "names has changed; remove the older of the two, and the same command runs it anew"
                )
