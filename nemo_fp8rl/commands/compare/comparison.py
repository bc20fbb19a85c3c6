"""The typed blocks of a comparison file, as config/recipes/compare/tiny.yaml.

Overrides have the form `dotted.key: value`. The recipes of the runs check their keys and types. A later override wins:
the recipe, `overrides`, `lengths.overrides`, the command line, the flow's overrides.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.recipe_names import check_command, find_recipe, shipped_recipe
from nemo_fp8rl.config.typed_tree import check_keys, to_block
from nemo_fp8rl.config.yaml_tree import quote, read_with_parents, register_resolvers, yaml_errors_as_user_error

KEYS_OF_COMPARISON = ("grpo.seed", "logger.log_dir")
"""Keys that the comparison sets for each run."""
RESERVED_NAMES = ("models", "lengths", "results.json", "results.md")
"""Names in the output folder that no flow may use."""


@dataclass(frozen=True)
class TinyModel:
    """A model of `nemo-fp8rl make-tiny`, warmed up, from which every run of a part begins."""

    warm_up: str
    """The recipe of the warm-up, relative to the comparison's file."""
    task: str = "add"
    family: str = "qwen3"
    seed: int = 0
    """Seed of the weights, the data and the warm-up's order; the runs' seeds do not change it."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Overrides of the warm-up's recipe."""


@dataclass(frozen=True)
class Lengths:
    """The second part: one model, warmed up on running sums of all lengths, and runs on sums of one length each."""

    terms: dict[str, int]
    """Name of a length -> number of digits to add. The first length is the reference."""
    flows: tuple[str, ...]
    """Names of the comparison's flows that this part runs."""
    warm_up: str
    family: str = "qwen3"
    seed: int = 0
    warm_up_overrides: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    """Overrides of every run of this part, after those of the comparison."""


@dataclass(frozen=True)
class Seconds:
    """Figures for the estimate of time before this machine has taken a step."""

    start: float = 30.0
    """Seconds of a run without its steps: imports, model, validations, checkpoints."""
    step: float | None = None


@dataclass(frozen=True)
class Comparison:
    """A whole comparison."""

    recipe: str
    """The recipe of every run: relative to the comparison's file, or the name of a shipped one."""
    seeds: tuple[int, ...]
    """grpo.seed of the runs: order of prompts and sampling. data.train.seed chooses the held-out prompts."""
    flows: dict[str, dict[str, Any]]
    """Name of a flow -> its overrides."""
    reference: str
    """The reference flow: every other flow is compared with it, seed by seed."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Overrides of every run."""
    model: TinyModel | None = None
    """null: policy.model_name and data.train.data_path of the recipe."""
    lengths: Lengths | None = None
    seconds: Seconds = field(default_factory=Seconds)


def load_comparison(path: Path) -> Comparison:
    """Read a comparison. Raises UserError for a wrong file; `plan` reads and checks the recipes."""
    from omegaconf import OmegaConf

    register_resolvers()
    path = find_recipe(path, "compare")
    tree = read_with_parents(path)
    with yaml_errors_as_user_error(str(path)):
        tree_values: Any = OmegaConf.to_container(tree)
        check_command(path, tree_values, "compare")
        check_keys(tree_values, Comparison)
        values = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    comparison = to_block(values, Comparison)
    _check(comparison)
    return _with_paths(comparison, path.parent)


def _check(comparison: Comparison) -> None:
    flows, lengths = comparison.flows, comparison.lengths
    if not comparison.seeds or len(set(comparison.seeds)) < len(comparison.seeds):
        raise UserError(f"seeds={list(comparison.seeds)}: give at least one, each once")
    if comparison.reference not in flows:
        raise UserError(f"reference={comparison.reference} is none of the flows {', '.join(flows)}")
    for name in (*flows, *(lengths.terms if lengths else ())):
        if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name) or name in RESERVED_NAMES:
            raise UserError(f"{name!r} cannot be a folder of runs: take letters, digits, _ . + -, not {RESERVED_NAMES}")
    if lengths:
        if "data" in lengths.terms:
            raise UserError("lengths.terms: data is the mix of all lengths; give that one another name")
        if unknown := [flow for flow in lengths.flows if flow not in flows]:
            raise UserError(f"lengths.flows: {unknown[0]} is none of the flows {', '.join(flows)}")
        if not lengths.flows or not lengths.terms or min(lengths.terms.values()) < 2:
            raise UserError("lengths: name at least one flow, and lengths of at least 2 terms")
    blocks: dict[str, Mapping[str, Any]] = {"overrides": comparison.overrides}
    blocks |= {f"flows.{name}": overrides for name, overrides in flows.items()}
    blocks |= {"lengths.overrides": lengths.overrides} if lengths else {}
    for where, overrides in blocks.items():
        if reserved := [key for key in overrides if key in KEYS_OF_COMPARISON]:
            raise UserError(f"{where}: {reserved[0]} is set for each run by the comparison; leave it out")


def _with_paths(comparison: Comparison, folder: Path) -> Comparison:
    """Return the comparison with recipes as paths from the working directory."""

    def find(name: str) -> str:
        path = folder / name
        return str(path if path.exists() else shipped_recipe(name) or path)

    changes: dict[str, Any] = {"recipe": find(comparison.recipe)}
    for part in ("model", "lengths"):
        if block := getattr(comparison, part):
            changes[part] = dataclasses.replace(block, warm_up=find(block.warm_up))
    return dataclasses.replace(comparison, **changes)


def as_words(overrides: Mapping[str, Any]) -> list[str]:
    """Return overrides as key=value words of the command line."""
    return [f"{key}={_quote_value(value)}" for key, value in overrides.items()]


def _quote_value(value: Any) -> str:
    """Return a text that YAML and then OmegaConf read back: `\\${` is `${`, and a backslash before it counts double."""
    return re.sub(r"((?:\\\\)*)\$\{", r"\1\1\\\\${", quote(value))


def check_overrides(comparison: Comparison, overrides: Sequence[str]) -> None:
    """Raise UserError for an override that would change the meaning of a flow or the folder of a run."""
    for word in overrides:
        key = word.partition("=")[0].lstrip("+")
        if key in KEYS_OF_COMPARISON:
            raise UserError(f"{word}: {key} is set for each run by the comparison; see seeds and --output")
        for name, of_flow in comparison.flows.items():
            if any(key == k or k.startswith(f"{key}.") or key.startswith(f"{k}.") for k in of_flow):
                raise UserError(f"{word}: {key} is what makes the flow {name}; change it in the comparison's file")
