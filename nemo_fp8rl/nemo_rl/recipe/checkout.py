"""The checkout of NeMo RL named by NEMO_RL_SRC, which has NeMo RL's recipes and config classes.

NeMo RL is on no package index, so its users have a clone of its repository. This package's recipes
for NeMo RL inherit from recipes in that clone.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from nemo_fp8rl.common.errors import UserError

NEMO_RL_SRC = "NEMO_RL_SRC"
REPOSITORY = "https://github.com/NVIDIA-NeMo/RL"
SUPPORTED = "0.7.x and main of August 2026 (which calls itself 0.6.0, as older commits of it do)"
LIFECYCLE = "_weight_update_lifecycle"
VERSION_PARTS = re.compile(r"^(?:MAJOR|MINOR|PATCH) *= *(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Checkout:
    root: Path
    version: str

    @property
    def examples(self) -> Path:
        return self.root / "examples"

    @property
    def package(self) -> Path:
        return self.root / "nemo_rl"


def make_absolute() -> None:
    """Make NEMO_RL_SRC an absolute path, seen from the working directory.

    Otherwise `${oc.env:NEMO_RL_SRC}` would be relative to the recipe's folder, and in a Ray worker to the worker's.
    """
    if path := os.environ.get(NEMO_RL_SRC):
        os.environ[NEMO_RL_SRC] = os.path.abspath(os.path.expanduser(path))


def find_checkout() -> Checkout:
    """Return the checkout that NEMO_RL_SRC names.

    Raises: UserError if the variable is not set, names no checkout, or names one of an unsupported version
    """
    if not (path := os.environ.get(NEMO_RL_SRC)):
        raise UserError(
            f"{NEMO_RL_SRC} is not set: clone {REPOSITORY} (main or v0.7.0) and set {NEMO_RL_SRC} to that folder"
        )
    root = Path(path)
    try:
        parts = VERSION_PARTS.findall((root / "nemo_rl/package_info.py").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        parts = []
    if len(parts) != 3 or not (root / "examples/configs").is_dir():
        raise UserError(
            f"{NEMO_RL_SRC}={path} is no checkout of NeMo RL, it lacks nemo_rl/package_info.py or examples/configs: "
            f"clone {REPOSITORY} (main or v0.7.0) and set {NEMO_RL_SRC} to that folder"
        )
    version = ".".join(parts)
    is_main = version == "0.6.0" and _has_refit_lifecycle(root)
    if parts[:2] != ["0", "7"] and not is_main:
        raise UserError(f"{NEMO_RL_SRC}={path} is NeMo RL {version}; supported are {SUPPORTED}")
    return Checkout(root, version)


def _has_refit_lifecycle(root: Path) -> bool:
    """Return whether NeMo RL's engines refit in a lifecycle method, which `stock.vllm_worker` replaces.

    An older main would process FP8 weights once more after each refit.
    """
    try:
        return LIFECYCLE in (root / "nemo_rl/models/generation/vllm/vllm_backend.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
