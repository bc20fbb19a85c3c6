"""A file of one JSON object per step. It is flushed, so it survives a kill; a resumed run cuts it back."""

import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_fp8rl.common.atomic_files import sync_descriptor, write_atomically
from nemo_fp8rl.common.errors import UserError, single_line

Row = dict[str, Any]
"""One line: `step`, and the values of that step."""


@dataclass(frozen=True)
class Sample:
    """One answer of a step.

    chosen:               the reason why this answer was chosen
    prompt:               the beginning of the question as the dataset has it
    rendered_prompt:      what the model saw, after the chat template; "" in runs of earlier versions
    num_tokens:           all tokens of the answer
    tokens:               the texts of the first tokens
    prev_logprobs:        the trainer's log-probs of these tokens, None where not finite
    generation_logprobs:  the engine's, likewise
    hint_stage:           the stage of grpo.hints whose hint the model saw; 0 without a hint

    Raises: ValueError for lists of different lengths
    """

    chosen: str
    prompt: str
    reward: float
    policy_version: int
    num_tokens: int
    tokens: list[str]
    prev_logprobs: list[float | None]
    generation_logprobs: list[float | None]
    rendered_prompt: str = ""
    hint_stage: int = 0

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.prev_logprobs) == len(self.generation_logprobs):
            raise ValueError("not as many log-probs as tokens")


class StepLog:
    """A log file, open for appending."""

    def __init__(self, path: Path, completed_steps: int) -> None:
        """Open the file and remove the rows after `completed_steps`; with 0, all rows."""
        rows = [row for row in read(path) if row["step"] <= completed_steps] if completed_steps else []
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
        self._file = path.open("ab", buffering=0)  # a buffer would retry at the end what a full disk refused

    def append(self, step: int, row: Row) -> None:
        """Append a row. It survives a kill at once, and a power cut after `sync`.

        Raises: ValueError on NaN or infinity, OSError
        """
        line = (json.dumps({"step": step, **row}, allow_nan=False) + "\n").encode()
        if self._file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def sync(self) -> None:
        sync_descriptor(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> list[Row]:
    """Return every complete line, [] without a file; a last line that a kill cut short is left out.

    Raises: UserError, with the number of the line, on a line that is not a step
    """
    try:
        lines = path.read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {single_line(error)}") from None
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
