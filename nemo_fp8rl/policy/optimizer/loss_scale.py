"""The scale of the loss that keeps float16 gradients in the range of float16, by Megatron's own scalers.

The loss is multiplied by the scale before the backward pass. Megatron divides the float32 gradients by it before it
takes their norm and clips them, so both are of gradients without a scale. A step whose gradients overflow is skipped:
weights, optimizer and schedule stay as they are, and the scale is halved once `hysteresis` steps have overflowed. After
`loss_scale_window` steps in a row without an overflow it is doubled.

Megatron gives each part of its optimizer (dense weights, experts) a scaler and a flag of its own, and scales the loss
by the first of them. Scales of two parts that do not overflow at the same steps would part, and the second part would
be divided by a wrong scale. Here one flag of all gradients on all ranks drives all scalers, which so stay equal.
Source: megatron/core/optimizer/grad_scaler.py and optimizer.py (`ChainedOptimizer.prepare_grads`, `get_loss_scale`).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.optimizer.grad_scaler import DynamicGradScaler

from nemo_fp8rl.policy.optimizer.builders import optimizer_parts

TRACKERS = ("growth_tracker", "hysteresis_tracker")
"""Megatron's counters of a dynamic scale: steps without an overflow, and overflows before the scale falls."""


class LossScale:
    """The scalers of a rank's optimizer, which have equal states.

    scalers:  of each part of the optimizer, at least one
    """

    def __init__(self, scalers: list[Any]) -> None:
        self.scalers = scalers

    @classmethod
    def of(cls, optimizer: Any) -> "LossScale | None":
        """Return the loss scale of an optimizer; None for one that trains in another precision than float16."""
        scalers = [part.grad_scaler for part in optimizer_parts(optimizer)]
        return cls(scalers) if any(scaler is not None for scaler in scalers) else None

    @property
    def value(self) -> float:
        return float(self.scalers[0].scale)

    @property
    def can_fall(self) -> bool:
        scaler = self.scalers[0]
        return isinstance(scaler, DynamicGradScaler) and bool(scaler.scale > scaler.min_scale)

    def record_overflow(self) -> None:
        """Count a step that was skipped; a step that is taken is counted by Megatron."""
        for scaler in self.scalers:
            scaler.update(True)

    def state(self) -> dict[str, float]:
        """Return the scale and its counters; empty for a constant scale."""
        state = self.scalers[0].state_dict()
        return {name: float(value) for name, value in state.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Set what `state` returned. Raises KeyError, TypeError or ValueError for what it did not return."""
        for scaler in self.scalers:
            if isinstance(scaler, DynamicGradScaler):
                value = float(state["scale"])
                if not 0 < value < math.inf:
                    raise ValueError(f"a loss scale of {value:g}")
                scale = torch.tensor([value], dtype=torch.float32)
                scaler.load_state_dict({"scale": scale} | {name: int(state[name]) for name in TRACKERS})
