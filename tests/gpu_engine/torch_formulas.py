"""The operations of `nemo_fp8rl.ops` in plain torch on a CPU: the same roundings, to the bit."""

import torch
from torch import Tensor

LOG2E, LN2_HIGH, LN2_LOW = (float(torch.tensor(x)) for x in (1.4426950408889634, 0.693359375, -2.12194440e-4))
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
LOG = (
    *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
    *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
)


def fma(x: Tensor, y: Tensor | float, z: Tensor | float) -> Tensor:
    """x * y + z in float32 with one rounding.

    The product is exact in float64. The sum is rounded to odd, so that its rounding to float32 is the only one.
    """
    x, y, z = torch.broadcast_tensors(*(torch.as_tensor(t, dtype=torch.float32).double() for t in (x, y, z)))
    product = x * y
    total = product + z
    z_part = total - product
    error = (product - (total - z_part)) + (z - z_part)
    bits = total.view(torch.int64)
    away = (error > 0) == (total > 0)
    odd = torch.where(away, bits, bits - 1) | 1
    is_inexact = (error != 0) & error.isfinite()
    return torch.where(is_inexact, odd, bits).view(torch.float64).float()


def exp(x: Tensor) -> Tensor:
    bounded = torch.where(x > 88.0, 88.0, torch.where(x < -87.0, -87.0, x))
    k = fma(bounded, LOG2E, 12582912.0) - 12582912.0
    r = fma(k, -LN2_LOW, fma(k, -LN2_HIGH, bounded))
    p = torch.full_like(x, EXP[0])
    for c in EXP[1:]:
        p = fma(p, r, c)
    p = fma(p, r * r, r) + 1.0
    power = ((k.nan_to_num().int() + 127) << 23).view(torch.float32)
    return torch.where(x < -87.0, 0.0, p * power)


def log(x: Tensor) -> Tensor:
    bits = x.view(torch.int32)
    exponent = ((bits >> 23) - 126).float()
    m = ((bits & 0x007FFFFF) | 0x3F000000).view(torch.float32)
    is_small = m < torch.tensor(0.70710678118654752)
    exponent = torch.where(is_small, exponent - 1, exponent)
    z = torch.where(is_small, m + m, m) - 1
    p = torch.full_like(x, LOG[0])
    for c in LOG[1:]:
        p = fma(p, z, c)
    square = z * z
    y = fma(square, -0.5, fma(exponent, LN2_LOW, (p * z) * square))
    return torch.where(x.isnan(), x, fma(exponent, LN2_HIGH, z + y))


def tree_sum(x: Tensor) -> Tensor:
    """The sum over the last dimension, which is padded to a power of two."""
    size = 1 << (x.size(-1) - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, size - x.size(-1)))
    while x.size(-1) > 1:
        x = x[..., ::2] + x[..., 1::2]
    return x.squeeze(-1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    inverse = torch.tensor(1.0) / torch.tensor(float(x.size(-1)))
    root = fma(tree_sum(x32 * x32), inverse, torch.tensor(eps)).double().sqrt().float()  # torch rounds float32's twice
    scale = torch.div(torch.ones_like(root), root)
    return ((x32 * scale[..., None]) * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm(total, weight, eps), total


def rotate(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    cos, sin = table[positions][:, None].float().chunk(2, -1)
    x1, x2 = x.float().chunk(2, -1)
    return torch.cat((fma(-x2, sin, x1 * cos), fma(x1, sin, x2 * cos)), -1).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    return (torch.div(gate, 1 + exp(-gate)) * up).to(gate_up.dtype)


def sum_in_rank_order(parts: Tensor) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts.dtype)


def log_softmax(x: Tensor) -> Tensor:
    shifted = x - x.amax(-1, keepdim=True)
    columns = -(-x.size(-1) // 1024) * 1024
    terms = exp(torch.nn.functional.pad(shifted, (0, columns - x.size(-1)), value=float("-inf"))).unflatten(
        -1, (-1, 1024)
    )
    lanes = torch.zeros_like(terms[..., 0, :])
    for block in terms.unbind(-2):
        lanes = lanes + block
    return shifted - log(tree_sum(lanes))[..., None]
