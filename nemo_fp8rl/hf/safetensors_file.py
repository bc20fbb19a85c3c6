"""A safetensors file, as other files of a run are: for whom the umask says. safetensors keeps it to its owner."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor


def write_safetensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raises OSError, or SafetensorError, where the disk does not take it."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(mode)
