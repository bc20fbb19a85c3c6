"""Which runs this machine cannot have, asked before the first of them: FP8 on an old GPU, a GPU's attention on a CPU.
A comparison goes on without them, and says so.
"""

from collections.abc import Sequence

from nemo_fp8rl.commands.compare.run_list import Planned
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.hf.model_config import read_hf_config

Reasons = dict[tuple[str, str | None], str]
"""(flow, length) -> what this machine lacks for these runs."""


def why_not_here(runs: Sequence[Planned]) -> Reasons:
    """Raises UserError for a flow that its model can have nowhere. A model that cannot be read is the run's to name."""
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
    """One sentence for each flow, and length, that is left out."""
    return [f"{' '.join(filter(None, (length, flow)))} is left out: {why}" for (flow, length), why in reasons.items()]
