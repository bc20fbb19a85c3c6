"""Who trains and who generates in a run of NeMo RL's loop, `nemo_fp8rl.workers`:

ours        our policy, engines, refit and loss (`install`)
nemo_rl     NeMo RL's workers from its own `setup`, FP8 on the wire between them (`stock`), our loss
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.visible_gpus import shown_gpus
from nemo_fp8rl.config.schema import Flow, Fp8RlConfig
from nemo_fp8rl.fp8.gpu_support import CAPABILITIES, Capability
from nemo_fp8rl.nemo_rl.compat import completed_steps, initial_save_state, load_dataloader
from nemo_fp8rl.nemo_rl.recipe.gpu_division import why_gpu_unsupported
from nemo_fp8rl.nemo_rl.recipe.keys import describe_ignored_values
from nemo_fp8rl.nemo_rl.recipe.read_recipe import NemoRlRecipe
from nemo_fp8rl.nemo_rl.recipe.recipe_checks import loss_keys
from nemo_fp8rl.workers import connect, is_in_cluster, joins_cluster

RAY_GPU = "accelerator_type:"
"""What stands before a GPU's name among the resources of a Ray cluster that has one."""
OWN_KEYS = ("align", "kv", "refit", "gates")
"""Keys of `nemo_fp8rl` that are not of the loss or the precision."""


@dataclass(frozen=True)
class Loop:
    """What NeMo RL's grpo_train is called with, but for the environments and tokenizer."""

    policy: Any
    generation: Any
    prompts: Any
    val_prompts: Any
    loss: Any
    logger: Any
    checkpointer: Any
    state: Any
    master: Any
    steps: int
    """Steps of the whole run."""


def uses_package_workers(asked: Literal["auto", "ours", "nemo_rl"]) -> bool:
    """Whether trainer and engines are our own. Raises UserError where NeMo RL's are asked for and there is no GPU."""
    if asked == "ours":
        return True
    on_gpus = _are_there_gpus()
    if asked == "nemo_rl" and not on_gpus:
        raise UserError("nemo_fp8rl.workers=nemo_rl: NeMo RL's workers need GPUs, and there are none; set it to ours")
    return not on_gpus


def check_local_gpu(flow: Flow) -> None:
    """Raise UserError where this process sees a GPU that cannot run the flow; workers of a cluster have others."""
    import torch

    if torch.cuda.is_available() and not joins_cluster():
        _check_gpu(flow, torch.cuda.get_device_name(), torch.cuda.get_device_capability())


def check_cluster(flow: Flow) -> None:
    """Raise UserError where no GPU of the Ray cluster that this process is in can run the flow.

    Ray knows one of each node, by name. Where it names one that is not in CAPABILITIES, the workers say it.
    """
    import ray

    if shown_gpus() == []:
        return
    names = [name.removeprefix(RAY_GPU) for name in ray.cluster_resources() if name.startswith(RAY_GPU)]
    known = {name: CAPABILITIES[name.lower()] for name in names if name.lower() in CAPABILITIES}
    if known and len(known) == len(names):
        newest = max(known, key=known.__getitem__)
        _check_gpu(flow, newest, known[newest])


def _check_gpu(flow: Flow, name: str, capability: Capability) -> None:
    if refusal := why_gpu_unsupported(flow, name, capability):
        raise UserError(refusal)


def _are_there_gpus() -> bool:
    """Whether there are GPUs here, or in the Ray cluster of RAY_ADDRESS; to a user who hides them, there are none.

    Raises UserError where that cluster cannot be joined.
    """
    import torch

    if shown_gpus() == [] or torch.cuda.is_available() or not joins_cluster():
        return torch.cuda.is_available()
    joins = not is_in_cluster()
    connect(0)
    import ray

    try:
        return bool(ray.cluster_resources().get("GPU"))
    finally:
        if joins:  # whose workers it will have decides how it is joined
            ray.shutdown()


