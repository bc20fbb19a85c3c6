"""Transformer Engine's FusedAdam for a GPU, with states of few bytes that stay finite and keep what they need alone.

Differences from its class, which is Transformer Engine's 2.20 (pytorch/optimizers/fused_adam.py):

zeros    `_apply_scale` multiplies an FP8 state of zeros by 1 / 0 and keeps NaN; a float16 or FP8 state whose scale has
         an infinite reciprocal likewise. Such a state is stored as zeros (`scaled_adam.choose_scale`)
columns  on GPUs whose FP8 matmuls read rows alone an FP8 tensor also has its transpose, a second byte that no step
         reads; it is dropped
host     states move to the host and back as bytes
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformer_engine.pytorch.optimizers import FusedAdam

from nemo_fp8rl.fp8.block_scaled import E4M3
from nemo_fp8rl.policy.optimizer.scaled_adam import LARGEST, MASTER, choose_scale, join_master, split_master

MASTER_STATE = "master_param"
"""Transformer Engine's name of the master."""


class FiniteFusedAdam(FusedAdam):
    """FusedAdam with the reading and writing methods of `ScaledAdamW`; an object of FusedAdam becomes one of it."""

    def _apply_scale(self, state_name: str, unscaled_state: Tensor, scaled_state: Any, scale: Tensor) -> None:
        dtype = self.name_to_dtype_map[state_name]
        if dtype not in LARGEST:
            super()._apply_scale(state_name, unscaled_state, scaled_state, scale)
            return
        chosen, reciprocal = choose_scale(unscaled_state, dtype)
        _store(scaled_state, unscaled_state, scale, chosen, reciprocal)

    def _initialize_state(self, param: Tensor, state_name: str, *arguments: Any, **keywords: Any) -> None:
        super()._initialize_state(param, state_name, *arguments, **keywords)
        state: Any = self.state[param][state_name]
        if _is_fp8(state):
            state._quantizer.set_usage(rowwise=True, columnwise=False)
            state.update_usage(rowwise_usage=True, columnwise_usage=False)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtypes of moments and master, by name."""
        return {MASTER: self.master_weight_dtype, "exp_avg": self.exp_avg_dtype, "exp_avg_sq": self.exp_avg_sq_dtype}

    def read(self, piece: Tensor, kind: str) -> Tensor:
        """Return the float32 values of a kind of state, wherever they are; they may be the stored tensor."""
        state = self.state[piece]
        name = MASTER_STATE if kind == MASTER else kind
        if kind == MASTER and (piece.dtype == torch.float32 or not state):
            return piece.detach().float()
        stored: Any = state[name]
        if stored.dtype == torch.int16:
            return join_master(piece.detach(), stored.to(piece.device))
        if _is_fp8(stored):
            data = stored._data
            return data.view(E4M3).float() * stored._scale_inv.to(data.device)
        values = stored.float()
        return values * self._scales[piece][name].to(values.device) if stored.dtype == torch.float16 else values

    @torch.no_grad()
    def write(self, piece: Tensor, kind: str, values: Tensor, scale: float | None = None) -> None:
        """Store float32 values; `ScaledAdamW.write` has the rules and arguments."""
        has_remainder = self.store_param_remainders and piece.dtype == torch.bfloat16
        if not self.state[piece]:
            self.initialize_state(piece, has_remainder)
        name = MASTER_STATE if kind == MASTER else kind
        values = values.to(piece.device)
        if kind == MASTER and piece.dtype == torch.float32:
            piece.copy_(values)
        elif kind == MASTER and has_remainder:
            for place, part in zip((piece, self.state[piece][name]), split_master(values), strict=True):
                place.copy_(part)
        elif scale is None:
            self.set_scaled_state(piece, name, values.clone())  # which scales its argument in place
        else:
            chosen = torch.full((1,), scale, device=piece.device)
            _store(self.state[piece][name], values.clone(), self._scales[piece][name], chosen, chosen.reciprocal())
            if _is_fp8(self.state[piece][name]):
                self.state[piece][name]._scale_inv.copy_(chosen)

    def scale(self, piece: Tensor, kind: str) -> float | None:
        """Return the scale of a stored kind; None where it has none."""
        name = MASTER_STATE if kind == MASTER else kind
        stored: Any = self.state[piece].get(name)
        if stored is None or self.name_to_dtype_map[name] not in LARGEST:
            return None
        return float(stored._scale_inv if _is_fp8(stored) else self._scales[piece][name])

    def tensors(self) -> Iterator[Tensor]:
        """Yield what is stored beside the pieces, without scales: FP8 as bytes."""
        for state in self.state.values():
            for stored in state.values():
                yield stored._data if _is_fp8(stored) else stored

    def move(self, device: str) -> None:
        """Move what is stored beside the pieces; scales stay on the GPU."""
        for state in self.state.values():
            for name, stored in state.items():
                if _is_fp8(stored):
                    stored._data = stored._data.to(device=device)
                else:
                    state[name] = stored.to(device=device)


def _is_fp8(stored: Any) -> bool:
    return hasattr(stored, "_quantizer")


def _store(stored: Any, values: Tensor, place: Tensor, scale: Tensor, reciprocal: Tensor) -> None:
    """Scale float32 values in place, and store them and their scale.

    reciprocal:  0 stores zeros
    """
    place.copy_(scale)
    if _is_fp8(stored):
        is_zero = reciprocal == 0
        stored._quantizer.scale.copy_(torch.where(is_zero, 1.0, reciprocal))
        stored.copy_(values.masked_fill_(is_zero, 0.0))
    else:
        stored.copy_(values.mul_(reciprocal))
