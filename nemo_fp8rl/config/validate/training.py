"""Rules between keys of the trainer: layout, batches, schedule, optimizer's state and gradients."""

import math
from typing import Any

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.policy_schema import OptimizerConfig
from nemo_fp8rl.config.schema import Config


def lookup(cfg: Any, key: str) -> Any:
    """Return the value of a dotted key."""
    for part in key.split("."):
        cfg = getattr(cfg, part)
    return cfg


def check_training(cfg: Config) -> None:
    """Raise UserError for values that contradict each other."""
    _check_parallel_sizes(cfg)
    _check_batch_sizes(cfg)
    _check_schedule(cfg)
    _check_optimizer_states(cfg)
    _check_gradients(cfg)
    _check_loss_scale(cfg)


def _check_schedule(cfg: Config) -> None:
    optimizer, scheduler = cfg.policy.megatron_cfg.optimizer, cfg.policy.megatron_cfg.scheduler
    block = "policy.megatron_cfg"
    if scheduler.lr_warmup_iters >= scheduler.lr_decay_iters:
        raise UserError(
            f"{block}.scheduler.lr_warmup_iters={scheduler.lr_warmup_iters} must be below "
            f"{block}.scheduler.lr_decay_iters={scheduler.lr_decay_iters}"
        )
    _check_wsd(cfg, f"{block}.scheduler")
    for key, value in (
        ("optimizer.min_lr", optimizer.min_lr),
        ("scheduler.lr_warmup_init", scheduler.lr_warmup_init),
    ):
        if value > optimizer.lr:
            raise UserError(f"{block}.{key}={value} must not be above {block}.optimizer.lr={optimizer.lr}")


def _check_wsd(cfg: Config, block: str) -> None:
    scheduler = cfg.policy.megatron_cfg.scheduler
    style, steps = scheduler.lr_decay_style, scheduler.lr_wsd_decay_iters
    if style != "WSD":
        if steps is not None or scheduler.lr_wsd_decay_style != "exponential":
            raise UserError(
                f"{block}.lr_wsd_decay_iters and lr_wsd_decay_style are of the schedule WSD, and {block}."
                f"lr_decay_style is {style}: remove them, or set lr_decay_style=WSD"
            )
    elif steps is None:
        raise UserError(f"{block}.lr_decay_style=WSD needs {block}.lr_wsd_decay_iters, the steps of its decay")
    elif scheduler.lr_warmup_iters + steps > scheduler.lr_decay_iters:
        raise UserError(
            f"{block}.lr_wsd_decay_iters={steps} and lr_warmup_iters={scheduler.lr_warmup_iters} do not fit in "
            f"{block}.lr_decay_iters={scheduler.lr_decay_iters}, which is warm-up, constant rate and decay; raise it"
        )


def _check_optimizer_states(cfg: Config) -> None:
    cfg.policy.megatron_cfg.optimizer.check()
    reasons = {
        "policy.precision=float32": (cfg.policy.precision == "float32", "a float32 weight is its own master"),
        "nemo_fp8rl.fp8_param=true": (cfg.nemo_fp8rl.fp8_param, "FP8 weights are quantized from float32 masters"),
    }
    for key, (is_set, reason) in reasons.items():
        if is_set and cfg.policy.megatron_cfg.optimizer.main_params_dtype == "fp16":
            raise UserError(
                f"policy.megatron_cfg.optimizer.main_params_dtype=fp16 with {key}: {reason}; set it to fp32"
            )


def _check_loss_scale(cfg: Config) -> None:
    keys, block = cfg.policy.megatron_cfg.optimizer, "policy.megatron_cfg.optimizer"
    if cfg.policy.precision != "float16":
        names = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
        for name, default in ((name, getattr(OptimizerConfig, name)) for name in names):
            if (value := getattr(keys, name)) != default:
                raise UserError(
                    f"{block}.{name}={value} is of a loss in float16, and policy.precision is {cfg.policy.precision}: "
                    "remove it, or set policy.precision=float16"
                )
        return
    ddp = "policy.megatron_cfg.distributed_data_parallel_config"
    if keys.use_precision_aware_optimizer and not lookup(cfg, f"{ddp}.grad_reduce_in_fp32"):
        raise UserError(
            f"{ddp}.grad_reduce_in_fp32=false with policy.precision=float16 and {block}.use_precision_aware_optimizer="
            "true: gradients stay float16 when the loss scale is divided out of them, and small ones become 0; set one "
            "of grad_reduce_in_fp32=true and use_precision_aware_optimizer=false"
        )


