"""Runs that this machine does not support, such as FP8 on an old GPU: found before the first run.

A comparison continues without these runs and says so.
"""

from collections.abc import Sequence

from nemo_fp8rl.commands.compare.run_list import PlannedRun
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.hf.model_config import read_hf_config

Reasons = dict[tuple[str, str | None], str]
"""(flow, length) -> the reason why this machine does not support these runs."""


def find_unsupported(runs: Sequence[PlannedRun]) -> Reasons:
    """Return the unsupported runs. Raises UserError for a flow that no machine supports with its model.

    A model that cannot be read is no reason: the run names it.
    """
    from nemo_fp8rl.generation.engine_checks import check_engine, check_machine_of_driver  # loads torch

    reasons: Reasons = {}
    for run in {(run.flow, run.length): run for run in runs}.values():
        cfg = load(run.recipe, run.words)
        try:
            hf = read_hf_config(cfg.policy.model_name)
        except UserError:
            continue
        try:
            check_engine(hf, cfg)
        except UserError as error:
            raise UserError(f"flow {run.flow}: {error}") from None
        try:
            check_machine_of_driver(hf, cfg)
        except UserError as error:
            reasons[run.flow, run.length] = str(error)
    return reasons


def sentences(reasons: Reasons) -> list[str]:
    """Return one sentence for each unsupported (flow, length)."""
    return [f"{' '.join(filter(None, (length, flow)))} is left out: {why}" for (flow, length), why in reasons.items()]
