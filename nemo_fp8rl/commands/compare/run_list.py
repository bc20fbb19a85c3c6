"""The runs of a comparison: which there are, in which order, and how far each has come.

    OUTPUT/FLOW/seed_N                    a flow
    OUTPUT/lengths/LENGTH/FLOW/seed_N     a flow on answers of one length

Each is an ordinary run directory. All flows of a seed come before the next seed, so that an interrupted comparison has
whole seeds, whose flows can be compared.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_fp8rl.commands.compare.comparison import Comparison, as_words, check_overrides
from nemo_fp8rl.commands.compare.run_files import read_metrics, read_recipe
from nemo_fp8rl.commands.compare.start_models import MODEL_OF_FLOWS, MODEL_OF_LENGTHS, check_models, model_words
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.config.yaml_tree import flatten
from nemo_fp8rl.hf.hub import is_commit_of
from nemo_fp8rl.run.resume import add_later_keys
from nemo_fp8rl.run.step_log import Row

ON_HUB = ("policy.model_name", "policy.tokenizer.name")
"""Keys that a run has with the commit that it began with."""


@dataclass(frozen=True)
class Planned:
    """length: name of one, None for the runs of the first part. words: what `train` is told after the recipe. config:
    the resolved recipe, flat.
    """

    flow: str
    seed: int
    length: str | None
    folder: Path
    recipe: str
    words: tuple[str, ...]
    config: dict[str, Any]

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.length, self.flow, f"seed {self.seed}")))

    @property
    def steps(self) -> int:
        return int(self.config["grpo.max_num_steps"])

    def rows(self) -> list[Row]:
        """The rows of its metrics.jsonl so far."""
        return read_metrics(self.folder)

    def done(self) -> int:
        return max((int(row["step"]) for row in self.rows()), default=0)

    @property
    def finished(self) -> bool:
        return self.done() >= self.steps


def plan(comparison: Comparison, overrides: Sequence[str], output: Path) -> list[Planned]:
    """Every run, in order. Raises UserError for a wrong recipe, and where the output holds other runs or models."""
    check_overrides(comparison, overrides)
    check_models(comparison, output)
    runs = [
        _planned(comparison, overrides, output, flow, seed, length)
        for seed in comparison.seeds
        for flow, length in _of_a_seed(comparison)
    ]
    for run in runs:
        _check_same(run, output)
    return runs


def _of_a_seed(comparison: Comparison) -> list[tuple[str, str | None]]:
    """(flow, length)."""
    first: list[tuple[str, str | None]] = [(flow, None) for flow in comparison.flows]
    lengths = comparison.lengths
    return first + [(flow, length) for length in lengths.terms for flow in lengths.flows] if lengths else first


def _planned(
    comparison: Comparison, overrides: Sequence[str], output: Path, flow: str, seed: int, length: str | None
) -> Planned:
    folder = output / "lengths" / length if length else output
    folder = folder / flow / f"seed_{seed}"
    words = as_words(comparison.overrides)
    if length is not None and comparison.lengths:
        words += as_words(comparison.lengths.overrides)
        words += model_words(output / "models" / MODEL_OF_LENGTHS, f"{length}.jsonl")
    elif comparison.model:
        words += model_words(output / "models" / MODEL_OF_FLOWS)
    own = {"grpo.seed": seed, "logger.log_dir": str(folder)}
    words += [*overrides, *as_words(comparison.flows[flow]), *as_words(own)]
    try:
        config = flatten(json.loads(json.dumps(asdict(load(comparison.recipe, words)))))  # tuples as lists
    except UserError as error:
        raise UserError(f"flow {flow}: {error}") from None
    return Planned(flow, seed, length, folder, comparison.recipe, tuple(words), config)


def _check_same(run: Planned, output: Path) -> None:
    """What is in its folder, finished or begun, must be a run of the same recipe. The output may have moved."""
    before = read_recipe(run.folder)
    if before is None:
        return
    was = Path(str(before.get("logger.log_dir", "")))
    old_output = str(Path(*was.parts[: len(was.parts) - len(run.folder.relative_to(output).parts)]))
    old, new = _without(add_later_keys(before, run.config), old_output), _without(run.config, str(output))
    for key in sorted(old.keys() | new.keys()):
        is_pinned = key in ON_HUB and is_commit_of(str(old.get(key)), str(new.get(key)))
        if old.get(key) != new.get(key) and not is_pinned:
            raise UserError(
                f"{run.folder} holds a run with another recipe: {key} was {old.get(key)} and is now {new.get(key)}; "
                "give another --output"
            )


def _without(config: dict[str, Any], output: str) -> dict[str, Any]:
    """The same with paths below the output as seen from there."""
    return {key: value.removeprefix(f"{output}/") if isinstance(value, str) else value for key, value in config.items()}
