"""Losses that a policy minimizes: the GRPO family with rollout correction, and supervised NLL for the warm-up.

A loss is called once per microbatch with the log-probs of the current policy, the microbatch, and the counts of the
whole optimizer step (`LossTotals`). It returns (loss, metrics), both already divided by a global count, so that the sum
over microbatches and ranks is the value of the whole batch (extrema apart: `combine_metrics`). NeMo RL's LossFunction
protocol is the same with a mapping for the batch: `nemo_rl.adapters.loss_fn` converts it.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from nemo_fp8rl.algorithms.correction import Correction, check_fields, correct
from nemo_fp8rl.algorithms.correction_config import LARGEST_LOG, CorrectionConfig
from nemo_fp8rl.algorithms.loss_config import Aggregation, LossConfig, resolve_correction
from nemo_fp8rl.algorithms.mismatch import DISAGREEMENT, sum_disagreement
from nemo_fp8rl.batch import LossTotals, RolloutBatch, ScoredBatch, TrainBatch

CHUNK_VALUES = {"cpu": 1 << 17, "cuda": 1 << 26}
"""Values handled at a time: the temporaries stay in a CPU's cache, and are bounded beside a GPU's memory."""
EXTREMA = {"_min": min, "_max": max}
"""End of the name of a metric that is no sum -> the function that combines its values."""


class GrpoLoss:
    """Clipped surrogate, corrected for the rollout, plus KL, entropy and NLL terms.

    With A the advantage, curr, prev, gen, ref the log-probs of the current policy, of the trainer before the update, of
    the engine and of the reference policy, and w the correction's weight (no gradient):

        r = exp(curr - prev)                    GSPO: of the mean over the sequence; disable_ppo_ratio: curr itself;
                                                force_on_policy_ratio: exp(curr - sg(curr)) = 1
        L = max(-A r, -A clip(r, 1 - ratio_clip_min, 1 + ratio_clip_max))
            CISPO: -A sg(clip r) curr;  dual clip: at most -A ratio_clip_c where A < 0
            ratio_clip_adaptive: upper bound (1 + ratio_clip_max) / s, s = min(rho, C) / rho, rho = exp(prev - gen),
            C the correction's weight_max; s is 1 where the weight is not truncated (QuRL's ACR, arXiv 2602.13953)
        off_policy_mask_threshold d: L = 0 for sequences with mean A < 0 and mean(gen - curr) > d; the means are over
            the sequence's tokens, without gradient (DeepSeek-V3.2, arXiv 2512.02556)
        loss = agg(w L) + beta agg(KL) - entropy_coefficient H + mu NLL(positive samples)
        KL = clamp(v k(clamp(ref - curr))),  v = exp(curr - sg(curr)), or exp(curr - gen)
        H = -mean(w exp(curr - prev) curr),  exp(curr - gen) where the correction has no weight

    agg is named by `LossConfig.aggregation`:

        token-mean                 sum over tokens / global_valid_toks
        seq-mean-token-mean        sum over sequences of their token means / global_valid_seqs
        seq-mean-token-sum         sum over tokens / global_valid_seqs
        seq-mean-token-sum-norm    the same / loss_scale_factor

    A token whose log-prob is not finite in prev or gen takes no part and is counted
    (`correction.correct_batch` refuses a batch with too many of them).

    metric_normalizations: metric -> what it was divided by, "tokens" or "sequences" (the global counts) or "none".
    """

    def __init__(
        self,
        cfg: LossConfig,
        correction: CorrectionConfig | None = None,
    ) -> None:
        """Check the configuration.

        cfg:         the block `loss_fn`
        correction:  the block `nemo_fp8rl.correction`; None follows the keys of cfg
        Raises:      UserError, naming the key
        """
        cfg.check()
        self.cfg, self.correction = cfg, resolve_correction(cfg, correction)
        rules = self.correction.reject
        weight = self.correction.weight
        gspo = self.cfg.sequence_level_importance_ratios
        self.weighs_sequences = weight == "sequence" or (weight == "none" and gspo)
        of_sequences = bool(rules) and all(rule.statistic.startswith("seq_") for rule in rules)
        self.rejects_sequences = of_sequences and weight != "sequence"
        self.metric_normalizations = self._normalizations()

    def __call__(
        self,
        next_token_logprobs: Tensor,
        batch: ScoredBatch,
        totals: LossTotals,
        unfiltered_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Return (loss, metrics) of a microbatch.

        A TrainBatch brings its importance weights (they need the whole batch when they are normalized); those of a
        ScoredBatch are computed from this microbatch alone. Rows are taken a few at a time, so that temporaries stay
        in the cache.

            next_token_logprobs:  [B, T-1], of input_ids[:, 1:] under the current policy, with gradient
            totals:               the counts of the whole optimizer step
            unfiltered_logprobs:  [B, T-1], the same without top-k and top-p, for the KL; None without them
        """
        self._check_shapes(next_token_logprobs, batch)
        size = max(1, CHUNK_VALUES[next_token_logprobs.device.type] // max(1, next_token_logprobs.size(1)))
        if self.cfg.positive_example_nll_weight and totals.positive_toks is None:
            size = len(next_token_logprobs)  # the positive tokens of the microbatch are counted
        losses, parts = [], []
        for start in range(0, len(next_token_logprobs), size):
            part = slice(start, start + size)
            unfiltered = None if unfiltered_logprobs is None else unfiltered_logprobs[part]
            loss, metrics = self._part(next_token_logprobs[part], batch.take_rows(part), totals, unfiltered)
            losses.append(loss)
            parts.append({name: float(value.detach()) for name, value in metrics.items()})
        return torch.stack(losses).sum(), combine_metrics(parts)

    def _part(
        self, next_token_logprobs: Tensor, batch: ScoredBatch, totals: LossTotals, unfiltered: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        cfg = self.cfg
        mask = batch.token_mask[:, 1:] * batch.sample_mask.unsqueeze(-1)
        prev, gen = self._old_logprobs(next_token_logprobs, batch)
        correction = self._correct(prev, gen, mask, batch)
        live = (mask > 0) & prev.isfinite() & gen.isfinite()
        curr, prev, gen, advantages = (
            torch.where(live, t, 0.0) for t in (next_token_logprobs, prev, gen, batch.advantages[:, 1:])
        )
        counts = Counts(mask * live, batch.token_mask[:, 1:], totals)

        ratio, clipped = self._ratio(curr, prev, gen, counts.mask)
        surrogate = self._surrogate(advantages, curr, ratio, clipped)
        masked = self._off_policy(curr.detach(), gen, advantages, counts.mask)
        if masked is not None:
            surrogate = torch.where(masked, 0.0, surrogate)
        loss = self._aggregate(torch.where(correction.kept, correction.weights * surrogate, 0.0), counts)
        kl = self._kl(curr if unfiltered is None else torch.where(live, unfiltered, 0.0), gen, live, batch, counts)
        nll = self._positive_nll(curr, counts.mask, batch, totals)
        if cfg.reference_policy_kl_penalty:
            loss = loss + cfg.reference_policy_kl_penalty * kl
        if cfg.entropy_coefficient:
            loss = loss - cfg.entropy_coefficient * self._entropy(curr, prev, gen, correction, counts)
        if cfg.positive_example_nll_weight:
            loss = loss + cfg.positive_example_nll_weight * nll
        with torch.no_grad():
            entropy = -(counts.mask * bounded_exp(curr - gen) * curr).sum() / counts.tokens
            metrics = {
                "loss": loss,
                "kl_penalty": kl,
                "positive_nll_loss": nll,
                "approx_entropy": entropy,
                "num_valid_samples": batch.sample_mask.sum(),
                **_ratio_metrics("probs_ratio", ratio, live, counts),
                **_ratio_metrics("probs_ratio_clamped", clipped, live, counts),
                **self._correction_metrics(correction, prev - gen, counts),
                **{name: total / counts.tokens for name, total in sum_disagreement(prev, gen, live).items()},
            }
            if masked is not None:
                metrics["off_policy_masked_ratio"] = masked.sum() / counts.sequences
        return loss, metrics

    def _normalizations(self) -> dict[str, str]:
        of_loss = "tokens" if self.cfg.aggregation == "token-mean" else "sequences"
        names = ("probs_ratio", "probs_ratio_clamped")
        return {
            **dict.fromkeys(("loss", "kl_penalty"), of_loss),
            **dict.fromkeys((*names, *DISAGREEMENT, "approx_entropy", "nonfinite_logprob_ratio"), "tokens"),
            "sampling_importance_ratio": "sequences" if self.weighs_sequences else "tokens",
            "is_oob_ratio": "sequences" if self.rejects_sequences else "tokens",
            **dict.fromkeys((f"{name}{end}" for name in names for end in EXTREMA), "none"),
            **dict.fromkeys(("num_valid_samples", "positive_nll_loss"), "none"),
            **({} if self.cfg.off_policy_mask_threshold is None else {"off_policy_masked_ratio": "sequences"}),
        }

    def _check_shapes(self, curr: Tensor, batch: ScoredBatch) -> None:
        """Raise ValueError, naming the tensor; most wrong shapes would broadcast."""
        b, t = batch.token_mask.shape
        if not b:
            raise ValueError("there is no sample in this batch")
        names = ["advantages", "generation_logprobs"]
        names += [] if self.cfg.force_on_policy_ratio else ["prev_logprobs"]
        names += [] if batch.reference_policy_logprobs is None else ["reference_policy_logprobs"]
        names += ["importance_weights"] if isinstance(batch, TrainBatch) else []
        check_fields(torch.Size([b, t]), {name: getattr(batch, name) for name in names})
        check_fields(torch.Size([b, t - 1]), {"next_token_logprobs": curr})
        if isinstance(batch, TrainBatch):
            changed = batch.out_of_bounds
            if changed.dtype is not torch.bool or changed.shape != (b, t):
                raise ValueError(f"out_of_bounds must be bool {[b, t]}, got {changed.dtype} {list(changed.shape)}")
        if batch.sample_mask.shape != (b,):
            raise ValueError(f"sample_mask must be [{b}], got {list(batch.sample_mask.shape)}")

    def _old_logprobs(self, curr: Tensor, batch: ScoredBatch) -> tuple[Tensor, Tensor]:
        """(prev, gen), [B, T-1]."""
        gen = batch.generation_logprobs[:, 1:]
        if self.cfg.force_on_policy_ratio:
            return curr.detach(), gen
        return (gen if self.correction.bypass else batch.prev_logprobs[:, 1:]), gen

    def _correct(self, prev: Tensor, gen: Tensor, mask: Tensor, batch: ScoredBatch) -> Correction:
        if isinstance(batch, TrainBatch):
            weights = batch.importance_weights[:, 1:]
            inside = mask > 0
            lost = inside & ~(prev.isfinite() & gen.isfinite())
            changed = inside & batch.out_of_bounds[:, 1:]
            return Correction(torch.where(inside, weights, 0.0), inside & (weights > 0), lost.sum().float(), changed)
        if key := self.correction.of_whole_batch:
            raise ValueError(
                f"nemo_fp8rl.correction.{key} needs the weights of the whole batch: "
                "correct it by algorithms.correction.correct_batch first"
            )
        return correct(prev, gen, mask, self.correction)

    def _ratio(self, curr: Tensor, prev: Tensor, gen: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The ratio of the update and the clipped ratio, [B, T-1]."""
        cfg = self.cfg
        if cfg.force_on_policy_ratio:
            ratio = (curr - curr.detach()).exp()
            return ratio, ratio
        if cfg.disable_ppo_ratio:
            return curr, curr
        log_ratio = curr - prev
        if cfg.sequence_level_importance_ratios:
            mean = (log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
            log_ratio = mean.expand_as(log_ratio)
        ratio, low, high = bounded_exp(log_ratio), 1 - cfg.ratio_clip_min, 1 + cfg.ratio_clip_max
        if not cfg.ratio_clip_adaptive:
            return ratio, ratio.clamp(low, high)
        limit = self.correction.weight_max
        assert limit is not None  # `resolve_correction`
        growth = (bounded_exp(prev - gen) / limit).clamp(min=1)  # 1 / s
        return ratio, ratio.clamp(ratio.new_tensor(low), high * growth)

    def _off_policy(self, curr: Tensor, gen: Tensor, advantages: Tensor, mask: Tensor) -> Tensor | None:
        """Sequences of negative advantage that the policy left, bool [B, 1]; None without the threshold."""
        if self.cfg.off_policy_mask_threshold is None:
            return None
        divergence = ((gen - curr) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
        negative = (advantages * mask).sum(-1, keepdim=True) < 0
        return negative & (divergence > self.cfg.off_policy_mask_threshold)

    def _surrogate(self, advantages: Tensor, curr: Tensor, ratio: Tensor, clipped: Tensor) -> Tensor:
        if self.cfg.use_cispo:
            return -advantages * clipped.detach() * curr
        surrogate = torch.maximum(-advantages * ratio, -advantages * clipped)
        if self.cfg.ratio_clip_c is not None:
            bound = -advantages * self.cfg.ratio_clip_c
            surrogate = torch.where(advantages < 0, torch.minimum(surrogate, bound), surrogate)
        return surrogate

    def _aggregate(self, values: Tensor, counts: "Counts") -> Tensor:
        return counts.aggregate(values, self.cfg.aggregation, self.cfg.loss_scale_factor or 1.0)

    def _kl(self, curr: Tensor, gen: Tensor, live: Tensor, batch: ScoredBatch, counts: "Counts") -> Tensor:
        cfg = self.cfg
        if not cfg.kl_in_loss:
            return curr.new_zeros(())
        if batch.reference_policy_logprobs is None:
            raise ValueError(
                f"loss_fn.reference_policy_kl_penalty={cfg.reference_policy_kl_penalty} needs "
                "reference_policy_logprobs in the batch; set it to 0 to train without a reference policy"
            )
        reference = torch.where(live, batch.reference_policy_logprobs[:, 1:], 0.0)
        # Samples come from the policy that is optimized, so the KL's gradient has a score-function part, which the
        # weight of value 1 brings (arXiv 2506.09477).
        weights = bounded_exp(curr - (gen if cfg.use_on_policy_kl_approximation else curr.detach()))
        return self._aggregate(kl_estimate(curr, reference, weights, cfg) * counts.mask, counts)

    def _entropy(self, curr: Tensor, prev: Tensor, gen: Tensor, correction: Correction, counts: "Counts") -> Tensor:
        """Estimate of the policy's entropy from the tokens that are kept.

            grad H = -E_engine[pi / pi_engine (1 + log pi) grad log pi] = grad -E_engine[pi / pi_engine log pi]

        The ratio is pi / pi_prev times pi_prev / pi_engine; where the correction weighs, its weight, bounded and
        without gradient, stands for the second as in the surrogate.
        """
        old = gen if self.correction.weight == "none" else prev
        estimate = correction.weights * bounded_exp(curr - old) * curr
        return -(torch.where(correction.kept, estimate, 0.0) * counts.mask).sum() / counts.tokens

    def _positive_nll(self, curr: Tensor, mask: Tensor, batch: ScoredBatch, totals: LossTotals) -> Tensor:
        """Mean NLL over the tokens of samples with a positive reward: of the optimizer step where `totals` counts them,
        else of the microbatch.
        """
        if self.cfg.positive_example_nll_weight == 0:
            return curr.new_zeros(())
        positive = mask * (batch.rewards > 0).float().unsqueeze(-1)
        tokens = positive.sum() if totals.positive_toks is None else totals.positive_toks.to(curr.device)
        return -(curr * positive).sum() / tokens.clamp(min=1)

    def _correction_metrics(self, correction: Correction, log_ratio: Tensor, counts: "Counts") -> dict[str, Tensor]:
        """sampling_importance_ratio is the mean weight, is_oob_ratio the share of tokens whose weight was changed.

        As in NeMo RL both count sequences where whole sequences are weighted or rejected. The first is the mean of the
        ratio itself where nothing is weighted.
        """
        weights = correction.weights
        if self.correction.weight == "none":
            total = (log_ratio * counts.mask).sum(-1, keepdim=True).expand_as(log_ratio)
            weights = bounded_exp(total if self.weighs_sequences else log_ratio)
        return {
            "sampling_importance_ratio": counts.mean(weights, self.weighs_sequences),
            "is_oob_ratio": counts.mean(correction.clamped.float(), self.rejects_sequences),
            "nonfinite_logprob_ratio": correction.nonfinite / counts.tokens,
        }


class Counts:
    """The masks of a microbatch and the global denominators.

    mask:        float32 [B, T-1], 1 for tokens that take part
    token_mask:  the same before samples and tokens were dropped
    """

    def __init__(self, mask: Tensor, token_mask: Tensor, totals: LossTotals) -> None:
        self.mask, self.lengths = mask, token_mask.sum(-1).clamp(min=1)
        self.sequences, self.tokens = totals.valid_seqs.clamp(min=1), totals.valid_toks.clamp(min=1)

    def aggregate(self, values: Tensor, mode: Aggregation, scale_factor: float) -> Tensor:
        """values: [B, T-1]."""
        values = values * self.mask
        if mode == "token-mean":
            return values.sum() / self.tokens
        if mode == "seq-mean-token-mean":
            return (values.sum(-1) / self.lengths).sum() / self.sequences
        return values.sum() / self.sequences / scale_factor

    def mean(self, values: Tensor, over_sequences: bool) -> Tensor:
        """Return the mean of values [B, T-1] over tokens, or over sequences whose tokens all have one value."""
        if over_sequences:
            return (values * self.mask).amax(-1).sum() / self.sequences
        return (values * self.mask).sum() / self.tokens


class NllLoss:
    """Supervised negative log-likelihood per generated token: L = -sum(mask * curr) / valid_toks."""

    def __call__(
        self,
        next_token_logprobs: Tensor,
        batch: RolloutBatch,
        totals: LossTotals,
        unfiltered_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        mask = batch.token_mask[:, 1:] * batch.sample_mask.unsqueeze(-1)
        loss = -torch.where(mask > 0, next_token_logprobs, 0.0).sum() / totals.valid_toks
        return loss, {"loss": float(loss.detach())}


def kl_estimate(logprobs: Tensor, reference: Tensor, weights: Tensor, cfg: LossConfig) -> Tensor:
    """Return the estimate of KL(policy || reference) of each token, [B, T-1] (Schulman; NeMo RL `calculate_kl`).

    x = clamp(reference - logprobs);  k1 = -x, k2 = x^2 / 2, k3 = e^x - 1 - x;  then clamp(weights * k).
    Where x was clamped, the weight has no gradient either, so that the clamp stops the whole gradient.
    """
    x = reference - logprobs
    if cfg.kl_input_clamp_value is not None:
        clamped = x.clamp(-cfg.kl_input_clamp_value, cfg.kl_input_clamp_value)
        weights = torch.where(clamped == x, weights, weights.detach())
        x = clamped
    k = {"k1": lambda: -x, "k2": lambda: x.square() / 2, "k3": lambda: x.exp() - 1 - x}[cfg.reference_policy_kl_type]()
    k = weights * k
    if cfg.kl_output_clamp_value is not None:
        k = k.clamp(-cfg.kl_output_clamp_value, cfg.kl_output_clamp_value)
    return k


def bounded_exp(x: Tensor) -> Tensor:
    """Return e^x with x clamped to +-40, so that value and gradient do not overflow; beyond it the gradient is 0."""
    return x.clamp(-LARGEST_LOG, LARGEST_LOG).exp()


def combine_metrics(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of all microbatches or ranks: sums, and extrema of names that end in _min or _max."""
    whole: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            merge = EXTREMA.get(name[-4:], lambda a, b: a + b)
            whole[name] = merge(whole[name], value) if name in whole else value
    return whole


def _ratio_metrics(name: str, ratio: Tensor, live: Tensor, counts: Counts) -> dict[str, Tensor]:
    inf = torch.tensor(torch.inf)
    return {
        name: (ratio * counts.mask).sum() / counts.tokens,
        f"{name}_min": torch.where(live, ratio, inf).amin() if ratio.numel() else inf,
        f"{name}_max": torch.where(live, ratio, -inf).amax() if ratio.numel() else -inf,
    }
