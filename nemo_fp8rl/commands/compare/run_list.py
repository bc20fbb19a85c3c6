"""The runs of a comparison: their order, their folders and their progress.

    OUTPUT/FLOW/seed_N                    a flow
    OUTPUT/lengths/LENGTH/FLOW/seed_N     a flow on answers of one length

Each folder is an ordinary run directory. All flows of a seed come before the next seed, so that an interrupted
comparison has complete seeds, whose flows can be compared.
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
"""Keys to whose values a run adds the commit with which it started."""


@dataclass(frozen=True)
class PlannedRun:
    """A run of the comparison.

    length:  the name of a length, None for the runs of the first part
    words:   the overrides of `train`
    config:  the resolved recipe by dotted key
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
        """Return the rows of metrics.jsonl so far."""
        return read_metrics(self.folder)

    def completed_steps(self) -> int:
        return max((int(row["step"]) for row in self.rows()), default=0)

    @property
    def is_finished(self) -> bool:
        return self.completed_steps() >= self.steps


def plan(comparison: Comparison, overrides: Sequence[str], output: Path) -> list[PlannedRun]:
    """Return every run in order. Raises UserError for a wrong recipe, and if the output holds other runs or models."""
    check_overrides(comparison, overrides)
    check_models(comparison, output)
    runs = [
        _plan_run(comparison, overrides, output, flow, seed, length)
        for seed in comparison.seeds
        for flow, length in _runs_of_seed(comparison)
    ]
    for run in runs:
        _check_same(run, output)
    return runs


def _runs_of_seed(comparison: Comparison) -> list[tuple[str, str | None]]:
    """Return (flow, length) of every run of a seed."""
    first: list[tuple[str, str | None]] = [(flow, None) for flow in comparison.flows]
    lengths = comparison.lengths
    return first + [(flow, length) for length in lengths.terms for flow in lengths.flows] if lengths else first


def _plan_run(
    comparison: Comparison, overrides: Sequence[str], output: Path, flow: str, seed: int, length: str | None
) -> PlannedRun:
    folder = output / "lengths" / length if length else output
    folder = folder / flow / f"seed_{seed}"
    words = as_words(comparison.overrides)
    if length is not None and comparison.lengths:
        words += as_words(comparison.lengths.overrides)
        words += model_words(output / "models" / MODEL_OF_LENGTHS, f"{length}.jsonl")
    elif comparison.model:
        words += model_words(output / "models" / MODEL_OF_FLOWS)
    of_run = {"grpo.seed": seed, "logger.log_dir": str(folder)}
    words += [*overrides, *as_words(comparison.flows[flow]), *as_words(of_run)]
    try:
        config = flatten(json.loads(json.dumps(asdict(load(comparison.recipe, words)))))  # tuples as lists
    except UserError as error:
        of_comparison = [word for word in overrides if word.partition("=")[0] in ("seeds", "flows")]
        fix = f"; {of_comparison[0]} is no key of a run: use --seeds or --flows" if of_comparison else ""
        raise UserError(f"flow {flow}: {error}{fix}") from None
    return PlannedRun(flow, seed, length, folder, comparison.recipe, tuple(words), config)


def _check_same(run: PlannedRun, output: Path) -> None:
    """Raise UserError if the folder holds a run with another recipe. The output folder may have moved."""
    before = read_recipe(run.folder)
    if before is None:
        return
    was = Path(str(before.get("logger.log_dir", "")))
    old_output = str(Path(*was.parts[: len(was.parts) - len(run.folder.relative_to(output).parts)]))
    old, new = _relative_to(add_later_keys(before, run.config), old_output), _relative_to(run.config, str(output))
    for key in sorted(old.keys() | new.keys()):
        is_pinned = key in ON_HUB and is_commit_of(str(old.get(key)), str(new.get(key)))
        if old.get(key) != new.get(key) and not is_pinned:
            raise UserError(
                f"{run.folder} holds a run with another recipe: {key} was {old.get(key)} and is now {new.get(key)}; "
                "give another --output"
            )


def _relative_to(config: dict[str, Any], output: str) -> dict[str, Any]:
    """Return the config with paths below `output` made relative to it."""
    return {key: value.removeprefix(f"{output}/") if isinstance(value, str) else value for key, value in config.items()}
