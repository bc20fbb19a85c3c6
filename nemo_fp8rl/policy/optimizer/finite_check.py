"""The check of loss and gradients before an optimizer step."""

import math

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from nemo_fp8rl.algorithms.loss import EXTREMA
from nemo_fp8rl.policy.interface import DivergenceError
from nemo_fp8rl.policy.optimizer.loss_scale import LossScale

OPTIMIZER = "policy.megatron_cfg.optimizer"


def overflows(metrics: dict[str, float], ddp: DistributedDataParallel, scale: LossScale | None = None) -> bool:
    """Return True, on all ranks alike, if gradients overflowed at a loss scale that can fall.

    Megatron checks gradients only when it scales the loss. A NaN or an infinity shows in the smallest or largest value
    of a gradient, and these need no temporary tensor. It shows as well after a sum in FP8, where a block with such a
    value becomes NaN.

    metrics:  of the loss
    scale:    None without one
    Raises:   DivergenceError, on all ranks alike, where the loss is not finite, or gradients that no scale explains
    """
    trained = (parameter for parameter in ddp.parameters() if parameter.requires_grad)
    extremes = torch.stack([value for parameter in trained for value in parameter.main_grad.aminmax()])
    gradients = bool(extremes.isfinite().all())  # one read for all gradients, because every read waits for the GPU
    # extrema are left out: without a token they are infinite
    sums = (value for name, value in metrics.items() if not name.endswith(tuple(EXTREMA)))
    bad = torch.tensor([float(not gradients), float(not all(map(math.isfinite, sums)))])
    dist.all_reduce(bad)
    has_overflow, has_bad_loss = (bad > 0).tolist()
    if not has_overflow and not has_bad_loss:
        return False
    if scale is None:
        raise DivergenceError(
            "a gradient or the loss is not finite, so no weight was moved: training diverged, lower "
            f"{OPTIMIZER}.lr or its clip_grad"
        )
    if has_bad_loss:
        raise DivergenceError(
            "the loss is not finite, so no weight was moved: an activation is above 65504, the largest float16, or "
            f"training diverged; set policy.precision=bfloat16, or lower {OPTIMIZER}.lr or its clip_grad"
        )
    if not scale.can_fall:
        raise DivergenceError(
            f"a gradient is above 65504, the largest float16, at a loss scale of {scale.value:g}, which cannot fall, "
            f"so no weight was moved: set {OPTIMIZER}.loss_scale=null for a scale that falls, lower "
            f"{OPTIMIZER}.min_loss_scale, or set policy.precision=bfloat16"
        )
    return True
