"""Choose and set up the workers of a run of NeMo RL's loop, by the key `nemo_fp8rl.workers`.

ours     this package's policy, engines, refit and loss (`install`)
nemo_rl  NeMo RL's own workers from its `setup`, FP8 on the wire between them (`stock`), and this package's loss
auto     nemo_rl if there are GPUs and nothing is MXFP8 or NVFP4, else ours
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.field_rules import NemoRl, fields_of
from nemo_fp8rl.common.visible_gpus import visible_gpu_names
from nemo_fp8rl.config.fp8rl_schema import Flow, Fp8RlConfig
from nemo_fp8rl.fp8.gpu_support import CAPABILITIES, Capability
from nemo_fp8rl.nemo_rl.compat import completed_steps, initial_save_state, load_dataloader
from nemo_fp8rl.nemo_rl.recipe.gpu_division import is_asynchronous, why_gpu_unsupported
from nemo_fp8rl.nemo_rl.recipe.keys import describe_ignored_values
from nemo_fp8rl.nemo_rl.recipe.read_recipe import NemoRlRecipe
from nemo_fp8rl.nemo_rl.recipe.recipe_checks import loss_keys
from nemo_fp8rl.nemo_rl.stock.stock_limits import STOCK_FLOWS
from nemo_fp8rl.workers import connect, is_in_cluster, joins_cluster

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of config.json for the number of experts."""
RAY_GPU_PREFIX = "accelerator_type:"
"""Prefix of a GPU's name among the resources of a Ray cluster."""
PACKAGE_WORKER_KEYS = tuple(
    field.name
    for field in fields_of(Fp8RlConfig)
    if not field.marker(NemoRl) and field.name not in ("correction", "mismatch_alarm", "refit", "workers")
)
"""Keys of `nemo_fp8rl` that only the package's workers use; the others choose loss and precision."""


@dataclass(frozen=True)
class LoopArguments:
    """Arguments of NeMo RL's grpo_train, without environments and tokenizer, and the steps of the whole run."""

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


def uses_package_workers(workers: Literal["auto", "ours", "nemo_rl"], flow: Flow) -> bool:
    """Return whether the package's trainer and engines run, rather than NeMo RL's own workers.

    flow:   auto takes the package's for a format that NeMo RL's do not refit (`stock_limits`)
    Raises: UserError if the recipe chooses NeMo RL's workers and there is no GPU
    """
    if workers == "ours" or (workers == "auto" and flow not in STOCK_FLOWS):
        return True
    has_gpus = _has_gpus()
    if workers == "nemo_rl" and not has_gpus:
        raise UserError("nemo_fp8rl.workers=nemo_rl: NeMo RL's workers need GPUs, and there are none; set it to ours")
    return not has_gpus


def check_local_gpu(flow: Flow) -> None:
    """Raise UserError if this process sees a GPU that cannot run the flow; a cluster's workers have other GPUs."""
    import torch

    if torch.cuda.is_available() and not joins_cluster():
        _check_gpu(flow, torch.cuda.get_device_name(), torch.cuda.get_device_capability())


def check_cluster(flow: Flow) -> None:
    """Raise UserError if no GPU of this process's Ray cluster can run the flow.

    Ray knows the name of one GPU per node. If a name is not in CAPABILITIES, the check is left to the workers.
    """
    import ray

    if visible_gpu_names() == []:
        return
    resources = [name for name in ray.cluster_resources() if name.startswith(RAY_GPU_PREFIX)]
    names = [name.removeprefix(RAY_GPU_PREFIX) for name in resources]
    known = {name: CAPABILITIES[name.lower()] for name in names if name.lower() in CAPABILITIES}
    if known and len(known) == len(names):
        newest = max(known, key=known.__getitem__)
        _check_gpu(flow, newest, known[newest])


def _check_gpu(flow: Flow, name: str, capability: Capability) -> None:
    if refusal := why_gpu_unsupported(flow, name, capability):
        raise UserError(refusal)


def _has_gpus() -> bool:
    """Return whether this machine, or the Ray cluster of RAY_ADDRESS, has GPUs that CUDA_VISIBLE_DEVICES does not hide.

    Raises: UserError if that cluster cannot be joined
    """
    import torch

    if visible_gpu_names() == [] or torch.cuda.is_available() or not joins_cluster():
        return torch.cuda.is_available()
    joins = not is_in_cluster()
    connect(0)
    import ray

    try:
        return bool(ray.cluster_resources().get("GPU"))
    finally:
        if joins:  # the choice of workers decides how the run joins the cluster
            ray.shutdown()


@contextmanager
def set_up_package_workers(
    grpo: ModuleType, master: Any, recipe: NemoRlRecipe, tokenizer: Any, data: Any, val_data: Any
) -> Iterator[LoopArguments]:
    """Do the work of `nemo_rl.algorithms.grpo.setup` with the package's trainer and engines."""
    from nemo_rl.utils.checkpoint import CheckpointManager
    from nemo_rl.utils.logger import Logger

    from nemo_fp8rl.nemo_rl.run.install import backends, install

    values = master.model_dump()  # the blocks of `master` are mappings in one version of NeMo RL, objects in the other
    for sentence in describe_ignored_values(values):
        print(f"nemo-fp8rl: {sentence}", flush=True)
    keys = values["grpo"]
    logger, checkpointer = Logger(master.logger), CheckpointManager(master.checkpointing)
    logger.log_hyperparams(values)
    latest = checkpointer.get_latest_checkpoint_path()
    state = initial_save_state(grpo, checkpointer.load_training_info(latest))
    weights_path, _ = checkpointer.get_resume_paths(latest)
    num_prompts = keys["num_prompts_per_step"] * (keys["batch_multiplier"] if keys["use_dynamic_sampling"] else 1)
    prompts = _dataloader(data, int(num_prompts), shuffle=master.data["shuffle"], drop_last=True)
    if latest is not None:
        load_dataloader(prompts, Path(latest), master.data)
    steps = _count_steps(recipe, prompts)
    master.policy["megatron_cfg"]["train_iters"] = steps  # as NeMo RL's setup does
    validates = keys["val_period"] > 0 or keys["val_at_start"] or keys["val_at_end"]
    val_prompts = _dataloader(val_data, keys["val_batch_size"]) if validates else None
    with backends(master, tokenizer, weights_path) as (policy, generation):
        loss = install(policy, generation, master, completed_steps(state))
        if policy.cfg.fp8_kv_cache and latest is None:  # NeMo RL validates before its first calibration
            first = [data[i] for i in range(keys["num_prompts_per_step"])]
            policy.calibrate_qkv_fp8_scales(_pad_prompts(first, tokenizer.pad_token_id))
        yield LoopArguments(policy, generation, prompts, val_prompts, loss, logger, checkpointer, state, master, steps)


