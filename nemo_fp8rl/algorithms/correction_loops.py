"""The one pass over the log-probs that rollout correction takes on a CPU; `correction` says what it computes.

Rows are read once into a row of differences, which stays in the cache for the rules and the weights. LLVM turns the
loops into vector code because every operation is on float32 and branches are selections; e^x is a polynomial for the
same reason (Cephes expf, within 2 units in the last place). The first call on a machine compiles (seconds); numba then
keeps the code beside this file, or in NUMBA_CACHE_DIR.
"""

import math
from typing import get_args

import numba as nb
import numpy as np
import torch
from torch import Tensor

from nemo_fp8rl.algorithms.correction_config import LARGEST_LOG, CorrectionConfig, Weight

f32, i32 = np.float32, np.int32
jit = nb.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
reduction = nb.njit(nogil=True, cache=True, error_model="numpy", fastmath=True)  # of finite numbers
LIMIT = 80.0
"""Arguments of e^x are clamped to +- this: float32 ends at 88."""
TOKEN, SUM, MEAN, MAX = range(4)
SCOPES = {"token": TOKEN, "seq_sum": SUM, "seq_mean": MEAN, "seq_max": MAX}
K1, K2, K3, DIFFERENCE = range(4)
KINDS = {"k1": K1, "k2": K2, "k3": K3}
NONE, TOKENS, SEQUENCE, GEOMETRIC = range(len(get_args(Weight)))


def decide(
    prev: Tensor, gen: Tensor, mask: Tensor, cfg: CorrectionConfig, weights: Tensor, kept: Tensor, clamped: Tensor
) -> Tensor:
    """Fill the last three, [B, T]; returns how many tokens of the mask have no finite log-probability, float32 []."""
    rules, bounds = np.zeros((len(cfg.reject), 2), np.int64), np.zeros((len(cfg.reject), 2), f32)
    for i, rule in enumerate(cfg.reject):
        scope, _, kind = rule.statistic.rpartition("_")
        rules[i] = SCOPES.get(scope, TOKEN), KINDS.get(kind, DIFFERENCE)
        bounds[i] = rule.limits()
    lost = decide_rows(
        *(tensor.detach().float().contiguous().numpy() for tensor in (prev, gen, mask)),
        get_args(Weight).index(cfg.weight),
        f32(cfg.weight_min or 0.0),
        f32(math.inf if cfg.weight_max is None else cfg.weight_max),
        f32(LARGEST_LOG),
        rules,
        bounds,
        *(tensor.numpy() for tensor in (weights, kept, clamped)),
    )
    return torch.tensor(lost, dtype=torch.float32)


@nb.njit(inline="always", error_model="numpy", fastmath={"contract", "nsz"})
def excess(x):
    """(e^x, e^x - 1 - x), the second without cancellation where x is small."""
    x = min(max(x, f32(-LIMIT)), f32(LIMIT))
    n = f32(math.floor(x * f32(1.4426950408889634) + f32(0.5)))
    r = x - n * f32(0.693359375) + n * f32(2.12194440e-4)
    p = f32(1.9875691500e-4) * r + f32(1.3981999507e-3)
    p = p * r + f32(8.3334519073e-3)
    p = p * r + f32(4.1665795894e-2)
    p = p * r + f32(1.6666665459e-1)
    p = (p * r + f32(5.0000001201e-1)) * r * r
    power = (p + r + f32(1)) * i32((i32(n) + i32(127)) << i32(23)).view(f32)
    return power, p if n == 0 else power - f32(1) - x


@reduction
def sum_of(logs):
    total = f32(0)
    for t in range(len(logs)):
        total += logs[t]
    return total


@reduction
def sum_of_squares(logs):
    total = f32(0)
    for t in range(len(logs)):
        total += logs[t] * logs[t] * f32(0.5)
    return total


@reduction
def sum_of_excess(logs):
    total = f32(0)
    for t in range(len(logs)):
        total += excess(logs[t])[1]
    return total


@reduction
def largest_square(logs):
    top = f32(0)
    for t in range(len(logs)):
        top = max(top, logs[t] * logs[t] * f32(0.5))
    return top


