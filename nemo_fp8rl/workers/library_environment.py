"""Environment variables by which libraries behave as a run needs it; what the user has set wins.

A library reads most of them once, when it is imported, so they are set before that: of a run in a single process by the
command line, of a Ray actor in its `setup`. Where a caller from Python has imported the library already, what it has
read is changed as well.
"""

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ENGINE = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would copy Megatron, and locks that other threads hold
}
CPU_ENGINE = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # leave the process's CPU affinity alone
    "VLLM_CPU_ATTN_SPLIT_KV": "0",  # else sums of attention depend on threads and on the other sequences
    "TORCH_COMPILE_DISABLE": "1",  # else helpers are compiled for seconds, by a C++ compiler that may be missing
}

CACHES = {
    "VLLM_CACHE_ROOT": "~/.cache/vllm",
    "VLLM_CONFIG_ROOT": "~/.config/vllm",
    "TRITON_CACHE_DIR": "~/.triton/cache",
    "FLASHINFER_WORKSPACE_BASE": "~",
}
"""Variable -> the folder that a library writes to by default."""


def set_defaults(variables: Mapping[str, str]) -> None:
    """Set the variables that the user has not set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    dynamo = sys.modules.get("torch._dynamo.config")
    if dynamo is not None and os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        dynamo.disable = True  # type: ignore[attr-defined]


def set_for_engine(on_gpu: bool) -> None:
    """Set what an engine's process needs; call it before vLLM is imported."""
    set_defaults(ENGINE if on_gpu else ENGINE | CPU_ENGINE)
    move_caches()


def move_caches() -> None:
    """Give libraries a folder of this process's own where their usual one cannot be written, as in many containers.

    It is removed when the process ends, and no other user can put code into it.
    """
    unwritable = [name for name, usual in CACHES.items() if name not in os.environ and not _can_write(usual)]
    if unwritable:
        folder = tempfile.mkdtemp(prefix="nemo_fp8rl_")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ.update({name: os.path.join(folder, name.lower()) for name in unwritable})


def _can_write(folder: str) -> bool:
    """Return whether the folder can be written, or be made."""
    path = Path(os.path.expanduser(folder))
    if path.parts[-2:-1] == (".cache",) and (caches := os.environ.get("XDG_CACHE_HOME")):
        path = Path(caches, path.name)
    if path.parts[-2:-1] == (".config",) and (configs := os.environ.get("XDG_CONFIG_HOME")):
        path = Path(configs, path.name)
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def stay_offline() -> None:
    """Ask the Hugging Face hub for nothing from now on, in this process and those that it starts.

    The models of a run are on disk then. The client reads HF_HUB_OFFLINE when it is imported.
    """
    if "HF_HUB_OFFLINE" not in os.environ:
        os.environ["HF_HUB_OFFLINE"] = "1"
        if constants := sys.modules.get("huggingface_hub.constants"):
            constants.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
