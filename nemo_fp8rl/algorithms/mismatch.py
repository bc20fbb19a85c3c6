"""Metrics of the mismatch of trainer and engine on the tokens that the engine sampled, under names that users know.

With l = prev_logprobs - generation_logprobs (trainer minus engine), rho = e^l, and means over generated tokens:

    token_mult_prob_error    mean e^|l|                           NeMo RL; 1 is agreement, NVIDIA accepts 1.03 to 1.05
    gen_kl_error             mean e^l - 1 - l                     NeMo RL; k3 estimate of KL(engine || trainer)
    policy_kl_error          mean e^-l - 1 + l                    NeMo RL; the same with the roles exchanged
    js_divergence_error      mean log cosh(l / 2)                 NeMo RL; see `_errors`
    max_logprob_error        max |l|                              ours
    exact_logprob_fraction   mean [l == 0]                        ours: tokens on which both sides agree to the bit
    nonfinite_logprob_ratio  share of tokens without a finite l   ours: they are in none of the other numbers
    kl                       mean -l                              verl; k1 estimate of KL(engine || trainer)
    k3_kl                    gen_kl_error                         verl's name for it
    training_ppl             mean over sequences of exp(-mean prev_logprobs)              verl
    rollout_ppl              the same of generation_logprobs                              verl
    ppl_ratio                mean over sequences of exp(-mean l)                          verl
    log_ppl_diff             mean over sequences of -mean l                               verl
    chi2_token               mean rho^2 - 1                                               verl
    chi2_seq                 mean over sequences of exp(2 sum l) - 1                      verl
    ess                      1 / mean (rho / mean rho)^2, the share of tokens that count  verl, here not truncated
    ess_seq                  the same of sequences, with exp(sum l)                       verl, here not truncated
    probs_pearson_corr       correlation of e^prev and e^gen; left out where either has no variance   verl

`mismatch_by_lag` measures tokens by the age of the weights that sampled them, under names that end in /version_lag_0
(the trainer's version), /version_lag_1 (one older) and so on:

    token_mult_prob_error, gen_kl_error, exact_logprob_fraction    as above
    weight_mean                                                    mean rho
    token_share                                                    of all tokens

and, of tokens whose version is known: version_lag_mean, version_lag_max.

verl reports its metrics under rollout_corr/; ess is rollout_is_eff_sample_size there, and probs_pearson_corr is
training/rollout_actor_probs_pearson_corr. In NeMo RL the two KLs follow loss_fn.reference_policy_kl_type (k3 by
default); in this module they are always k3. NeMo RL's sampling_importance_ratio, is_oob_ratio and approx_entropy belong
to the loss.

Exponents are clamped so that nothing overflows: of the weights rho and exp(sum l) to +-20, as verl does, all others to
+-60. A row without tokens is no sequence.

All numbers come from sums (`MismatchSums`; the correlation from those of `pairs`), so microbatches add up to the whole.
Arithmetic is float64, a few rows at a time so that intermediate values stay in the cache. float32 would take
two thirds of the time, but where l is 0.001 the error of a token's k3 is 4e-5, and of the chi2_seq of answers of 3000
tokens 4e-3.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from nemo_fp8rl.algorithms import correlation, importance_bins
from nemo_fp8rl.algorithms.metric_names import DISAGREEMENT

LARGEST_LOG = 60.0
"""Exponents are clamped to +- this."""
LARGEST_LOG_WEIGHT = 20.0
"""Exponents of importance weights are clamped to +- this, verl's SAFETY_BOUND."""

BY_LAG = ("token_mult_prob_error", "gen_kl_error", "exact_logprob_fraction")
"""The METRICS of `mismatch_by_lag`."""
LAST_BUCKET = 2**20
EDGES = (0, *(2**i for i in range(21)))
"""The first position of each bucket: 0, 1, 2, 4, ..., 2^20. The last bucket has no end."""

TOKENS_AT_ONCE = {"cpu": 2**16}
"""Values of a chunk: float64 intermediates of that many stay in a core's cache. Elsewhere 2^22, to bound memory."""

SUMS = (
    "tokens", "nonfinite", "different", "log_ratio",
    "mult_prob_excess", "k3", "k3_reversed", "js",
    "weight", "weight_squared",
    "sequences", "training_ppl", "rollout_ppl", "ppl_ratio", "log_ppl_diff", "seq_weight", "seq_weight_squared",
)  # fmt: skip


