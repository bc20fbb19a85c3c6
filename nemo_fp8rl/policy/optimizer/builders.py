"""Builders of Megatron's gradient buffers, distributed optimizer and learning-rate schedule of a rank.

Callers build and step them inside `megatron_on_cpu`.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_fp8rl.config.policy_schema import OptimizerConfig as OptimizerKeys
from nemo_fp8rl.config.policy_schema import PolicyConfig
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.policy.optimizer.grad_reduce import GradReduceDdp
from nemo_fp8rl.policy.optimizer.scaled_adam import DTYPES, MASTER, MOMENTS, ScaledAdamW


def build_ddp(config: TransformerConfig, model: torch.nn.Module, cfg: Config, fp8_param: bool) -> GradReduceDdp:
    """Wrap the model with gradient buffers.

    fp8_param:  data-parallel ranks gather FP8 weights as FP8 bytes
    """
    choice = cfg.policy.megatron_cfg.distributed_data_parallel_config
    return GradReduceDdp(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=choice.grad_reduce_in_fp32, use_distributed_optimizer=True, fp8_param_gather=fp8_param
        ),
        model if cfg.policy.precision == "float32" else Float16Module(config, model),
        choice,
        cfg.nemo_fp8rl.grad_reduce == "fp8",
    )


def build_optimizer(policy: PolicyConfig, ddp: DistributedDataParallel, dtype: torch.dtype, fp8_param: bool) -> Any:
    """Build Megatron's distributed optimizer; its parts step by FusedAdam on a GPU, on a CPU by torch's AdamW.

    With `use_precision_aware_optimizer` the parts step by `FiniteFusedAdam` or `ScaledAdamW`.
    """
    keys = policy.megatron_cfg.optimizer
    config = OptimizerConfig(
        optimizer=keys.optimizer,
        lr=keys.lr,
        min_lr=keys.min_lr,
        weight_decay=keys.weight_decay,
        adam_beta1=keys.adam_beta1,
        adam_beta2=keys.adam_beta2,
        adam_eps=keys.adam_eps,
        clip_grad=keys.clip_grad or math.inf,  # with Megatron's own 0 there would be no norm to log
        bf16=policy.precision == "bfloat16",
        fp16=policy.precision == "float16",
        params_dtype=dtype,
        loss_scale=keys.loss_scale,
        initial_loss_scale=keys.initial_loss_scale,
        min_loss_scale=keys.min_loss_scale,
        loss_scale_window=keys.loss_scale_window,
        hysteresis=keys.hysteresis,
        use_distributed_optimizer=True,
        # with it a precision-aware optimizer leaves masters to Megatron, which quantizes them, so it gets it only then
        fp8_recipe="blockwise" if fp8_param else None,
    )
    if not keys.use_precision_aware_optimizer:
        return get_megatron_optimizer(config, [ddp])
    if next(ddp.parameters()).is_cuda:
        return _build_fused(config, keys, ddp)
    # Megatron refuses the key without Transformer Engine, whose FusedAdam alone has such states. By this attribute of
    # its own it leaves masters to the optimizer and gives it the gradients as they are, without float32 copies.
    config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    optimizer = get_megatron_optimizer(config, [ddp])
    for part in optimizer_parts(optimizer):
        if part.optimizer is not None:
            part.optimizer = ScaledAdamW(part.optimizer.param_groups, state_dtypes(keys), keys.store_param_remainders)
    return optimizer


def _build_fused(config: OptimizerConfig, keys: OptimizerKeys, ddp: DistributedDataParallel) -> Any:
    from nemo_fp8rl.policy.optimizer.fused_adam import FiniteFusedAdam

    dtypes = state_dtypes(keys)
    aware = replace(
        config,
        use_precision_aware_optimizer=True,
        main_params_dtype=dtypes[MASTER],
        exp_avg_dtype=dtypes["exp_avg"],
        exp_avg_sq_dtype=dtypes["exp_avg_sq"],
        store_param_remainders=keys.store_param_remainders,
    )
    optimizer = get_megatron_optimizer(aware, [ddp])
    for part in optimizer_parts(optimizer):
        if part.optimizer is not None:
            part.optimizer.__class__ = FiniteFusedAdam  # Megatron names the class itself
    return optimizer


def state_dtypes(keys: OptimizerKeys) -> dict[str, torch.dtype]:
    """Return the dtypes of the recipe's moments and masters."""
    names = (keys.main_params_dtype, keys.exp_avg_dtype, keys.exp_avg_sq_dtype)
    return {kind: DTYPES[name] for kind, name in zip((MASTER, *MOMENTS), names, strict=True)}


def is_precision_aware(part: Any) -> bool:
    """Return whether a part of Megatron's optimizer has states that are read and written by `read` and `write`."""
    return hasattr(part.optimizer, "read")


def steps_weights(part: Any) -> bool:
    """Return whether the pieces that a part steps are views of weights, and not masters."""
    return is_precision_aware(part) and part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8


def optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Yield the tensors of the optimizer's state, without those that are views of weights."""
    for part in optimizer_parts(optimizer):
        if part.optimizer is None:
            continue
        if not steps_weights(part):
            for group in part.optimizer.param_groups:
                yield from group["params"]
        if is_precision_aware(part):
            yield from part.optimizer.tensors()
        else:
            for state in part.optimizer.state.values():
                yield from (tensor for tensor in state.values() if isinstance(tensor, Tensor))


def optimizer_parts(optimizer: Any) -> list[Any]:
    """Return Megatron's optimizers of this rank's parameters: one, or two with experts."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def build_scheduler(policy: PolicyConfig, optimizer: Any) -> OptimizerParamScheduler:
    settings, schedule = policy.megatron_cfg.optimizer, policy.megatron_cfg.scheduler
    return OptimizerParamScheduler(
        optimizer,
        init_lr=schedule.lr_warmup_init,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=schedule.lr_warmup_iters,
        lr_decay_steps=schedule.lr_decay_iters,
        lr_decay_style=schedule.lr_decay_style,
        wsd_decay_steps=schedule.lr_wsd_decay_iters,
        lr_wsd_decay_style=schedule.lr_wsd_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