@reduction
def largest_excess(logs):
    top = f32(0)
    for t in range(len(logs)):
        top = max(top, excess(logs[t])[1])
    return top


@jit
def differences(p, g, m, logs, live):
    """Fill logs, 0 where not live; returns (tokens live, tokens of the mask)."""
    count, asked = i32(0), i32(0)
    for t in range(len(m)):
        x = p[t] - g[t]
        inside = m[t] > 0
        finite = inside & (abs(x) < f32(np.inf))
        logs[t] = x if finite else f32(0)
        live[t] = finite
        count += i32(finite)
        asked += i32(inside)
    return count, asked


@jit
def reject(scope, kind, least, most, p, g, logs, live, count, bad):
    """Add what one rule rejects to bad."""
    columns = len(logs)
    if scope == TOKEN:
        if kind == K1:
            for t in range(columns):
                bad[t] |= (logs[t] < least) | (logs[t] > most)
        elif kind == K2:
            for t in range(columns):
                x = logs[t] * logs[t] * f32(0.5)
                bad[t] |= (x < least) | (x > most)
        elif kind == K3:
            for t in range(columns):
                x = excess(logs[t])[1]
                bad[t] |= (x < least) | (x > most)
        else:
            for t in range(columns):
                x = abs(excess(p[t] if live[t] else f32(0))[0] - excess(g[t] if live[t] else f32(0))[0])
                bad[t] |= (x < least) | (x > most)
    elif scope == MAX and kind == K1:
        holds = True
        for t in range(columns):
            holds &= ((logs[t] >= least) & (logs[t] <= most)) | (not live[t])
        if not holds:
            bad[:] = True
    else:
        value = f32(0)
        if scope == MAX:
            value = largest_square(logs) if kind == K2 else largest_excess(logs)
        else:
            total = sum_of(logs) if kind == K1 else sum_of_squares(logs) if kind == K2 else sum_of_excess(logs)
            value = f32(total / max(count, i32(1))) if scope == MEAN else f32(total)
        if not (value >= least and value <= most):
            bad[:] = True


@jit
def weigh(weight, low, high, largest, logs, live, count, bad, w):
    """Fill w; live becomes what is kept, and bad what is clamped."""
    if weight == TOKENS:
        for t in range(len(w)):
            raw = excess(min(max(logs[t], -largest), largest))[0]
            bounded = min(max(raw, low), high)
            alive, rejected = live[t], bad[t]
            w[t] = bounded if alive & (not rejected) else f32(0)
            live[t] = alive & (not rejected)
            bad[t] = alive & (rejected | (raw != bounded))
        return
    total = f32(0)
    if weight != NONE:
        total = sum_of(logs)
    if weight == GEOMETRIC:
        total /= f32(max(count, i32(1)))
    raw = excess(min(max(total, -largest), largest))[0]
    bounded = min(max(raw, low), high)
    changed = raw != bounded
    for t in range(len(w)):
        alive, rejected = live[t], bad[t]
        w[t] = bounded if alive & (not rejected) else f32(0)
        live[t] = alive & (not rejected)
        bad[t] = alive & (rejected | changed)


@jit
def decide_rows(prev, gen, mask, weight, low, high, largest, rules, bounds, weights, kept, clamped):
    """Fill weights, kept and clamped, [B, T]; returns how many tokens of the mask have no finite log-prob.

    rules int64 [R, 2]: scope, kind. bounds float32 [R, 2]: min, max; of K1 their logarithms. low, high, largest:
    float32, bounds of the weight and of its logarithm.
    """
    logs = np.empty(prev.shape[1], f32)
    lost = 0
    for i in range(len(prev)):
        p, g, live, bad = prev[i], gen[i], kept[i], clamped[i]
        count, asked = differences(p, g, mask[i], logs, live)
        lost += asked - count
        bad[:] = False
        for r in range(len(rules)):
            reject(rules[r, 0], rules[r, 1], bounds[r, 0], bounds[r, 1], p, g, logs, live, count, bad)
        weigh(weight, low, high, largest, logs, live, count, bad, weights[i])
    return lost
