"""The GRPO losses and the rollout correction once more, number by number: what the tensors of the package must equal.

Plain Python in double precision, one token after the other, written from the published formulas. Nothing is shared with
`nemo_fp8rl.algorithms`, and padding is not even looked at: it never becomes a Token.

Derivatives by complex step: f(x + ih) = f(x) + ih f'(x) up to h^2, which vanishes for h = 1e-30, so the imaginary part
of a formula, over h, is its derivative without cancellation. All formulas are analytic between their kinks, and which
side of a kink a number lies on is asked of its real part. What a formula does not differentiate (sg) is a real number.
"""

import cmath
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

Number = complex | float
STEP = 1e-30


@dataclass
class Token:
    """curr, prev, gen, ref: log-probs of the policy now, before the update, of the engine, and of the reference policy.

    unfiltered: curr before top-k and top-p, where the batch brings it. position: of the token in [0, T-1).
    """

    position: int
    curr: Number
    prev: float
    gen: float
    ref: float
    advantage: float
    unfiltered: Number | None = None
    weight: float = 1.0
    weighed: bool = False
    kept: bool = True
    truncation: float = 1.0
    """The bounded over the unbounded weight."""
    outside: bool = False
    """The weight was changed by a bound, or a rule rejected the token or its sequence."""

    @property
    def log_ratio(self) -> float:
        return self.prev - self.gen


@dataclass
class Sample:
    row: int
    length: int
    """Tokens in the mask, those without a finite log-prob too."""
    positive: bool
    tokens: list[Token] = field(default_factory=list)

    @property
    def lost(self) -> int:
        return self.length - len(self.tokens)


def read(curr: Tensor, batch: dict, *, force_on_policy: bool = False, bypass: bool = False) -> list[Sample]:
    """The samples and tokens inside the masks of a batch; curr is [B, T-1]."""
    samples = []
    for i in range(len(batch["token_mask"])):
        inside = [t for t in range(1, batch["token_mask"].size(1)) if batch["token_mask"][i, t] != 0]
        if not batch["sample_mask"][i] or not inside:
            continue
        sample = Sample(i, len(inside), "rewards" in batch and float(batch["rewards"][i]) > 0)
        for t in inside:
            c, g = float(curr[i, t - 1]), float(batch["generation_logprobs"][i, t])
            p = c if force_on_policy else g if bypass else float(batch["prev_logprobs"][i, t])
            if not (math.isfinite(p) and math.isfinite(g)):
                continue
            ref = float(batch["reference_policy_logprobs"][i, t]) if "reference_policy_logprobs" in batch else 0.0
            free = float(batch["curr_logprobs_unfiltered"][i, t - 1]) if "curr_logprobs_unfiltered" in batch else None
            sample.tokens.append(Token(t - 1, c, p, g, ref, float(batch["advantages"][i, t]), free))
        samples.append(sample)
    return samples


# The correction ------------------------------------------------------------------------------------------------------

TOKEN_STATISTICS: dict[str, Callable[[Token], float]] = {
    "token_k1": lambda t: math.exp(t.log_ratio),
    "token_k2": lambda t: t.log_ratio**2 / 2,
    "token_k3": lambda t: math.exp(t.log_ratio) - 1 - t.log_ratio,
    "token_probability_difference": lambda t: abs(math.exp(t.prev) - math.exp(t.gen)),
}


def statistics(statistic: str, tokens: Sequence[Token]) -> list[float]:
    """For each token: all numbers that must lie within the bounds for it to be kept are one, its own or its sample's.

    seq_max_k1 has no one number, see `holds`.
    """
    if statistic in TOKEN_STATISTICS:
        return [TOKEN_STATISTICS[statistic](token) for token in tokens]
    _, how, kind = statistic.split("_")
    if kind == "k1":
        logs = [token.log_ratio for token in tokens]
        value = math.exp(math.fsum(logs) / (1 if how == "sum" else len(logs)))
    else:
        each = [TOKEN_STATISTICS[f"token_{kind}"](token) for token in tokens]
        value = {"sum": math.fsum, "mean": lambda v: math.fsum(v) / len(v), "max": max}[how](each)
    return [value] * len(tokens)


def holds(rule: tuple[str, float | None, float | None], tokens: Sequence[Token]) -> list[bool]:
    """rule: (statistic, max, min)."""
    statistic, high, low = rule
    high, low = math.inf if high is None else high, 0.0 if low is None else low
    if statistic == "seq_max_k1":
        ratios = [math.exp(token.log_ratio) for token in tokens]
        return [low <= min(ratios) and max(ratios) <= high] * len(tokens)
    return [low <= value <= high for value in statistics(statistic, tokens)]


