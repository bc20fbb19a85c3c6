"""The choice of a comparison's runs, and an estimate of their time."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from nemo_fp8rl.commands.compare.comparison import Comparison
from nemo_fp8rl.commands.compare.run_list import PlannedRun
from nemo_fp8rl.common.errors import UserError


@dataclass(frozen=True)
class Choice:
    """The flows, seeds and part whose runs are chosen; None chooses all.

    part: "flows" (the first part) or "lengths" (the second)
    """

    flows: tuple[str, ...] | None = None
    seeds: tuple[int, ...] | None = None
    part: str | None = None

    def of(self, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
        """Return the chosen runs. Raises UserError for an unknown flow or seed, and if no run is left."""
        for option, values, known in (
            ("--flows", self.flows, {run.flow for run in runs}),
            ("--seeds", self.seeds, {run.seed for run in runs}),
        ):
            for value in values or ():
                if value not in known:
                    near = difflib.get_close_matches(str(value), sorted(map(str, known)), n=1)
                    hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(map(str, known)))}"
                    raise UserError(f"{option} {value}: the comparison has no such value; {hint}")
        chosen = [
            run
            for run in runs
            if (self.flows is None or run.flow in self.flows)
            and (self.seeds is None or run.seed in self.seeds)
            and (self.part is None or self.part == ("flows" if run.length is None else "lengths"))
        ]
        if not chosen:
            raise UserError("--flows, --seeds and --part leave no run of the comparison; choose fewer of them")
        return chosen


def describe_plan(comparison: Comparison, runs: Sequence[PlannedRun], chosen: Sequence[PlannedRun]) -> list[str]:
    """Return lines for the chosen runs: their folders, their steps, the time of those that have not finished."""
    lines = [f"{run.folder}  {run.completed_steps()} of {run.steps} steps" for run in chosen]
    todo = [run for run in chosen if not run.is_finished]
    lines.append(f"{len(chosen) - len(todo)} of {len(chosen)} runs have finished, {len(todo)} to go")
    return [*lines, describe_time(comparison, runs, todo)] if todo else lines


def describe_time(comparison: Comparison, runs: Sequence[PlannedRun], todo: Sequence[PlannedRun]) -> str:
    """Return a sentence about the time of the runs that are to go.

    It follows the steps that this machine has taken in the same flow and part, else in any; before there are any, the
    comparison's own figure.
    """
    measured = {(run.flow, run.length): times for run in runs if (times := _step_seconds(run))}
    everything = [seconds for times in measured.values() for seconds in times]
    steps = {run.folder: run.steps - run.completed_steps() for run in todo}
    if everything:
        seconds = sum(
            comparison.seconds.start + steps[run.folder] * fmean(measured.get((run.flow, run.length), everything))
            for run in todo
        )
        source = "by the steps that were taken here"
    elif comparison.seconds.step:
        seconds = sum(comparison.seconds.start + comparison.seconds.step * steps[run.folder] for run in todo)
        source = "on the machine of the file's figures; the first run says more"
    else:
        return f"{sum(steps.values())} steps to go; the first run will tell for how long"
    minutes = max(1, round(seconds / 60))
    return f"about {f'{minutes // 60} h {minutes % 60} min' if minutes > 90 else f'{minutes} min'} to go, {source}"


def _step_seconds(run: PlannedRun) -> list[float]:
    """Return the seconds of every step that the run has taken."""
    return [row["timing/total_step_time"] for row in run.rows() if "timing/total_step_time" in row]
