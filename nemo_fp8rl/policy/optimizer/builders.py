"""Builders of Megatron's gradient buffers, distributed optimizer and learning-rate schedule of a rank.

Callers build and step them inside `megatron_on_cpu`.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_fp8rl.algorithms.loss import EXTREMA
from nemo_fp8rl.config.policy_schema import PolicyConfig
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.policy.interface import DivergenceError
from nemo_fp8rl.policy.optimizer.grad_reduce import GradReduceDdp


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
        Float16Module(config, model) if cfg.policy.precision == "bfloat16" else model,
        choice,
        cfg.nemo_fp8rl.grad_reduce == "fp8",
    )


def build_optimizer(policy: PolicyConfig, ddp: DistributedDataParallel, dtype: torch.dtype, fp8_param: bool) -> Any:
    optimizer = policy.megatron_cfg.optimizer
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer=optimizer.optimizer,
            lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.adam_beta1,
            adam_beta2=optimizer.adam_beta2,
            adam_eps=optimizer.adam_eps,
            clip_grad=optimizer.clip_grad or math.inf,  # with Megatron's own 0 there would be no norm to log
            bf16=policy.precision == "bfloat16",
            params_dtype=dtype,
            use_distributed_optimizer=True,
            fp8_recipe="blockwise" if fp8_param else None,
        ),
        [ddp],
    )


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
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def check_finite(metrics: dict[str, float], ddp: DistributedDataParallel) -> None:
    """Raise DivergenceError, on all ranks alike, unless gradients and loss are finite.

    Megatron checks gradients only when it scales the loss. A NaN or an infinity shows in the smallest or largest value
    of a gradient, and these need no temporary tensor. It shows as well after a sum in FP8, where a block with such a
    value becomes NaN.
    """
    trained = (parameter for parameter in ddp.parameters() if parameter.requires_grad)
    extremes = torch.stack([value for parameter in trained for value in parameter.main_grad.aminmax()])
    gradients = bool(extremes.isfinite().all())  # one read for all gradients, because every read waits for the GPU
    # extrema are left out: without a token they are infinite
    sums = (value for name, value in metrics.items() if not name.endswith(tuple(EXTREMA)))
    bad = torch.tensor(float(not gradients or not all(map(math.isfinite, sums))))
    dist.all_reduce(bad)
    if bad:
        raise DivergenceError(
            "a gradient or the loss is not finite, so no weight was moved: training diverged, lower "
            "policy.megatron_cfg.optimizer.lr or its clip_grad"
        )
