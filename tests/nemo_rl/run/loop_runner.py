"""A user's own script, as in docs/nemo_rl.md: NeMo RL's components and this package's workers on a Ray cluster.

Usage: python loop_runner.py RECIPE [overrides]
"""

import os
import sys
from pathlib import Path

from nemo_fp8rl.nemo_rl.compat import PREPARE_PROCESS, prepare

grpo = prepare()

import ray  # noqa: E402
from nemo_rl.algorithms.utils import get_tokenizer, set_seed  # noqa: E402
from nemo_rl.data.collate_fn import rl_collate_fn  # noqa: E402
from nemo_rl.data.utils import setup_response_data  # noqa: E402
from nemo_rl.models.generation import configure_generation_config  # noqa: E402
from nemo_rl.utils.checkpoint import CheckpointManager  # noqa: E402
from nemo_rl.utils.config import load_config, parse_hydra_overrides, register_omegaconf_resolvers  # noqa: E402
from nemo_rl.utils.logger import Logger, get_next_experiment_dir  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402

from nemo_fp8rl.nemo_rl.adapters import environment  # noqa: E402
from nemo_fp8rl.nemo_rl.compat import initial_save_state  # noqa: E402
from nemo_fp8rl.nemo_rl.run.install import backends, install  # noqa: E402


def main(recipe: Path, overrides: list[str]) -> None:
    register_omegaconf_resolvers()
    config = parse_hydra_overrides(load_config(recipe), overrides)
    master = grpo.MasterConfig(**OmegaConf.to_container(config, resolve=True))
    tokenizer = get_tokenizer(master.policy["tokenizer"])
    master.policy["generation"] = configure_generation_config(master.policy["generation"], tokenizer)
    master.logger["log_dir"] = get_next_experiment_dir(master.logger["log_dir"])
    keys = master.model_dump()["grpo"]
    set_seed(keys["seed"])
    # The hook is needed by the versions in these tests; NeMo RL's own environment does not need it.
    ray.init("local", num_cpus=8, include_dashboard=False, runtime_env={"worker_process_setup_hook": PREPARE_PROCESS})
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address  # other clusters may run on this machine
    environment.register(uses_package=True)
    data, _, envs, val_envs = setup_response_data(tokenizer, master.data, master.env)
    prompts = StatefulDataLoader(
        data, keys["num_prompts_per_step"], shuffle=True, collate_fn=rl_collate_fn, drop_last=True
    )
    logger, checkpointer = Logger(master.logger), CheckpointManager(master.checkpointing)
    with backends(master, tokenizer) as (policy, generation):
        loss = install(policy, generation, master)
        arguments = (policy, generation, prompts, None, tokenizer, loss, envs, val_envs, logger, checkpointer)
        grpo.grpo_train(*arguments, initial_save_state(grpo, None), master)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
