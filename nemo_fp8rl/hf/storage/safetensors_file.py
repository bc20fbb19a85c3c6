"""Writing a safetensors file with the permissions of the umask; safetensors makes it readable for its owner alone."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor


def write_safetensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors to a file. Raises OSError or SafetensorError, for example on a full disk."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata={"format": "pt"})
    with suppress(OSError):  # a filesystem without modes
        path.chmod(mode)
