"""A file of one JSON object a step, appended and flushed, so that it survives a kill; a resumed run cuts it back."""

import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_fp8rl.common.atomic_files import write_atomically
from nemo_fp8rl.common.errors import UserError, one_line

Row = dict[str, Any]
"""`step`, and what else belongs to it."""


@dataclass(frozen=True)
class Sample:
    """An answer. chosen: why this one. tokens: their texts, the first ones; num_tokens: all. prev_logprobs: the
    trainer's, generation_logprobs: the engine's, null where not finite. ValueError for lists of different lengths.
    """

    chosen: str
    prompt: str
    reward: float
    policy_version: int
    num_tokens: int
    tokens: list[str]
    prev_logprobs: list[float | None]
    generation_logprobs: list[float | None]

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.prev_logprobs) == len(self.generation_logprobs):
            raise ValueError("not as many log-probs as tokens")


class StepLog:
    """Open for appending, without what is later than step `done`; 0 is no step done, of which nothing is kept."""

    def __init__(self, path: Path, done: int) -> None:
        kept = [row for row in read(path) if row["step"] <= done] if done else []
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = path.open("ab", buffering=0)  # a buffer would try again at the end what a full disk refused

    def append(self, step: int, row: Row) -> None:
        """Append a row, which survives a kill at once, a power cut after `sync`. Raises ValueError on NaN, infinity;
        OSError.
        """
        line = (json.dumps({"step": step, **row}, allow_nan=False) + "\n").encode()
        if self._file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> list[Row]:
    """Every whole line, [] where there is no file; a last line that a kill cut short is left out.

    Raises UserError, naming the line, on one that is no step's.
    """
    try:
        lines = path.read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise UserError(f"{path}: line {number} is no step of a run: {line[:80]!r}; mend it, or cut the file there")
        rows.append(row)
    return rows
