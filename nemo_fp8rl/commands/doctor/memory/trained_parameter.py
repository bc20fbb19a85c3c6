"""Bytes of one trained parameter: weight, gradient, master and Adam's moments, by the dtypes that a recipe names.

Sources, for Megatron Core 0.16 and Transformer Engine 2.20:

- `optimizer/optimizer_config.py` and `optimizer/distrib_optimizer.py` of megatron/core: with the precision-aware
  optimizer masters are Transformer Engine's, as 16 remaining bits of a bfloat16 weight (store_param_remainders), whole,
  or in float16, and gradients are read as they are. With an FP8 recipe in OptimizerConfig float32 masters stay
  Megatron's, and then, as without the precision-aware optimizer, a step copies bfloat16 gradients to float32.
- `FusedAdam.step` in transformer_engine/pytorch/optimizers/fused_adam.py: a step copies every state that is not float32
  to float32, for all parameters of a group at once, except two moments in bfloat16, which its kernel reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_fp8rl.commands.doctor.memory.byte_widths import BF16, FP32

WIDTHS = {"fp32": FP32, "bf16": BF16, "fp16": 2, "fp8": 1}
REMAINDER = 2


@dataclass(frozen=True)
class TrainedParameter:
    """The bytes of one trained parameter; replicas share masters, moments and copies.

    gradient_copy:   of the gradient in float32, in an optimizer step
    state_copies:    of the optimizer's state in float32, in an optimizer step
    keeps_gradient:  the memory of gradients stays between steps
    """

    weight: float
    gradient: float
    master: float
    exp_avg: float
    exp_avg_sq: float
    gradient_copy: float
    state_copies: float
    keeps_gradient: bool = True

    @property
    def state(self) -> float:
        """The bytes of the optimizer's state."""
        return self.master + self.exp_avg + self.exp_avg_sq

    @property
    def between_steps(self) -> float:
        return self.weight + self.state + (self.gradient if self.keeps_gradient else 0)

    @property
    def in_step(self) -> float:
        """The most bytes in an optimizer step."""
        return self.weight + self.state + self.gradient + self.gradient_copy + self.state_copies

    def __str__(self) -> str:
        moments = " + ".join(f"{size:g}" for size in (self.exp_avg, self.exp_avg_sq))
        parts = f"weight {self.weight:.3g}, gradient {self.gradient:g}, master {self.master:g}, moments {moments}"
        return (
            f"bytes of a trained parameter: {parts}; {self.between_steps:.3g} between optimizer steps, "
            f"{self.in_step:.3g} in one; replicas share masters and moments"
        )


def trained_parameter(
    optimizer: Mapping[str, Any],
    weight: float,
    gradient: int,
    has_recipe: bool,
    keeps_gradient: bool = True,
    in_bfloat16: bool = True,
) -> TrainedParameter:
    """Return the bytes of a parameter that Megatron's distributed optimizer trains.

    optimizer:   the block policy.megatron_cfg.optimizer
    weight:      bytes of the weight
    gradient:    bytes of its gradient
    has_recipe:  Megatron's OptimizerConfig has an FP8 recipe
    in_bfloat16: policy.precision is bfloat16, whose masters can be stored as 16 remaining bits
    """
    gradient_copy = FP32 if gradient < FP32 else 0
    if not optimizer.get("use_precision_aware_optimizer"):
        return TrainedParameter(weight, gradient, FP32, FP32, FP32, gradient_copy, 0, keeps_gradient)
    moments = [str(optimizer.get(name) or "fp32") for name in ("exp_avg_dtype", "exp_avg_sq_dtype")]
    main = str(optimizer.get("main_params_dtype") or "fp32")
    of_megatron = has_recipe and main == "fp32"
    master = WIDTHS[main]
    if main == "fp32" and in_bfloat16 and not of_megatron and optimizer.get("store_param_remainders", True):
        master = REMAINDER
    is_fused = moments == ["bf16", "bf16"]
    scaled = [dtype for dtype in ([] if is_fused else moments) + [main] if dtype != "fp32"]
    exp_avg, exp_avg_sq = (WIDTHS[dtype] for dtype in moments)
    copies = (gradient_copy if of_megatron else 0), FP32 * len(scaled)
    return TrainedParameter(weight, gradient, master, exp_avg, exp_avg_sq, *copies, keeps_gradient)
