"""Which GPUs the user shows to this process."""

import os
from itertools import takewhile


def shown_gpus() -> list[str] | None:
    """The names in CUDA_VISIBLE_DEVICES, as CUDA reads it: up to one that is -1. None where it is not set, and all are
    shown.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    names = takewhile(lambda name: name != "-1", (name.strip() for name in visible.split(",")))
    return [name for name in names if name]
