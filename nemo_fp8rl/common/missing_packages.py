"""Packages that are not installed, or not for this build of torch, as one sentence with the pip line that mends it."""

import re
from importlib import metadata, util
from pathlib import Path
from shlex import quote

from nemo_fp8rl import __version__
from nemo_fp8rl.common.errors import UserError

REQUIREMENTS = Path(__file__).resolve().parent / "requirements/cpu.txt"
"""The tested versions of all that a run on a CPU needs; `make` installs the same."""
ROOT = REQUIREMENTS.parents[3]
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
DISTRIBUTIONS = {"megatron": "megatron-core", "math_verify": "math-verify", "yaml": "pyyaml", "google": "protobuf"}
"""Import name -> name of the distribution, where they differ."""
FOR_TORCH = ("torchvision", "torchaudio", "torchcodec")
"""Libraries compiled for one build of torch. vLLM and transformers import torchvision where it is installed."""


def pip_line() -> str:
    """Return the command that installs what a run needs on this machine."""
    if NVIDIA_DRIVER.exists():
        is_installed = _version("nemo-fp8rl") == __version__
        project = f"nemo-fp8rl[gpu]=={__version__}" if is_installed else f"{ROOT}[gpu]"
        return f"pip install {quote(project)}"
    return f"pip install --no-deps -r {quote(str(REQUIREMENTS))}"


def as_user_error(error: ModuleNotFoundError, command: str) -> UserError | None:
    """Return the error of a package that is not installed as a sentence, None for what no requirement names."""
    root = (error.name or "").partition(".")[0]
    name = DISTRIBUTIONS.get(root, root)
    if _normal(name) not in _required() or util.find_spec(root) is not None:  # a part of what is installed is a defect
        return None
    return UserError(f"{command} needs {name}, which is not installed: {pip_line()}")


def check_torch_libraries() -> None:
    """Raise UserError for a torchvision that is made for CUDA beside torch's CPU build."""
    torch, others = _version("torch"), [name for name in FOR_TORCH if not _version(name).endswith(("+cpu", "none"))]
    if torch.endswith("+cpu") and FOR_TORCH[0] in others:
        raise UserError(
            f"torchvision {_version('torchvision')} is built for CUDA and torch {torch} is not, so that transformers "
            f"and vLLM fail as they import it; nothing here needs it: pip uninstall -y {' '.join(others)}"
        )


def _required() -> set[str]:
    """Return the distributions that the package or one of its extras asks for, and those of the tested versions."""
    extras = metadata.requires("nemo-fp8rl") if _version("nemo-fp8rl") != "none" else None
    lines = [*(extras or ()), *REQUIREMENTS.with_name("lock.txt").read_text().splitlines()]
    return {_normal(match[0]) for line in lines if (match := re.match(r"[\w.-]+", line))} | {"torch", "vllm"}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _version(name: str) -> str:
    """Return the installed version, "none" where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"