def _check_gradients(cfg: Config) -> None:
    choice, block = cfg.policy.megatron_cfg.distributed_data_parallel_config, "policy.megatron_cfg"
    key = f"{block}.distributed_data_parallel_config.reduce_scatter_with_fp32_accumulation=true"
    if not choice.reduce_scatter_with_fp32_accumulation:
        return
    if cfg.nemo_fp8rl.grad_reduce == "fp8":
        raise UserError(
            f"nemo_fp8rl.grad_reduce=fp8 sends gradients in FP8 and sums them in float32, {key} sends them in "
            "policy.precision: set one of the two, nemo_fp8rl.grad_reduce=auto or the other to false"
        )
    if choice.grad_reduce_in_fp32:
        raise UserError(
            f"{key} is for gradients in policy.precision, and "
            f"{block}.distributed_data_parallel_config.grad_reduce_in_fp32=true has them in float32: set that to false"
        )


def _check_parallel_sizes(cfg: Config) -> None:
    """Rules that do not need the model's sizes; `policy.weights.layout` has the others."""
    parallel, ranks, block = cfg.policy.megatron_cfg, cfg.cluster.train_ranks, "policy.megatron_cfg"
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    context = parallel.context_parallel_size
    if ranks % (tensor * pipeline * context):
        raise UserError(
            f"cluster.train_ranks={ranks} is not a multiple of {block}.tensor_model_parallel_size={tensor} times "
            f"{block}.pipeline_model_parallel_size={pipeline} times {block}.context_parallel_size={context}"
        )
    if parallel.sequence_parallel and tensor == 1:
        raise UserError(f"{block}.sequence_parallel=true needs {block}.tensor_model_parallel_size above 1")


def _check_batch_sizes(cfg: Config) -> None:
    policy, ranks = cfg.policy, cfg.data_parallel_size
    dynamic, packing = policy.dynamic_batching, policy.sequence_packing
    if dynamic.enabled and packing.enabled:
        raise UserError("policy.dynamic_batching and policy.sequence_packing are both enabled; enable one of them")
    budgets = [f"dynamic_batching.{name}" for name in ("train_mb_tokens", "logprob_mb_tokens") if dynamic.enabled]
    budgets += [f"sequence_packing.{name}" for name in ("train_mb_tokens", "logprob_mb_tokens") if packing.enabled]
    for key in budgets:
        if lookup(policy, key) < policy.max_total_sequence_length:
            raise UserError(
                f"policy.{key}={lookup(policy, key)} holds no sample of "
                f"policy.max_total_sequence_length={policy.max_total_sequence_length} tokens; raise it"
            )
    by_tokens = dynamic.enabled or packing.enabled
    if by_tokens and policy.train_global_batch_size % ranks:
        raise UserError(
            f"{_replicas(cfg)} does not divide policy.train_global_batch_size={policy.train_global_batch_size}"
        )
    if not by_tokens and policy.train_global_batch_size % (policy.train_micro_batch_size * ranks):
        largest = math.gcd(policy.train_global_batch_size // ranks, policy.train_micro_batch_size)
        fitting = "" if policy.train_global_batch_size % ranks else f"; policy.train_micro_batch_size={largest} does"
        raise UserError(
            f"policy.train_micro_batch_size={policy.train_micro_batch_size} times {_replicas(cfg)} does not "
            f"divide policy.train_global_batch_size={policy.train_global_batch_size}{fitting}"
        )


def _replicas(cfg: Config) -> str:
    """The number of data-parallel ranks, in words that name its keys."""
    if cfg.data_parallel_size == cfg.cluster.train_ranks:
        return f"cluster.train_ranks={cfg.cluster.train_ranks}"
    return f"the {cfg.data_parallel_size} replicas of the model on cluster.train_ranks={cfg.cluster.train_ranks}"
