"""Sentences about the spikes of the loss and of the gradient's norm: by flow, with an interval over its runs."""

from collections.abc import Sequence

from nemo_fp8rl.commands.compare.statistics import interval
from nemo_fp8rl.commands.report.run_data import Run
from nemo_fp8rl.run.spikes import DEFINITION, METRICS, Spikes, spikes_of_run

KEYS_OF_A_RUN = ("grpo.seed", "logger.log_dir", "checkpointing.checkpoint_dir")
"""Keys in which runs of one flow may differ."""


def describe_spikes(runs: Sequence[Run]) -> list[str]:
    """Return DEFINITION and a sentence for each group of runs with the same recipe but for KEYS_OF_A_RUN.

    The result is empty if no run has steps enough to judge one.
    """
    groups: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in runs:
        recipe = tuple((key, str(value)) for key, value in run.config.items() if key not in KEYS_OF_A_RUN)
        groups.setdefault(recipe, []).append(run)
    flows = [_flow_of(members[0]) for members in groups.values()]
    sentences = []
    for members, flow in zip(groups.values(), flows, strict=True):
        name = flow if flows.count(flow) == 1 else f"{flow} ({', '.join(run.name for run in members)})"
        found = {metric: _spikes(members, metric) for metric in METRICS.values()}
        known = {metric: of_runs for metric, of_runs in found.items() if of_runs}
        if known:
            counts = " and ".join(f"{_format_count(of_runs)} of {metric}" for metric, of_runs in known.items())
            longest = max(spikes.longest for of_runs in known.values() for spikes in of_runs)
            lasting = f", the longest of {longest} step{'s' if longest > 1 else ''}" if longest else ""
            number = len(next(iter(known.values())))
            over = f" a run, mean and 95 % interval of {number} runs" if number > 1 else ""
            sentences.append(f"{name}: spikes{over}: {counts}{lasting}.")
    return [DEFINITION, *sentences] if sentences else []


def _flow_of(run: Run) -> str:
    return str(run.config.get("nemo_fp8rl.flow", run.name))


def _spikes(runs: Sequence[Run], metric: str) -> list[Spikes]:
    return [spikes for run in runs if (spikes := spikes_of_run(run.metrics, metric)) is not None]


def _format_count(spikes: Sequence[Spikes]) -> str:
    found = interval([float(of_run.count) for of_run in spikes])
    assert found is not None
    return f"{found.mean:.0f}" if found.half is None else f"{found.mean:.1f} ± {found.half:.1f}"