def correct(
    samples: Sequence[Sample],
    weight: str,
    low: float | None = None,
    high: float | None = None,
    rules: Iterable[tuple[str, float | None, float | None]] = (),
    normalize: bool = False,
) -> None:
    """Fill in weight, kept and outside of every token."""
    rules = list(rules)
    for sample in samples:
        logs = [token.log_ratio for token in sample.tokens]
        verdicts = [holds(rule, sample.tokens) for rule in rules if logs]
        for i, token in enumerate(sample.tokens):
            log = {
                "none": 0.0,
                "token": logs[i],
                "sequence": math.fsum(logs),
                "geometric": math.fsum(logs) / len(logs),
            }[weight]
            raw = math.exp(log)
            bounded = min(max(raw, low or 0.0), math.inf if high is None else high)
            token.kept = all(verdict[i] for verdict in verdicts)
            token.truncation = 1.0 if high is None or raw <= high else high / raw
            token.outside = raw != bounded or not token.kept
            token.weight = bounded if token.kept else 0.0
            token.weighed = weight != "none"
    if normalize:
        if weight == "token":
            counted = [token.weight for sample in samples for token in sample.tokens if token.kept]
        else:
            heads = ([token.weight for token in sample.tokens if token.kept] for sample in samples)
            counted = [head[0] for head in heads if head]
        mean = math.fsum(counted) / len(counted) if counted else 1.0
        for sample in samples:
            for token in sample.tokens:
                token.weight /= mean


def without_rejected(samples: Sequence[Sample]) -> list[Sample]:
    """denominator=kept: as if the rejected tokens had never been generated."""
    left = []
    for sample in samples:
        tokens = [token for token in sample.tokens if token.kept]
        if tokens:
            left.append(replace(sample, length=len(tokens), tokens=tokens))
    return left


# The loss ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Totals:
    """The global counts that the loss divides by."""

    sequences: int
    tokens: int
    positive: int

    @staticmethod
    def of(samples: Sequence[Sample]) -> "Totals":
        positive = sum(len(sample.tokens) for sample in samples if sample.positive)
        return Totals(max(len(samples), 1), max(sum(sample.length for sample in samples), 1), max(positive, 1))


def exp(x: Number) -> Number:
    return cmath.exp(x) if isinstance(x, complex) else math.exp(x)


def real(x: Number) -> float:
    return x.real if isinstance(x, complex) else x


def clip(x: Number, low: float, high: float) -> Number:
    return low if real(x) < low else high if real(x) > high else x


def upper_clip(token: Token, cfg) -> float:
    """QuRL (arXiv 2602.13953): (1 + eps) / r, r what is left of a truncated weight."""
    return (1 + cfg.ratio_clip_max) / (token.truncation if cfg.ratio_clip_adaptive else 1.0)


def off_policy(sample: Sample, cfg) -> bool:
    """DeepSeek-V3.2 (arXiv 2512.02556): A < 0 and 1/|o| sum of log(pi_engine / pi_current) > delta."""
    if cfg.off_policy_mask_threshold is None or not sample.tokens:
        return False
    gaps = [token.gen - real(token.curr) for token in sample.tokens]
    is_negative = math.fsum(token.advantage for token in sample.tokens) < 0
    return is_negative and math.fsum(gaps) / len(gaps) > cfg.off_policy_mask_threshold


def surrogate(token: Token, ratio: Number, cfg) -> Number:
    a = token.advantage
    if cfg.disable_ppo_ratio:
        return -a * token.curr
    if cfg.force_on_policy_ratio:
        return -a * exp(token.curr - real(token.curr))
    clipped = clip(ratio, 1 - cfg.ratio_clip_min, upper_clip(token, cfg))
    if cfg.use_cispo:
        return -a * real(clipped) * token.curr
    loss = max(-a * ratio, -a * clipped, key=real)
    if cfg.ratio_clip_c is not None and a < 0:
        loss = min(loss, -a * cfg.ratio_clip_c, key=real)
    return loss


def kl(token: Token, cfg) -> Number:
    """Without its factor beta."""
    curr = token.curr if token.unfiltered is None else token.unfiltered
    x = token.ref - curr
    weight = exp(curr - (token.gen if cfg.use_on_policy_kl_approximation else real(curr)))
    if cfg.kl_input_clamp_value is not None and abs(real(x)) > cfg.kl_input_clamp_value:
        x, weight = clip(x, -cfg.kl_input_clamp_value, cfg.kl_input_clamp_value), real(weight)
    k = {"k1": lambda: -x, "k2": lambda: x * x / 2, "k3": lambda: exp(x) - 1 - x}[cfg.reference_policy_kl_type]()
    value = weight * k
    limit = cfg.kl_output_clamp_value
    return value if limit is None else clip(value, -limit, limit)


