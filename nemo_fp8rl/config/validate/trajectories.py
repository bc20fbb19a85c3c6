"""Rules of grpo.trajectory_sampling: groups must fall into pairs, and pairs into rounds."""

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.schema import Config


def check_trajectories(cfg: Config) -> None:
    """Raise UserError where a step's answers do not fall into the pairs and rounds of the recipe."""
    choice, size, block = cfg.grpo.trajectory_sampling, cfg.grpo.num_generations_per_prompt, "grpo.trajectory_sampling"
    if not choice.enabled:
        return
    if size % 2:
        raise UserError(f"{block} makes pairs: grpo.num_generations_per_prompt={size} must be even")
    pairs, count = size // 2, cfg.grpo.kept_pairs
    if not count or abs(choice.keep_pairs * pairs - count) > 0.01:
        near = max(count, 1) / pairs
        raise UserError(
            f"{block}.keep_pairs={choice.keep_pairs:g} of the {pairs} pairs of a group is no whole number: set it to "
            f"{near:.4g}, or change grpo.num_generations_per_prompt={size}"
        )
    if choice.shuffle_rounds and (of_step := count * cfg.grpo.num_prompts_per_step) % choice.shuffle_rounds:
        raise UserError(
            f"{block}.shuffle_rounds={choice.shuffle_rounds} does not divide the {of_step} pairs of a step "
            f"(grpo.num_prompts_per_step={cfg.grpo.num_prompts_per_step} times {count} of a group)"
        )
    if cfg.loss_fn.use_kl_in_reward:
        raise UserError(
            f"{block} chooses answers by their advantages before log-probs are computed, and "
            "loss_fn.use_kl_in_reward=true takes advantages from log-probs: set it to false"
        )