@contextmanager
def set_up_nemo_rl_workers(
    grpo: ModuleType, master: Any, recipe: NemoRlRecipe, tokenizer: Any, data: Any, val_data: Any
) -> Iterator[LoopArguments]:
    """Run NeMo RL's own `setup` with its own workers; an FP8 recipe gets FP8 on the wire between them."""
    from nemo_fp8rl.nemo_rl.adapters.mismatch_watch import watch_logger
    from nemo_fp8rl.nemo_rl.refit_transport.reporting import report_refits
    from nemo_fp8rl.nemo_rl.stock.worker_choice import declare_kv_cache, policy_factory

    loss, experts = prepare_nemo_rl_workers(master, recipe)
    policy, generation, _, _, prompts, val_prompts, _, logger, checkpointer, state, master, *_ = grpo.setup(
        master, tokenizer, data, val_data, policy_factory=policy_factory
    )
    declare_kv_cache(generation, master.policy)
    report_refits(policy, generation)
    watch_logger(*(logger, recipe.values, recipe.fp8rl, recipe.precision.flow, is_asynchronous(recipe.values), experts))
    try:
        yield LoopArguments(
            *(policy, generation, prompts, val_prompts, loss, logger, checkpointer, state, master),
            _count_steps(recipe, prompts),
        )
    finally:
        generation.shutdown()


def prepare_nemo_rl_workers(master: Any, recipe: NemoRlRecipe) -> tuple[Any, bool]:
    """Choose in NeMo RL's config how its own workers refit, and say so.

    Returns: the package's loss, and whether the model may be a mixture of experts
    """
    from transformers import AutoConfig

    from nemo_fp8rl.nemo_rl.adapters.loss_fn import GrpoLossFn
    from nemo_fp8rl.nemo_rl.stock.refit_choice import choose_refit
    from nemo_fp8rl.nemo_rl.stock.worker_choice import choose_workers

    for name in PACKAGE_WORKER_KEYS:
        if getattr(recipe.fp8rl, name) != getattr(Fp8RlConfig(), name):
            print(f"nemo-fp8rl: nemo_fp8rl.{name} has no effect on NeMo RL's own workers", flush=True)
    trainer = master.policy.get("megatron_cfg") or {}
    fused = bool(trainer.get("enabled") and trainer.get("use_fused_linear_logprobs"))
    loss = GrpoLossFn(loss_keys(master.model_dump()), fused, recipe.fp8rl.correction)
    if recipe.precision.flow == "bf16":  # NeMo RL also runs models whose config cannot be read this way
        return loss, True
    model = AutoConfig.from_pretrained(master.policy["model_name"]).get_text_config()
    latent = getattr(model, "kv_lora_rank", None) is not None
    choose_workers(master.policy, model.num_hidden_layers, recipe.checkout.engines_survive_fp8_refit, latent)
    nodes, has_engines = recipe.values["cluster"]["num_nodes"], recipe.checkout.has_checkpoint_engines
    print(f"nemo-fp8rl: {choose_refit(master.policy, recipe.fp8rl.refit, nodes, has_engines)}", flush=True)
    return loss, any(getattr(model, name, None) for name in EXPERTS)


def _count_steps(recipe: NemoRlRecipe, prompts: Any) -> int:
    """Return the steps of the loop: grpo.max_num_steps, or those of max_num_epochs if these are fewer."""
    grpo = recipe.values["grpo"]
    if recipe.values["data"].get("use_multiple_dataloader"):  # several dataloaders have no length
        return int(grpo["max_num_steps"])
    return int(min(grpo["max_num_steps"], grpo["max_num_epochs"] * len(prompts)))


def _dataloader(data: Any, batch_size: int, shuffle: bool = False, drop_last: bool = False) -> Any:
    from nemo_rl.data.collate_fn import rl_collate_fn
    from torchdata.stateful_dataloader import StatefulDataLoader

    if data is None:
        raise UserError("there is no validation data: give data.validation or data.train.split_validation_size")
    return StatefulDataLoader(data, batch_size, shuffle=shuffle, collate_fn=rl_collate_fn, drop_last=drop_last)


def _pad_prompts(data: list[Any], pad_token_id: int) -> dict[str, Any]:
    """Return the prompts alone, padded, as NeMo RL's loop passes them to a calibration."""
    from nemo_rl.data.llm_message_utils import batched_message_log_to_flat_message

    logs = [datum["message_log"] for datum in data]
    flat, lengths = batched_message_log_to_flat_message(logs, pad_value_dict={"token_ids": pad_token_id})
    return {"input_ids": flat["token_ids"], "input_lengths": lengths}
