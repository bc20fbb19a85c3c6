"""The verifier `exact_match` as an environment of NeMo RL.

A recipe chooses it by `data.default.env_name: exact_match` and `env.exact_match: {}`.
"""

from typing import Any

import ray
import torch
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.utils import ENV_REGISTRY, register_env

from nemo_fp8rl.data.rewards import VERIFIERS

NAME = "exact_match"
COLLECTORS = tuple(f"nemo_rl.algorithms.async_utils.{name}" for name in ("AsyncTrajectoryCollector", "ReplayBuffer"))
"""Actors of NeMo RL's asynchronous loop, which by default run in the environment of its vLLM workers."""


class ExactMatchEnvironment(EnvironmentInterface):
    """An environment of one turn, which compares the last message with `ground_truth` of the metadata."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        self.verify = VERIFIERS[NAME]

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        pairs = zip(message_log_batch, metadata, strict=True)
        rewards = [self.verify(log[-1]["content"], known["ground_truth"]) for log, known in pairs]
        count = len(rewards)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}] * count,
            metadata=metadata,
            next_stop_strings=[None] * count,
            rewards=torch.tensor(rewards),
            terminateds=torch.ones(count),
            answers=None,
        )

    def shutdown(self) -> None:
        """Do nothing: the environment has no worker."""

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
        return batch, {"accuracy": float(batch["total_reward"].mean())} if "total_reward" in batch else {}


ExactMatchActor = ray.remote(ExactMatchEnvironment)


def register(uses_package: bool) -> None:
    """Register the environment with NeMo RL; a second call does nothing.

    uses_package: True with the package's workers, which have the driver's environment alone; NeMo RL's collectors then
                  run in it as well
    """
    actor_name = f"{__name__}.ExactMatchActor"
    for actor in (actor_name, *(COLLECTORS if uses_package else ())):
        ACTOR_ENVIRONMENT_REGISTRY[actor] = PY_EXECUTABLES.SYSTEM
    if NAME not in ENV_REGISTRY:
        register_env(NAME, actor_name)
