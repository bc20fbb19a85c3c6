"""Build this package's trainer and engines from NeMo RL's config, and link them for NeMo RL's loops."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_fp8rl import assemble
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.nemo_rl.adapters import environment
from nemo_fp8rl.nemo_rl.adapters.loss_fn import GrpoLossFn
from nemo_fp8rl.nemo_rl.adapters.megatron_policy import MegatronFp8Policy
from nemo_fp8rl.nemo_rl.adapters.vllm_generation import VllmFp8Generation
from nemo_fp8rl.nemo_rl.adapters.weight_sync import Fp8WeightSynchronizer
from nemo_fp8rl.nemo_rl.recipe.config_from_recipe import convert_recipe
from nemo_fp8rl.nemo_rl.recipe.gpu_division import is_asynchronous
from nemo_fp8rl.nemo_rl.recipe.recipe_checks import loss_keys
from nemo_fp8rl.policy.rank_group import MegatronPolicy


@contextmanager
def backends(
    master_config: Any, tokenizer: Any, weights_path: Path | None = None
) -> Iterator[tuple[MegatronFp8Policy, VllmFp8Generation]]:
    """Build trainer and engines for `install`; both end with the context.

    From then on the collectors of NeMo RL's asynchronous loop run in the driver's environment, as the engines do.

    master_config:  NeMo RL's MasterConfig after configure_generation_config
    weights_path:   weights of the checkpoint to continue, None for a new run
    """
    environment.register(uses_package=True)
    values = master_config.model_dump()
    cfg = convert_recipe(values)
    generation_cfg = master_config.policy["generation"]

    def load(policy: MegatronPolicy) -> None:
        if weights_path is not None:
            policy.load(weights_path.parent)

    with assemble.backends(cfg, load) as (policy, generation):
        yield (
            MegatronFp8Policy(policy, cfg, tokenizer, weights_path is not None, is_asynchronous(values)),
            VllmFp8Generation(generation, cfg, generation_cfg, tokenizer.pad_token_id),
        )


def install(
    policy: MegatronFp8Policy, generation: VllmFp8Generation, master_config: Any, completed_steps: int = 0
) -> GrpoLossFn:
    """Link trainer and engines for NeMo RL's refits, and return the loss for its grpo_train.

    completed_steps: total_steps of the checkpoint that the policy was loaded from; the version of the weights and the
        count of steps start there
    """
    cfg: Config = policy.cfg
    bridge = assemble.build_bridge(cfg, policy.policy, generation.generation, first_version=completed_steps)
    synchronizer = Fp8WeightSynchronizer(policy, generation, bridge)
    generation.connect_bridge(bridge, synchronizer)
    policy.completed_steps = completed_steps
    policy.connect_refit(synchronizer.sync_weights)
    if cfg.updates_in_flight:
        policy.connect_versions(bridge, generation.ledger)
    print(
        f"nemo-fp8rl: flow {cfg.nemo_fp8rl.flow}, {cfg.nemo_fp8rl.scale_format} scales, {bridge.description}",
        flush=True,
    )
    return GrpoLossFn(loss_keys(master_config.model_dump()), correction=cfg.nemo_fp8rl.correction)