@contextmanager
def set_up_package_workers(
    grpo: ModuleType, master: Any, recipe: NemoRlRecipe, tokenizer: Any, data: Any, val_data: Any
) -> Iterator[Loop]:
    """What `nemo_rl.algorithms.grpo.setup` would make, with our trainer and engines in place of workers on GPUs."""
    from nemo_rl.utils.checkpoint import CheckpointManager
    from nemo_rl.utils.logger import Logger

    from nemo_fp8rl.nemo_rl.run.install import backends, install

    values = master.model_dump()  # its blocks are mappings in one version, objects in the other
    for sentence in describe_ignored_values(values):
        print(f"nemo-fp8rl: {sentence}", flush=True)
    keys = values["grpo"]
    logger, checkpointer = Logger(master.logger), CheckpointManager(master.checkpointing)
    logger.log_hyperparams(values)
    latest = checkpointer.get_latest_checkpoint_path()
    state = initial_save_state(grpo, checkpointer.load_training_info(latest))
    weights_path, _ = checkpointer.get_resume_paths(latest)
    asked = keys["num_prompts_per_step"] * (keys["batch_multiplier"] if keys["use_dynamic_sampling"] else 1)
    prompts = _dataloader(data, int(asked), shuffle=master.data["shuffle"], drop_last=True)
    if latest is not None:
        load_dataloader(prompts, Path(latest), master.data)
    steps = _steps(recipe, prompts)
    master.policy["megatron_cfg"]["train_iters"] = steps  # as NeMo RL's setup says it
    validates = keys["val_period"] > 0 or keys["val_at_start"] or keys["val_at_end"]
    val_prompts = _dataloader(val_data, keys["val_batch_size"]) if validates else None
    with backends(master, tokenizer, weights_path) as (policy, generation):
        loss = install(policy, generation, master, completed_steps(state))
        if policy.cfg.fp8_kv_cache and latest is None:  # NeMo RL calibrates later than it validates
            first = [data[i] for i in range(keys["num_prompts_per_step"])]
            policy.calibrate_qkv_fp8_scales(_tokens(first, tokenizer.pad_token_id))
        yield Loop(policy, generation, prompts, val_prompts, loss, logger, checkpointer, state, master, steps)


@contextmanager
def set_up_nemo_rl_workers(
    grpo: ModuleType, master: Any, recipe: NemoRlRecipe, tokenizer: Any, data: Any, val_data: Any
) -> Iterator[Loop]:
    """NeMo RL's own setup of its own workers, FP8 on the wire between them where the recipe says FP8."""
    from transformers import AutoConfig

    from nemo_fp8rl.nemo_rl.adapters.loss_fn import GrpoLossFn
    from nemo_fp8rl.nemo_rl.stock.worker_choice import choose_workers, declare_kv_cache, policy_factory

    told = (name for name in OWN_KEYS if getattr(recipe.fp8rl, name) != getattr(Fp8RlConfig(), name))
    for name in told:
        print(f"nemo-fp8rl: nemo_fp8rl.{name} is of our own trainer and refit, NeMo RL's do without it", flush=True)
    trainer = master.policy.get("megatron_cfg") or {}
    fused = bool(trainer.get("enabled") and trainer.get("use_fused_linear_logprobs"))
    loss = GrpoLossFn(loss_keys(master.model_dump()), fused, recipe.fp8rl.correction)
    if recipe.precision.flow != "bf16":  # which NeMo RL runs with models whose config cannot be read so
        model = AutoConfig.from_pretrained(master.policy["model_name"]).get_text_config()
        latent = getattr(model, "kv_lora_rank", None) is not None
        choose_workers(master.policy, model.num_hidden_layers, recipe.checkout.version, latent)
    policy, generation, _, _, prompts, val_prompts, _, logger, checkpointer, state, master, *_ = grpo.setup(
        master, tokenizer, data, val_data, policy_factory=policy_factory
    )
    declare_kv_cache(generation, master.policy)
    try:
        yield Loop(
            *(policy, generation, prompts, val_prompts, loss, logger, checkpointer, state, master),
            _steps(recipe, prompts),
        )
    finally:
        generation.shutdown()


def _steps(recipe: NemoRlRecipe, prompts: Any) -> int:
    """How many steps the loop takes: as asked for, or as its epochs have."""
    grpo = recipe.values["grpo"]
    if recipe.values["data"].get("use_multiple_dataloader"):  # which has no length
        return int(grpo["max_num_steps"])
    return int(min(grpo["max_num_steps"], grpo["max_num_epochs"] * len(prompts)))


def _dataloader(data: Any, batch_size: int, shuffle: bool = False, drop_last: bool = False) -> Any:
    from nemo_rl.data.collate_fn import rl_collate_fn
    from torchdata.stateful_dataloader import StatefulDataLoader

    if data is None:
        raise UserError("there is no validation data: give data.validation or data.train.split_validation_size")
    return StatefulDataLoader(data, batch_size, shuffle=shuffle, collate_fn=rl_collate_fn, drop_last=drop_last)


def _tokens(data: list[Any], pad_token_id: int) -> dict[str, Any]:
    """The prompts alone, padded, as NeMo RL's loop passes them to a calibration."""
    from nemo_rl.data.llm_message_utils import batched_message_log_to_flat_message

    logs = [datum["message_log"] for datum in data]
    flat, lengths = batched_message_log_to_flat_message(logs, pad_value_dict={"token_ids": pad_token_id})
    return {"input_ids": flat["token_ids"], "input_lengths": lengths}