def mismatch_metrics(prev_logprobs: Tensor, generation_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """Return the METRICS of one batch; for arguments see `MismatchSums.observe`. Raises ValueError without a token."""
    sums = MismatchSums()
    sums.observe(prev_logprobs, generation_logprobs, mask)
    return sums.metrics()


def mismatch_by_lag(
    prev_logprobs: Tensor, generation_logprobs: Tensor, mask: Tensor, token_versions: Tensor, trainer_version: int
) -> dict[str, float]:
    """Return metrics of the tokens of each version, as listed above.

    prev_logprobs, generation_logprobs, mask:  see `MismatchSums.observe`
    token_versions:    int64 [B, T], -1 where it is unknown: such tokens count as /version_unknown
    trainer_version:   the version that gave prev_logprobs
    """
    inside, metrics = mask > 0, dict[str, float]()
    total = float(inside.sum())
    for version in sorted({*token_versions[inside].tolist()}, reverse=True):
        of_version = inside & (token_versions == version)
        seen = MismatchSums()
        seen.observe(prev_logprobs, generation_logprobs, of_version)
        found, sums = seen.metrics(), dict(zip(SUMS, seen.sums.tolist(), strict=True))
        end = f"version_lag_{trainer_version - version}" if version >= 0 else "version_unknown"
        metrics |= {f"{name}/{end}": found[name] for name in BY_LAG}
        metrics[f"weight_mean/{end}"] = sums["weight"] / sums["tokens"] if sums["tokens"] else math.nan
        metrics[f"token_share/{end}"] = float(of_version.sum()) / total
    lags = (trainer_version - token_versions[inside & (token_versions >= 0)]).double()
    if len(lags):
        metrics |= {"version_lag_mean": float(lags.mean()), "version_lag_max": float(lags.max())}
    return metrics


@torch.no_grad()
def sum_disagreement(prev_logprobs: Tensor, generation_logprobs: Tensor, inside: Tensor) -> dict[str, Tensor]:
    """Return the sums of NeMo RL's four errors over tokens, float64 []; divide them by the global number of tokens.

    prev_logprobs, generation_logprobs:  float32 [B, T]
    inside:                              bool [B, T], the tokens; one without a finite log-prob adds nothing
    """
    _check_shapes(prev_logprobs, generation_logprobs, inside)
    totals = prev_logprobs.new_zeros(4, dtype=torch.float64)
    for rows in _chunks(inside):
        prev, gen, live = _finite(prev_logprobs[rows], generation_logprobs[rows], inside[rows])
        excess, *others = (error.sum() for error in _errors(prev - gen))
        totals += torch.stack([live.sum() + excess, *others])
    return dict(zip(DISAGREEMENT, totals, strict=True))


@torch.no_grad()
def log_weight_histogram(prev_logprobs: Tensor, generation_logprobs: Tensor, mask: Tensor) -> list[importance_bins.Bin]:
    """Return the bins of l that hold tokens, in order; a token without a finite l is in no bin.

    prev_logprobs, generation_logprobs, mask:  [B, T]; nothing is read outside the mask
    """
    inside, ends = mask > 0, importance_bins.EDGES
    log_ratio = prev_logprobs[inside] - generation_logprobs[inside]
    log_ratio = log_ratio[log_ratio.isfinite()]
    counts = torch.bincount(torch.bucketize(log_ratio, torch.tensor(ends)), minlength=len(ends) + 1).tolist()
    edges = [None, *(float(f"{edge:.6g}") for edge in ends), None]
    return [(edges[i], edges[i + 1], count) for i, count in enumerate(counts) if count]


class MismatchSums:
    """Sums from which the metrics of any number of microbatches follow.

    sums:       float64 [len(SUMS)]
    largest:    float64 [1], max |l|
    positions:  float64 [3, len(EDGES)], tokens, sum of k3 and sum of |l| by position in the answer
    pairs:      float64 [6], e^prev and e^gen, a part of `pairs`
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """Start without tokens. device: of the sums; observed tensors may be on another."""
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self.largest = torch.zeros(1, dtype=torch.float64, device=device)
        self.positions = torch.zeros(3, len(EDGES), dtype=torch.float64, device=device)
        self.pairs = torch.tensor(correlation.EMPTY, dtype=torch.float64, device=device)

    @torch.no_grad()
    def observe(self, prev_logprobs: Tensor, generation_logprobs: Tensor, mask: Tensor) -> None:
        """Add a microbatch. A row is one sequence, so it must not be split between calls.

        prev_logprobs, generation_logprobs:  floating point [B, T], of the trainer and of the engine
        mask:    float32 or bool [B, T], nonzero where a token was generated; nothing is read outside it
        Raises:  ValueError on shapes that do not fit
        """
        _check_shapes(prev_logprobs, generation_logprobs, mask)
        if not mask.size(1):
            return
        for rows in _chunks(mask):
            self._observe(prev_logprobs[rows], generation_logprobs[rows], mask[rows] > 0)

    def metrics(self) -> dict[str, float]:
        """Return the METRICS, without probs_pearson_corr where it is undefined.

        When no token has a finite log-prob, nonfinite_logprob_ratio is 1 and all other metrics are NaN.
        Raises: ValueError when there were no tokens at all
        """
        s = dict(zip(SUMS, self.sums.tolist(), strict=True))
        n, sequences = s["tokens"], s["sequences"]
        if n + s["nonfinite"] == 0:
            raise ValueError("there is no token to compare: the mask selects none")

        def mean(name: str, count: float = n) -> float:
            return s[name] / count if count else math.nan

        metrics = {
            "token_mult_prob_error": 1 + mean("mult_prob_excess"),
            "gen_kl_error": mean("k3"),
            "policy_kl_error": mean("k3_reversed"),
            "js_divergence_error": mean("js"),
            "max_logprob_error": self.largest.item() if n else math.nan,
            "exact_logprob_fraction": 1 - mean("different"),
            "nonfinite_logprob_ratio": s["nonfinite"] / (n + s["nonfinite"]),
            "kl": -mean("log_ratio"),
            "k3_kl": mean("k3"),
            "training_ppl": mean("training_ppl", sequences),
            "rollout_ppl": mean("rollout_ppl", sequences),
            "ppl_ratio": mean("ppl_ratio", sequences),
            "log_ppl_diff": mean("log_ppl_diff", sequences),
            "chi2_token": mean("weight_squared") - 1,
            "chi2_seq": mean("seq_weight_squared", sequences) - 1,
            "ess": mean("weight") ** 2 / mean("weight_squared"),
            "ess_seq": mean("seq_weight", sequences) ** 2 / mean("seq_weight_squared", sequences),
        }
        pearson = correlation.correlation(self.pairs)
        return metrics if pearson is None else metrics | {"probs_pearson_corr": pearson}

    def by_position(self) -> dict[str, float]:
        """Return mean k3 and mean |l| by position in the answer; position 0 is the first generated token of the row.

        Names: gen_kl_error/position_0, .../position_1, .../position_2_3, .../position_4_7 and so on, mean_logprob_error
        likewise. Buckets without tokens are left out. Tokens between generated tokens count as positions as well.
        """
        means = {}
        for start, tokens, k3, distance in zip(EDGES, *self.positions.tolist(), strict=True):
            last = 2 * start - 1
            name = f"{start}_on" if start == LAST_BUCKET else f"{start}_{last}" if last > start else f"{start}"
            if tokens:
                means[f"gen_kl_error/position_{name}"] = k3 / tokens
                means[f"mean_logprob_error/position_{name}"] = distance / tokens
        return means

    def _observe(self, prev: Tensor, gen: Tensor, inside: Tensor) -> None:
        """inside: bool [B, T]."""
        prev, gen, live = _finite(prev, gen, inside)
        log_ratio = prev - gen
        excess, k3, k3_reversed, js = _errors(log_ratio)
        weight = log_ratio.clamp(-LARGEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT).exp_().mul_(live)
        tokens = live.sum(-1)
        total = tokens.sum()
        sums = {
            "tokens": total,
            "nonfinite": inside.sum() - total,
            "different": torch.count_nonzero(log_ratio),
            "log_ratio": log_ratio.sum(),
            "mult_prob_excess": excess.sum(),
            "k3": k3.sum(),
            "k3_reversed": k3_reversed.sum(),
            "js": js.sum(),
            "weight": weight.sum(),
            "weight_squared": torch.dot(weight.flatten(), weight.flatten()),
            **_of_sequences(prev.sum(-1), gen.sum(-1), tokens),
        }
        distance = log_ratio.abs()
        positions = _by_bucket(inside, live, k3, distance)
        self.sums += torch.stack([sums[name].double() for name in SUMS]).to(self.sums.device)
        self.largest = torch.maximum(self.largest, distance.max().to(self.largest.device))
        self.positions += positions.to(self.positions.device)
        probabilities = correlation.make_part(prev.exp().mul_(live), gen.exp().mul_(live), live)
        self.pairs = correlation.merge_parts(self.pairs, probabilities.to(self.pairs.device))


def _finite(prev: Tensor, gen: Tensor, inside: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(prev, gen, live), float64 [B, T]; live is 1 for tokens of `inside` with a finite l, all three 0 elsewhere."""
    live = inside & ((prev - gen).abs() < math.inf)  # NaN compares false
    return torch.where(live, prev, 0.0).double(), torch.where(live, gen, 0.0).double(), live.double()


def _errors(log_ratio: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(e^|l| - 1, k3(l), k3(-l), JS) of float64 [B, T]; all are 0 where l is 0.

    NeMo RL's JS is half the k3 of prev against the mixture m = log((e^prev + e^gen) / 2) plus half that of gen. As
    (e^(prev - m) + e^(gen - m)) / 2 is 1, what is left is m - (prev + gen) / 2 = log cosh(l / 2): a function of l that
    does not cancel. With cosh l - 1 = (k3(l) + k3(-l)) / 2 it is log(1 + (cosh l - 1) / 2) / 2.
    """
    log_ratio = log_ratio.clamp(-LARGEST_LOG, LARGEST_LOG)
    up, down = log_ratio.expm1(), (-log_ratio).expm1()
    return torch.maximum(up, down), up - log_ratio, down + log_ratio, ((up + down) / 4).log1p_() / 2


def _of_sequences(prev: Tensor, gen: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """Sums over the sequences with tokens; prev and gen are sums of log-probs, all float64 [B]."""
    some = tokens > 0
    prev, gen, tokens = prev[some], gen[some], tokens[some]
    weights = (prev - gen).clamp(-LARGEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT).exp()
    difference = (gen - prev) / tokens

    def perplexity(log: Tensor) -> Tensor:
        return log.clamp(-LARGEST_LOG, LARGEST_LOG).exp().sum()

    return {
        "sequences": some.sum(),
        "training_ppl": perplexity(-prev / tokens),
        "rollout_ppl": perplexity(-gen / tokens),
        "ppl_ratio": perplexity(difference),
        "log_ppl_diff": difference.sum(),
        "seq_weight": weights.sum(),
        "seq_weight_squared": weights.square().sum(),
    }


def _by_bucket(inside: Tensor, *values: Tensor) -> Tensor:
    """Sums by distance from the row's first token of `inside`, float64 [len(values), len(EDGES)]; values [B, T]."""
    length = inside.size(1)
    countdown = torch.arange(length, 0, -1, dtype=torch.int32, device=inside.device)
    first = length - (inside * countdown).amax(-1, keepdim=True)
    ends = torch.tensor([*EDGES, length], device=inside.device)
    offsets = (first + ends).clamp(max=length)  # [B, len(EDGES) + 1]
    sums = [torch.segment_reduce(value, "sum", offsets=offsets, axis=1).sum(0) for value in values]
    return torch.stack(sums)


def _chunks(mask: Tensor) -> Iterator[slice]:
    """Slices of rows that hold about TOKENS_AT_ONCE values."""
    rows = max(1, TOKENS_AT_ONCE.get(mask.device.type, 2**22) // max(1, mask.size(1)))
    for start in range(0, mask.size(0), rows):
        yield slice(start, start + rows)


def _check_shapes(prev: Tensor, gen: Tensor, mask: Tensor) -> None:
    if not prev.shape == gen.shape == mask.shape or mask.dim() != 2:
        raise ValueError(
            f"prev_logprobs {list(prev.shape)}, generation_logprobs {list(gen.shape)} and mask {list(mask.shape)} "
            "must all be [B, T]"
        )
    if not prev.is_floating_point() or not gen.is_floating_point():
        raise ValueError(f"log-probs must be floating point, got {prev.dtype} and {gen.dtype}")
