"""What the doctor says: one sentence, and how bad it is."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "error"]


@dataclass(frozen=True)
class Finding:
    """error: the run fails or computes something else than it says. warn: it may, or wastes something."""

    level: Level
    topic: str
    text: str
