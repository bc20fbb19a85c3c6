"""pytest plugin that runs NeMo RL's own tests of checkpoint engines with ours in place of NIXL, or of their plugin.

What is about NIXL's agents stays NIXL's.
"""

from typing import Any

from nemo_fp8rl.nemo_rl.compat import prepare
from nemo_fp8rl.nemo_rl.refit_transport.settings import ENGINE

prepare()

from nemo_fp8rl.nemo_rl.refit_transport.checkpoint_engine import Fp8CheckpointEngine  # noqa: E402

USES = {"class": 0, "recipe": 0}


class Marked(Fp8CheckpointEngine):
    """Ours, with the argument of their plugin."""

    def __init__(self, bucket_size: int, marker: str) -> None:
        super().__init__(bucket_size)
        self.bucket_size, self.marker = bucket_size, marker
        USES["class"] += 1


def refit_cfg(*, release_after_refit: bool = False) -> dict[str, Any]:
    """Return the blocks that name our engine, in place of those that name NIXL."""
    USES["recipe"] += 1
    block = {"device": "cpu", "release_after_refit": release_after_refit}
    return {"refit_transport": ENGINE, "refit_cfg": {ENGINE: block}, "vllm_cfg": {"async_engine": False}}


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for module in {item.module for item in items}:
        for name, replacement in (("_nixl_refit_cfg", refit_cfg), ("_PluginCheckpointEngine", Marked)):
            if hasattr(module, name):
                setattr(module, name, replacement)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"uses of ours: {USES['class']} class, {USES['recipe']} recipe")
