"""The checkout of NeMo RL named by NEMO_RL_SRC, which has NeMo RL's recipes and config classes.

NeMo RL is on no package index, so its users have a clone of its repository. This package's recipes
for NeMo RL inherit from recipes in that clone.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.nemo_rl.recipe import source_signatures

NEMO_RL_SRC = "NEMO_RL_SRC"
REPOSITORY = "https://github.com/NVIDIA-NeMo/RL"
VERSION_PARTS = re.compile(r"^(?:MAJOR|MINOR|PATCH) *= *(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Checkout:
    """A checkout of NeMo RL. What differs between versions is read from its files, never from its number.

    version: for messages alone; its main calls itself 0.6.0
    """

    root: Path
    version: str

    @property
    def examples(self) -> Path:
        return self.root / "examples"

    @property
    def package(self) -> Path:
        return self.root / "nemo_rl"

    @property
    def engines_survive_fp8_refit(self) -> bool:
        """True if FP8 weights stay valid after a refit of its engines.

        It is so where they refit in a lifecycle method, which `stock.vllm_worker` replaces; v0.7.x processes the
        weights once more.
        """
        extension = source_signatures.find(
            self.package / "models/generation/vllm/vllm_backend.py", "VllmInternalWorkerExtension"
        )
        return "_weight_update_lifecycle" in source_signatures.methods(extension)

    @property
    def takes_estimator_from_grpo(self) -> bool:
        """True if an absent grpo.adv_estimator means keys of the block grpo; later versions have defaults for it."""
        config = source_signatures.find(self.package / "algorithms/grpo.py", "GRPOConfig")
        return source_signatures.lacks_default(config, "adv_estimator")

    @property
    def has_checkpoint_engines(self) -> bool:
        """True if policy.generation.refit_transport may name a class, as `refit_transport.checkpoint_engine` is."""
        path = self.package / "utils/checkpoint_engines/base.py"
        return source_signatures.find(path, "CheckpointEngine") is not None


def make_absolute() -> None:
    """Make NEMO_RL_SRC an absolute path, seen from the working directory.

    Otherwise `${oc.env:NEMO_RL_SRC}` would be relative to the recipe's folder, and in a Ray worker to the worker's.
    """
    if path := os.environ.get(NEMO_RL_SRC):
        os.environ[NEMO_RL_SRC] = os.path.abspath(os.path.expanduser(path))


def find_checkout() -> Checkout:
    """Return the checkout that NEMO_RL_SRC names.

    Raises: UserError if the variable is not set or names no checkout
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
    return Checkout(root, ".".join(parts))
