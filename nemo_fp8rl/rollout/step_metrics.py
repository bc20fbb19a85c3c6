"""The metrics of a step under train/."""

import math

import torch

from nemo_fp8rl.algorithms.policy_update import Judgement
from nemo_fp8rl.batch import SequenceBatch
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.rollout.collect import Rollout
from nemo_fp8rl.rollout.hints import hint_metrics


def step_metrics(
    cfg: Config, rollout: Rollout, judgement: Judgement, trained: dict[str, float], skipped: int
) -> dict[str, float]:
    """Return the metrics under train/.

    trained:  metrics of the optimizer steps; skipped: how many steps did not take place
    """
    batch = judgement.batch
    metrics = trained | judgement.mismatch | judgement.mismatch_by_position | judgement.mismatch_by_lag
    metrics |= judgement.correction
    metrics |= known_route_share(batch)
    metrics |= {
        "reward": float(rollout.all_rewards.mean()),
        "generated_tokens": rollout.generated_tokens,
        "mean_gen_tokens_per_sample": rollout.generated_tokens / len(rollout.all_rewards),
        "truncation_rate": rollout.truncated_answers / len(rollout.all_rewards),
        "global_valid_toks": float(batch.loss_mask.sum()),
        "generation_rounds": rollout.rounds,
        "optimizer_steps_skipped": skipped,
    }
    if cfg.grpo.use_dynamic_sampling or cfg.grpo.hints.enabled:
        metrics["filtered_reward"] = float(rollout.rewards.mean())
    if cfg.grpo.hints.enabled:
        metrics |= hint_metrics(cfg.grpo.hints, rollout.prompts, rollout.unhinted_rewards)
    # a metric of no token (all rejected, none finite) is left out: JSON has no NaN
    return {f"train/{name}": value for name, value in metrics.items() if math.isfinite(value)}


def known_route_share(batch: SequenceBatch) -> dict[str, float]:
    """Return routes_known: the share of the tokens that the engine read whose experts it named.

    The trainer's own routers choose the experts of the other tokens. The result is empty without routes.
    """
    if batch.routed_experts is None:
        return {}
    read = torch.arange(batch.input_ids.size(1)) < batch.input_lengths[:, None] - 1  # all but the last token
    return {"routes_known": float((batch.routed_experts[..., 0, 0] >= 0)[read].float().mean())}