def bonus(token: Token) -> Number:
    """Its part of the entropy, of current over engine: the second half is the weight's where there is one."""
    ratio = exp(token.curr - (token.prev if token.weighed else token.gen))
    return -token.weight * ratio * token.curr


def share(sample: Sample, cfg, totals: Totals) -> float:
    """What a token of the sample counts for in the loss."""
    mode = cfg.loss_agg_mode or ("token-mean" if cfg.token_level_loss else "seq-mean-token-mean")
    if mode == "token-mean":
        return 1 / totals.tokens
    if mode == "seq-mean-token-mean":
        return 1 / sample.length / totals.sequences
    return 1 / totals.sequences / (cfg.loss_scale_factor if mode == "seq-mean-token-sum-norm" else 1)


def ratios(sample: Sample, cfg) -> list[Number]:
    """As the metrics show them: what multiplies the advantage."""
    if cfg.disable_ppo_ratio:
        return [token.curr for token in sample.tokens]
    if cfg.force_on_policy_ratio:
        return [1.0 for _ in sample.tokens]
    logs = [token.curr - token.prev for token in sample.tokens]
    if cfg.sequence_level_importance_ratios and logs:
        return [exp(sum(logs) / len(logs))] * len(logs)
    return [exp(log) for log in logs]


def terms(sample: Sample, cfg, totals: Totals) -> dict[str, list[Number]]:
    """The sample's part of the loss and of its terms, as the numbers that are to be added up."""
    factor = share(sample, cfg, totals)
    pairs = list(zip(sample.tokens, ratios(sample, cfg), strict=True))
    policy = [factor * token.weight * surrogate(token, ratio, cfg) for token, ratio in pairs if token.kept]
    policy = [] if off_policy(sample, cfg) else policy
    kls = [factor * kl(token, cfg) for token in sample.tokens] if penalized(cfg) else []
    entropy = [-exp(token.curr - token.gen) * token.curr / totals.tokens for token in sample.tokens]
    counted = sample.positive and cfg.positive_example_nll_weight
    nll = [-token.curr / totals.positive for token in sample.tokens] if counted else []
    whole = [
        *policy,
        *(cfg.reference_policy_kl_penalty * value for value in kls),
        *(-cfg.entropy_coefficient * bonus(token) / totals.tokens for token in sample.tokens if token.kept),
        *(cfg.positive_example_nll_weight * value for value in nll),
    ]
    return {"loss": whole, "kl_penalty": kls, "approx_entropy": entropy, "positive_nll_loss": nll}


def penalized(cfg) -> bool:
    return cfg.reference_policy_kl_penalty != 0 and not cfg.use_kl_in_reward


def gradient(samples: Sequence[Sample], cfg, totals: Totals, variable: str = "curr") -> dict[tuple[int, int], float]:
    """d loss / d log-prob by (row, position), of the tokens in the mask; variable: curr or unfiltered."""
    derivatives = {}
    for sample in samples:
        for i, token in enumerate(sample.tokens):
            moved = replace(token, **{variable: complex(getattr(token, variable), STEP)})
            tokens = [*sample.tokens[:i], moved, *sample.tokens[i + 1 :]]
            moved_loss = sum(terms(replace(sample, tokens=tokens), cfg, totals)["loss"], 0j)
            derivatives[sample.row, token.position] = moved_loss.imag / STEP
    return derivatives


