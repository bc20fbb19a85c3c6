"""AdamW whose state between steps has few bytes, on a CPU, by the rules of Transformer Engine's FusedAdam.

exp_avg, exp_avg_sq   float32, bfloat16, or float16 and FP8 (E4M3 bytes) with one scale for each piece of a parameter
master                float32; or the 16 bits that a bfloat16 weight lacks (exact); or float16 with a scale

A step reads the state into float32, updates it, and rounds it again with scales of its new largest magnitudes. Between
steps nothing else is kept. Source: Transformer Engine 2.20, pytorch/optimizers/fused_adam.py (scales, order) and
common/multi_tensor/adam.cu (arithmetic, remainders); its kernel may also fuse a product and a sum, which can change the
last bit.

One rule differs. Where a piece is all zeros, or so small that the reciprocal of its scale is infinite, Transformer
Engine's FP8 multiplies 0 by infinity and keeps NaN. An expert that gets no token decays to such a piece. It is stored
as zeros here.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.fp8.block_scaled import E4M3

MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}
"""Megatron's dtype of a state by its name in a recipe; bytes stand for FP8."""
LARGEST = {torch.float16: torch.finfo(torch.float16).max / 2, torch.uint8: 448.0}
"""The largest magnitude that a scaled state stores, by its dtype."""


def choose_scale(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (scale, its reciprocal), float32 [1], for a piece; the reciprocal is 0 where the piece counts as zeros."""
    low, high = torch.aminmax(values)
    scale = (torch.maximum(-low, high) / LARGEST[dtype]).view(1)
    reciprocal = scale.reciprocal()
    is_zero = reciprocal.isinf()  # a NaN stays one
    return torch.where(is_zero, 1.0, scale), torch.where(is_zero, 0.0, reciprocal)


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split float32 values into (nearest bfloat16, a tie away from zero; the low 16 bits, int16)."""
    bits = master.view(torch.int32)
    low, high = bits.to(torch.int16), (bits >> 16).to(torch.int16)
    return (high + (low < 0)).view(torch.bfloat16), low


def join_master(weight: Tensor, low: Tensor) -> Tensor:
    """Return the float32 values that `split_master` split."""
    high = weight.view(torch.int16).int() - (low < 0).int()
    return (high << 16 | (low.int() & 0xFFFF)).view(torch.float32)


class ScaledAdamW(torch.optim.Optimizer):
    """Steps pieces of parameters by their attribute `decoupled_grad`, as FusedAdam does for Megatron.

    groups:       Megatron's groups of pieces; a float32 piece is its master
    dtypes:       dtype of each moment and of the master, by name
    remainders:   store of the float32 master of a bfloat16 piece the low 16 bits alone
    """

    def __init__(self, groups: list[dict[str, Any]], dtypes: dict[str, torch.dtype], remainders: bool) -> None:
        super().__init__([{"params": []}], {})
        self.param_groups = groups  # as Megatron sets them: torch refuses a piece that is a view of its parameter
        self.dtypes, self.remainders = dtypes, remainders

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for piece in group["params"]:
                if not self.state[piece]:
                    self._start(piece)
                values = {kind: self.read(piece, kind) for kind in (MASTER, *MOMENTS)}
                update(piece.decoupled_grad.float(), values, group)
                for kind, value in values.items():
                    self.write(piece, kind, value)
                if piece.dtype != torch.float32 and not self._has_remainder(piece):
                    piece.copy_(values[MASTER])

    def read(self, piece: Tensor, kind: str) -> Tensor:
        """Return the float32 values of a kind of state; they may be the stored tensor."""
        state = self.state[piece]
        if kind == MASTER and (piece.dtype == torch.float32 or not state):
            return piece.detach().float()
        stored = state[kind]
        if kind == MASTER and self._has_remainder(piece):
            return join_master(piece.detach(), stored)
        values = stored.view(E4M3).float() if stored.dtype == torch.uint8 else stored.float()
        return values.mul_(state[f"{kind}_scale"]) if stored.dtype in LARGEST else values

    @torch.no_grad()
    def write(self, piece: Tensor, kind: str, values: Tensor, scale: float | None = None) -> None:
        """Store float32 values.

        A master that is stored as a remainder also sets the piece; another one leaves it.
        scale:  None chooses one
        """
        if not self.state[piece]:
            self._start(piece)
        if kind == MASTER and piece.dtype == torch.float32:
            piece.copy_(values)
            return
        state = self.state[piece]
        stored = state[kind]
        if kind == MASTER and self._has_remainder(piece):
            for place, part in zip((piece, stored), split_master(values), strict=True):
                place.copy_(part)
            return
        if stored.dtype not in LARGEST:
            stored.copy_(values)
            return
        if scale is None:
            chosen, reciprocal = choose_scale(values, stored.dtype)
            if stored.dtype == torch.uint8 and reciprocal:  # the kernel that quantizes keeps this reciprocal
                chosen = reciprocal.reciprocal()
        else:
            chosen = torch.full((1,), scale)
            reciprocal = chosen.reciprocal()
        state[f"{kind}_scale"].copy_(chosen)
        scaled = values * reciprocal
        if stored.dtype == torch.uint8:
            stored.copy_(scaled.clamp_(-LARGEST[torch.uint8], LARGEST[torch.uint8]).to(E4M3).view(torch.uint8))
        else:
            stored.copy_(scaled)

    def scale(self, piece: Tensor, kind: str) -> float | None:
        """Return the scale of a stored kind; None where it has none."""
        scale = self.state[piece].get(f"{kind}_scale")
        return None if scale is None else float(scale)

    def tensors(self) -> Iterator[Tensor]:
        """Yield what is stored beside the pieces."""
        for state in self.state.values():
            yield from state.values()

    def _has_remainder(self, piece: Tensor) -> bool:
        return self.remainders and self.dtypes[MASTER] == torch.float32 and piece.dtype == torch.bfloat16

    def _start(self, piece: Tensor) -> None:
        state = self.state[piece]
        for kind in (*MOMENTS, MASTER):
            if kind == MASTER and piece.dtype == torch.float32:
                continue
            dtype = torch.int16 if kind == MASTER and self._has_remainder(piece) else self.dtypes[kind]
            state[kind] = torch.zeros(piece.shape, dtype=dtype)
            if dtype in LARGEST:
                state[f"{kind}_scale"] = torch.ones(1)
        if piece.dtype != torch.float32 and not self._has_remainder(piece):
            self.write(piece, MASTER, piece.detach().float())


def update(grad: Tensor, values: dict[str, Tensor], group: dict[str, Any]) -> None:
    """Take a step of AdamW in place; float32 tensors of one shape.

    values: master and moments
    group:  Megatron's, with lr, betas, eps, weight_decay and step
    Source: adam.cu, `adam_update`; it computes 1 - beta in float32 and the powers of beta in float64
    """
    master, mean, square = (values[kind] for kind in (MASTER, *MOMENTS))
    first, second = (torch.tensor(beta) for beta in group["betas"])
    mean.mul_(first).add_(grad * (1 - first))
    square.mul_(second).add_((grad * (1 - second)).mul_(grad))
    corrections = [float(torch.tensor(1 - float(beta) ** group["step"])) for beta in (first, second)]
    denominator = (square / corrections[1]).sqrt_().add_(group["eps"])
    change = (mean / corrections[0]).div_(denominator).add_(master * group["weight_decay"])
    master.sub_(change.mul_(group["lr"]))
