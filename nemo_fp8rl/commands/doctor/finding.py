"""A finding of the doctor: one sentence and its level."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "error"]


@dataclass(frozen=True)
class Finding:
    """error: the run fails, or computes something else than the recipe states. warn: it may, or wastes resources."""

    level: Level
    topic: str
    text: str
