"""The ranges of numbers in a site file. A wrong number would switch a check off, or end a job that already runs."""

from collections.abc import Mapping
from typing import Any

from nemo_fp8rl.common.errors import UserError

YEAR = 366 * 24 * 3600
"""Seconds in a leap year."""
LEAST_PREFLIGHT_SECONDS = 90
"""The all-reduce takes up to 60 of these seconds."""
MOST = 100_000
"""The largest number of nodes, CPUs or attempts; no cluster has as many."""
MOST_GPUS = 1024
SIZES = {"nodes": (1, MOST), "generation_nodes": (0, MOST), "gpus_per_node": (0, MOST_GPUS)}
OF_SLURM = {
    "cpus_per_node": (1, MOST),
    "stop_seconds": (1, YEAR),
    "max_restarts": (0, MOST),
    "ready_seconds": (1, YEAR),
    "preflight_seconds": (LEAST_PREFLIGHT_SECONDS, YEAR),
    "min_free_gib": (0, 2**30),
}
OF_SLURM_GENERATION = {"gpus_per_node": (0, MOST_GPUS), "cpus_per_node": (1, MOST)}
OF_KUBERNETES = {
    "cpus": (1, MOST),
    "termination_grace_seconds": (0, YEAR),
    "backoff_limit": (0, MOST),
    "start_seconds": (1, YEAR),
    "deadline_seconds": (1, YEAR),
    "ttl_seconds": (0, YEAR),
}
LAST_ID = 2**31 - 1
"""The largest ID of a user or group, to Kubernetes."""
OF_SECURITY_CONTEXT = {"run_as_user": (0, LAST_ID), "run_as_group": (0, LAST_ID), "fs_group": (0, LAST_ID)}
OF_KUBERNETES_GENERATION = {"gpus_per_node": (0, MOST_GPUS), "cpus": (1, MOST)}


def check_limits(block: Any, limits: Mapping[str, tuple[int, int]], prefix: str = "") -> None:
    """Raise UserError, which names the key, for a number outside its range. NaN is outside of every range."""
    for key, (least, most) in limits.items():
        if (number := getattr(block, key)) is not None and not least <= number <= most:
            raise UserError(f"{prefix}{key}={_format(number)} must be at least {least} and at most {most}")


def _format(value: Any) -> str:
    """Return the value on one line. Python refuses to write an integer of more than 4300 digits."""
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of more than 60 digits"
    return repr(value)[:100]