def metrics(samples: Sequence[Sample], cfg, totals: Totals) -> dict[str, float]:
    """The loss's metrics, by NeMo RL's names and formulas."""

    def mean(value: Callable[[Token], float]) -> float:
        return math.fsum(value(token) for sample in samples for token in sample.tokens) / totals.tokens

    every = [terms(sample, cfg, totals) for sample in samples]
    values = [real(ratio) for sample in samples for ratio in ratios(sample, cfg)]
    unclipped = cfg.disable_ppo_ratio or cfg.force_on_policy_ratio
    highs = [upper_clip(token, cfg) for sample in samples for token in sample.tokens]
    pairs = zip(values, highs, strict=True)
    clipped = values if unclipped else [clip(ratio, 1 - cfg.ratio_clip_min, high) for ratio, high in pairs]

    masked = {"off_policy_masked_ratio": sum(off_policy(sample, cfg) for sample in samples) / totals.sequences}
    masked = {} if cfg.off_policy_mask_threshold is None else masked

    def mixture(token: Token) -> float:
        m = math.log((math.exp(token.prev) + math.exp(token.gen)) / 2)
        return sum(math.exp(x - m) - (x - m) - 1 for x in (token.prev, token.gen)) / 2

    return {
        **{name: math.fsum(v for part in every for v in map(real, part[name])) for name in every[0]},
        "probs_ratio": math.fsum(values) / totals.tokens,
        "probs_ratio_min": min(values, default=math.inf),
        "probs_ratio_max": max(values, default=-math.inf),
        "probs_ratio_clamped": math.fsum(clipped) / totals.tokens,
        "probs_ratio_clamped_min": min(clipped, default=math.inf),
        "probs_ratio_clamped_max": max(clipped, default=-math.inf),
        "token_mult_prob_error": mean(lambda t: math.exp(abs(t.log_ratio))),
        "gen_kl_error": mean(lambda t: math.exp(t.log_ratio) - t.log_ratio - 1),
        "policy_kl_error": mean(lambda t: math.exp(-t.log_ratio) + t.log_ratio - 1),
        "js_divergence_error": mean(mixture),
        "nonfinite_logprob_ratio": sum(sample.lost for sample in samples) / totals.tokens,
        **masked,
    }


def magnitude(samples: Sequence[Sample], cfg, totals: Totals) -> float:
    """Sum of the sizes of all that the loss adds up: what rounding is relative to where terms cancel."""
    return math.fsum(abs(value) for sample in samples for value in terms(sample, cfg, totals)["loss"])


# Batches -------------------------------------------------------------------------------------------------------------

GRID = 2.0**-10
"""Log-probs are multiples of it: differences and sums of them are exact in float32, so that float32 rounds only where
it takes a power, a root or a quotient, once each."""
GARBAGE = (math.nan, math.inf, -math.inf, 1e30)
PER_TOKEN = ("advantages", "generation_logprobs", "prev_logprobs", "reference_policy_logprobs")


def make_batch(
    seed: int, size: int = 8, width: int = 10, dtype: torch.dtype = torch.float64, garbage: Sequence[float] = GARBAGE
) -> tuple[Tensor, dict[str, Tensor]]:
    """(current log-probs [B, T-1], batch): ragged rows, a dropped one and an empty one, garbage outside the mask."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    def near(logprobs: Tensor, scale: float) -> Tensor:
        tails = torch.where(torch.rand(logprobs.shape, generator=generator) < 0.1, 5.0, 1.0)
        moved = logprobs + normal(*logprobs.shape, scale=scale) * tails
        return (torch.round(moved / GRID) * GRID).clamp(max=0.0)

    lengths = torch.randint(3, width + 1, (size,), generator=generator)
    starts = (1 + torch.rand(size, generator=generator) * (lengths - 2)).long()
    position = torch.arange(width)
    token_mask = ((position >= starts[:, None]) & (position < lengths[:, None])).float()
    sample_mask = torch.ones(size)
    if size > 2:
        dropped, empty = (1 + torch.randperm(size - 1, generator=generator)[:2]).tolist()
        sample_mask[dropped], token_mask[empty] = 0.0, 0.0
    gen = near(torch.zeros(size, width), 1.0) - GRID
    prev = near(gen, 0.3)
    curr = near(prev, 0.2)
    fields = {
        "advantages": normal(size, width, scale=1.0),
        "generation_logprobs": gen,
        "prev_logprobs": prev,
        "reference_policy_logprobs": near(curr, 1.5),
    }
    rewards = torch.where(torch.rand(size, generator=generator) < 0.5, 1.0, 0.0)
    outside = (token_mask * sample_mask[:, None]) == 0
    for i, values in enumerate((*fields.values(), curr)):  # shifted, so that garbage does not cancel
        values[outside] = (
            torch.tensor(garbage, dtype=torch.float64).roll(i).repeat(values.numel())[: int(outside.sum())]
        )
    rewards[sample_mask == 0] = garbage[0]
    batch = {
        "input_ids": torch.zeros(size, width, dtype=torch.int64),
        "input_lengths": lengths,
        "token_mask": token_mask,
        "sample_mask": sample_mask,
        "rewards": rewards,
        **{name: values.to(dtype) for name, values in fields.items()},
    }
    return curr[:, 1:].to(dtype), batch


def inside(batch: dict[str, Tensor]) -> Tensor:
    """bool [B, T]."""
    return (batch["token_mask"] * batch["sample_mask"][:, None]) > 0


def totals(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What trainers pass on: valid sequences and tokens of the whole batch."""
    mask = inside(batch)[:, 1:]
    return mask.any(-1).sum().float(), mask.sum().float()
