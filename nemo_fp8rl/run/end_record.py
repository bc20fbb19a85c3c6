"""ended.json in a run directory: why a run ended before its last step. A killed run leaves none."""

import json
from contextlib import suppress
from pathlib import Path

from nemo_fp8rl.common.atomic_files import write_atomically
from nemo_fp8rl.common.errors import UserError, single_line

NAME = "ended.json"
MAX_LENGTH = 1000


def record_end(folder: Path, error: BaseException) -> None:
    """Write the reason. Nothing is written for an interrupt, nor where the disk refuses it."""
    if not isinstance(error, Exception):
        return
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    with suppress(OSError):
        write_atomically(folder / NAME, json.dumps({"reason": (kind + single_line(error))[:MAX_LENGTH]}) + "\n")


def forget_end(folder: Path) -> None:
    (folder / NAME).unlink(missing_ok=True)


def read_end(folder: Path) -> str:
    """Return the reason, "" without one."""
    try:
        record = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return ""
    reason = record.get("reason") if isinstance(record, dict) else None
    return reason if isinstance(reason, str) else ""
