"""Differences between the supported versions of NeMo RL (v0.7.x and main), and its needs of the environment.

Each is decided by what is there, never by a version number: here by the imported modules, in `recipe.checkout` by the
files of a checkout, before anything is imported; `interface_check` refuses what this package does not know. Call
`prepare` before the first import of nemo_rl. This module itself imports neither NeMo RL nor torch.
"""

import os
import sys
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.nemo_rl.recipe.checkout import NEMO_RL_SRC, find_checkout

HIGHEST_TRANSFORMERS = "5.11.99"
PREPARE_PROCESS = f"{__name__}.prepare_process"


def prepare() -> ModuleType:
    """Import nemo_rl.algorithms.grpo from $NEMO_RL_SRC, for this process and the Ray actors that it starts.

    Raises: UserError if there is no checkout, or if a dependency of NeMo RL is not installed
    """
    folder = str(find_checkout().root.resolve())
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if folder not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in (folder, *paths) if path)
    os.environ[NEMO_RL_SRC] = folder
    prepare_process()
    try:
        from nemo_rl.algorithms import grpo
    except ImportError as error:
        raise UserError(
            f"NeMo RL cannot be imported ({error}): install requirements/nemo-rl.txt of this project, as "
            "`make demo-nemo-rl` does in a clone"
        ) from None
    return grpo


def prepare_process() -> None:
    """Make nemo_rl importable in this process.

    This runs in every worker that Ray starts, so it must be quick. The workers of a cluster that this command did not
    start find the checkout by NEMO_RL_SRC alone.
    """
    if (folder := os.environ.get(NEMO_RL_SRC)) and folder not in sys.path:
        sys.path.insert(0, folder)
    if sys.version_info < (3, 12):  # before 3.12 pydantic supports only the TypedDict of typing_extensions
        import typing_extensions

        typing.TypedDict = typing_extensions.TypedDict  # type: ignore[misc, assignment]
    if not any(isinstance(finder, _VersionMaskingFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _VersionMaskingFinder())


class _VersionMaskingFinder(MetaPathFinder):
    """Import nemo_rl.models.policy, which asserts transformers < 5.12, beside the later version that vLLM needs.

    The assertion guards a patch for the tokenizer of a model family that this package does not support. The version is
    masked during that one import.
    """

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != "nemo_rl.models.policy":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                with _mask_transformers_version():
                    load(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@contextmanager
def _mask_transformers_version() -> Iterator[None]:
    import transformers
    from packaging.version import Version

    real = transformers.__version__
    if Version(real) > Version(HIGHEST_TRANSFORMERS):
        transformers.__version__ = HIGHEST_TRANSFORMERS
    try:
        yield
    finally:
        transformers.__version__ = real


def initial_save_state(grpo: ModuleType, loaded: Any) -> Any:
    """Return the counters of steps and samples from which NeMo RL's loop starts.

    loaded: training_info of the checkpoint to continue, None for a new run
    """
    if hasattr(grpo, "_get_grpo_save_state"):
        return grpo._get_grpo_save_state(loaded)
    return loaded if loaded is not None else grpo._default_grpo_save_state()


def completed_steps(state: Any) -> int:
    """Return the completed steps of the whole run.

    The asynchronous loop counts only current_step, which the other loop restarts in each epoch.
    """
    values = state if isinstance(state, dict) else vars(state)
    return max(int(values["total_steps"]), int(values["current_step"]))


def save_at_every_step(master: Any) -> None:
    """Make a running loop save after every step, from the current step on."""
    master.checkpointing["save_period"] = 1


def end_asynchronous_loop(master: Any, steps: int) -> None:
    """End the asynchronous loop after `steps` steps; the other loop reads the changed key only at its start."""
    if isinstance(master.grpo, dict):
        master.grpo["max_num_steps"] = steps
    else:
        master.grpo.max_num_steps = steps


def finish_checkpoints(checkpointer: Any) -> None:
    """Wait for checkpoints that are written in the background, which v0.7.0 does not do."""
    if hasattr(checkpointer, "shutdown"):
        checkpointer.shutdown()


def metric_normalizers(names: dict[str, str]) -> dict[str, Any]:
    """Convert a loss's `metric_normalizations` to NeMo RL's enumeration; v0.7.0 has none and needs none."""
    from nemo_rl.algorithms.loss import interfaces

    kind = getattr(interfaces, "MetricNormalizer", str)
    return {name: kind(value) for name, value in names.items()}


def load_dataloader(dataloader: Any, checkpoint: Path, data_cfg: Any) -> None:
    """Continue a dataloader from a checkpoint's train_dataloader.pt."""
    try:
        from nemo_rl.data.utils import load_dataloader_state
    except ImportError:
        import torch

        dataloader.load_state_dict(torch.load(checkpoint / "train_dataloader.pt", weights_only=True))
    else:
        load_dataloader_state(dataloader, str(checkpoint), data_cfg)
