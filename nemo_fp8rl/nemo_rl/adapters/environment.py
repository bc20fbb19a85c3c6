"""Rewards of this package as environments of NeMo RL: a verifier, or a function of the user's own.

A recipe chooses one by `data.default.env_name: exact_match` or `data.default.env_name: package.module:function`; the
block `env` needs no entry for it. `math` remains NeMo RL's own environment.
"""

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import ray
import torch
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.utils import ENV_REGISTRY, register_env

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.data.records import answer_text
from nemo_fp8rl.data.rewards import Answered, load_scorer
from nemo_fp8rl.nemo_rl.recipe.rewards import VERIFIER_NAMES, dataset_blocks, reward_names

COLLECTORS = tuple(f"nemo_rl.algorithms.async_utils.{name}" for name in ("AsyncTrajectoryCollector", "ReplayBuffer"))
"""Actors of NeMo RL's asynchronous loop, which by default run in the environment of its vLLM workers."""
SHOWN = 60


class RewardEnvironment(EnvironmentInterface):
    """An environment of one turn, which scores the last message by `ground_truth` of the metadata."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        """cfg: `name` of the reward, exact_match without one, and the `folder` in which its module may be"""
        name, folder = cfg.get("name", VERIFIER_NAMES[0]), cfg.get("folder")
        if folder and folder not in sys.path:
            sys.path.append(folder)
        self.scorer, self.has_text_answers = load_scorer(name), ":" not in name

    def step(self, message_log_batch: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        pairs = zip(message_log_batch, metadata, strict=True)
        rewards = self.scorer.score([self._answered(log, known["ground_truth"]) for log, known in pairs])
        count = len(rewards)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}] * count,
            metadata=metadata,
            next_stop_strings=[None] * count,
            rewards=torch.tensor(rewards, dtype=torch.float32),
            terminateds=torch.ones(count),
            answers=None,
        )

    def shutdown(self) -> None:
        """Do nothing: the environment has no worker."""

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
        return batch, {"accuracy": float(batch["total_reward"].mean())} if "total_reward" in batch else {}

    def _answered(self, log: Any, answer: Any) -> Answered:
        prompt = log[0]["content"]
        place = f"the sample with the answer {str(answer)[:SHOWN]!r}"
        answers = answer_text(answer, place) if self.has_text_answers else ()
        return Answered(log[-1]["content"], answers, {"answer": answer, "rendered_prompt": prompt}, place)


RewardActor = ray.remote(RewardEnvironment)


def register(uses_package: bool, master: Any = None) -> None:
    """Register the environments that a recipe's data names with NeMo RL; a second call does nothing.

    uses_package: True with the package's workers, which have the driver's environment alone; NeMo RL's collectors then
                  run in it as well
    master:       NeMo RL's config, whose block `env` gets what the environments need; None registers the verifiers
    """
    actor_name = f"{__name__}.RewardActor"
    for actor in (actor_name, *(COLLECTORS if uses_package else ())):
        ACTOR_ENVIRONMENT_REGISTRY[actor] = PY_EXECUTABLES.SYSTEM
    for name in VERIFIER_NAMES if master is None else reward_names(master.data):
        if name not in ENV_REGISTRY:
            register_env(name, actor_name)
        if master is not None:
            master.env[name] = {**(master.env.get(name) or {}), "name": name, "folder": os.getcwd()}


def check_data(data_cfg: Mapping[str, Any], train: Any, validation: Any) -> None:
    """Raise UserError, with the sample, for data that NeMo RL would read otherwise than a reward of this package does.

    data_cfg: NeMo RL's block `data`, after its setup
    """
    for block, processed in (("data.train", train), ("data.validation", validation)):
        names = {entry.get("env_name") for entry in dataset_blocks(data_cfg)}
        dataset = getattr(processed, "dataset", None)
        if dataset is not None and len(names) == 1 and names <= set(reward_names(data_cfg)):
            check_samples(str(names.pop()), dataset, block)


def check_samples(name: str, dataset: Iterable[Mapping[str, Any]], block: str) -> None:
    """Raise UserError for a sample whose messages are not one question of a user and its answer.

    NeMo RL takes the first of a sample's messages as its prompt and the second as its answer, whoever wrote them.
    """
    for number, entry in enumerate(dataset, 1):
        messages = entry.get("messages")
        if not isinstance(messages, list):
            return  # another of NeMo RL's processors reads other fields
        roles = [message["role"] for message in messages]
        prompt = messages[0]["content"] if messages else ""
        place = f"{block}, sample {number} ({str(prompt)[:SHOWN]!r})"
        if roles != ["user", "assistant"]:
            raise UserError(
                f"{place} has messages of {', '.join(map(str, roles)) or 'nobody'}, and NeMo RL takes the first as the "
                "prompt and the second as the answer: give a user's and an assistant's, or use `nemo-fp8rl train`"
            )
        if not isinstance(prompt, str) or not prompt.strip():
            raise UserError(f"{place}: the prompt is blank or no text; remove the sample or write the question")
        if ":" not in name:
            answer_text(messages[1]["content"], f"{place}: its answer")
