"""Our `exact_match` as an environment of NeMo RL: `data.default.env_name: exact_match` and `env.exact_match: {}`."""

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
"""Actors of its asynchronous loop that run in the environment of its vLLM workers."""


class ExactMatchEnvironment(EnvironmentInterface):
    """One turn: the reward of the last message, held against `ground_truth` of the metadata."""

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
        """Nothing: it holds no worker."""

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
        return batch, {"accuracy": float(batch["total_reward"].mean())} if "total_reward" in batch else {}


ExactMatchActor = ray.remote(ExactMatchEnvironment)


def register(ours: bool) -> None:
    """Make the environment known to NeMo RL; a second call does nothing. ours: with our workers, which have no
    environment but the driver's, the collectors run there, too.
    """
    fqn = f"{__name__}.ExactMatchActor"
    for actor in (fqn, *(COLLECTORS if ours else ())):
        ACTOR_ENVIRONMENT_REGISTRY[actor] = PY_EXECUTABLES.SYSTEM
    if NAME not in ENV_REGISTRY:
        register_env(NAME, fqn)
