"""The GPUs that the user makes visible to this process."""

import os
from itertools import takewhile


def visible_gpu_names() -> list[str] | None:
    """Return the names in CUDA_VISIBLE_DEVICES, as CUDA reads it: up to the first -1.

    The result is None where the variable is not set, and all GPUs are visible.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    names = takewhile(lambda name: name != "-1", (name.strip() for name in visible.split(",")))
    return [name for name in names if name]
