"""The runs in the folders that `report` gets, and their names."""

from collections.abc import Sequence
from pathlib import Path

from nemo_fp8rl.commands.report.nemo_rl_log import find_batches, find_events, find_experiments, has_log
from nemo_fp8rl.commands.report.nemo_rl_log import read_nemo_rl_log as read_log
from nemo_fp8rl.commands.report.run_data import Run, is_run, read_run
from nemo_fp8rl.common.errors import UserError


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Return the runs in these folders; of NeMo RL's log_dir those of all its starts.

    Raises: UserError if a folder is no run or is given twice, or if a file cannot be read
    """
    resolved = [_resolve(folder) for folder in folders]
    for i, folder in enumerate(resolved):
        if folder in resolved[:i]:
            raise UserError(f"{folders[i]} is given twice; give each run once")
    expanded = list(dict.fromkeys(path for folder in folders for path in _expand(folder)))
    names = _choose_names([_resolve(path) for path in expanded])
    return [
        read_run(folder, name) if is_run(folder) else read_log(folder, name)
        for folder, name in zip(expanded, names, strict=True)
    ]


def _expand(folder: Path) -> list[Path]:
    """Return the folder, or the experiments of NeMo RL in it; those without any metric only if all are."""
    if not folder.is_dir():
        raise UserError(f"{folder} is {'no folder' if folder.exists() else 'not there'}; give a run directory")
    if is_run(folder) or has_log(folder):
        return [folder]
    experiments = [path for path in find_experiments(folder) if has_log(path)]
    if not experiments:
        raise UserError(
            f"{folder} holds no run: neither config.yaml nor metrics.jsonl is in it, nor what NeMo RL logs; give "
            "logger.log_dir"
        )
    return [path for path in experiments if find_events(path) or find_batches(path)] or experiments[-1:]


def _resolve(folder: Path) -> Path:
    try:
        return folder.resolve()
    except RuntimeError:  # Python 3.12 and older raise it
        raise UserError(f"{folder} is a link that leads to itself; give a run directory") from None


def _choose_names(folders: Sequence[Path]) -> list[str]:
    """Return the last parts of each path, as many as the names need to differ."""
    for length in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-length:]) for folder in folders]
        if len(set(names)) == len(names):
            break
    return names
