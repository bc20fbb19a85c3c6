"""A safetensors file, as other files of a run are: for whom the umask says. safetensors keeps it to its owner."""

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor


def write_safetensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raises OSError, or SafetensorError, where the disk does not take it."""
    from safetensors.torch import save_file

    save_file(dict(tensors), path, metadata={"format": "pt"})
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)
