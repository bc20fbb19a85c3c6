"""A run with a user-defined environment that answers every completion twice, so that each sample has three turns.

Usage: python carry_on.py RECIPE [overrides]
"""

import sys
from pathlib import Path
from typing import Any

from nemo_fp8rl.nemo_rl.compat import prepare
from nemo_fp8rl.nemo_rl.run.run_loop import run
from nemo_fp8rl.workers import require_token

require_token()
prepare()

import ray  # noqa: E402
import torch  # noqa: E402
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY  # noqa: E402
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES  # noqa: E402
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn  # noqa: E402
from nemo_rl.environments.utils import register_env  # noqa: E402

TURNS = 3


@ray.remote
class CarryOn(EnvironmentInterface):
    def __init__(self, cfg: dict[str, Any]) -> None:
        pass

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        answered = [sum(message["role"] == "assistant" for message in log) for log in message_log_batch]
        count = len(answered)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "+1="}] * count,
            metadata=metadata,
            next_stop_strings=[None] * count,
            rewards=torch.tensor([float(len(log[-1]["content"]) % 2) for log in message_log_batch]),
            terminateds=torch.tensor([float(turns == TURNS) for turns in answered]),
            answers=None,
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
        return batch, {}


if __name__ == "__main__":
    sys.modules["carry_on"] = sys.modules["__main__"]
    ACTOR_ENVIRONMENT_REGISTRY["carry_on.CarryOn"] = PY_EXECUTABLES.SYSTEM
    register_env("carry_on", "carry_on.CarryOn")
    run(Path(sys.argv[1]), sys.argv[2:])
