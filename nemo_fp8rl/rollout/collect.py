"""The first half of a step: generate answers to prompts, score them, and compute their advantages.

With dynamic sampling answers are generated until the rewards of a group differ; with hints, failed prompts are asked
again before.
"""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nemo_fp8rl.algorithms.advantages import (
    group_advantages,
    group_metrics,
    groups_with_signal,
    overlong_penalty,
    reinforce_plus_plus_advantages,
    stop_properly_penalty,
)
from nemo_fp8rl.algorithms.loss import kl_estimate
from nemo_fp8rl.batch import Completion, Prompt, RolloutBatch
from nemo_fp8rl.common.errors import StepRefused
from nemo_fp8rl.common.stopwatch import Stopwatch
from nemo_fp8rl.config.grpo_schema import RewardShapingConfig
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.data.rewards import Answered, load_scorer
from nemo_fp8rl.data.rewards.answer_form import has_answer, may_lack_answer
from nemo_fp8rl.data.tokenizer import PromptTokenizer
from nemo_fp8rl.generation.interface import Generation, Sampling, sample_seed
from nemo_fp8rl.rollout.hints import Groups, ask_with_hints

PromptsOfRound = Callable[[int], Sequence[Prompt]]
"""Prompts of generation round 0, 1, ... of a step; more than one only with dynamic sampling."""

SCORING = threading.Lock()
"""A function of the user's own may not bear two threads at once."""


@dataclass(frozen=True)
class Rollout:
    """The samples of one step; those of a prompt are neighbours.

    prompts:            the prompt of each completion
    rewards:            float32 [B], the verifier's
    group_ids:          int64 [B], one value per prompt
    rounds:             generation rounds; more than one only with dynamic sampling
    all_rewards:        float32 [answers], the verifier's, of all rounds and of all stages of hints, also of the answers
                        that were dropped
    generated_tokens:   tokens of all these answers
    truncated_answers:  how many of all these answers reached the maximum length
    generate_seconds:   seconds in which engines generated these answers
    unhinted_rewards:   float32 [answers], those of `all_rewards` whose prompts had no hint
    """

    prompts: list[Prompt]
    completions: list[Completion]
    rewards: Tensor
    group_ids: Tensor
    rounds: int
    all_rewards: Tensor
    generated_tokens: int
    truncated_answers: int
    generate_seconds: float
    unhinted_rewards: Tensor


@dataclass
class AnswerCounts:
    """Counts of all answers of a step, in the order of their generation."""

    rewards: list[Tensor] = field(default_factory=list)
    generated_tokens: int = 0
    truncated: int = 0

    def add(self, completions: Sequence[Completion], rewards: Tensor) -> None:
        self.rewards.append(rewards)
        self.generated_tokens += sum(len(completion.token_ids) for completion in completions)
        self.truncated += sum(completion.finish_reason == "length" for completion in completions)


def collect_rollout(
    cfg: Config,
    generation: Generation,
    tokenizer: PromptTokenizer,
    sampling: Sampling,
    clock: Stopwatch,
    step: int,
    prompts_of_round: PromptsOfRound,
) -> Rollout:
    """Generate and score completions of a step's prompts.

    With grpo.hints, groups without a right answer are asked again with a hint (`rollout.hints`). With
    grpo.use_dynamic_sampling, groups whose rewards are all equal are dropped, and further rounds sample other
    prompts (DAPO, arXiv 2503.14476). Raises StepRefused when the rounds do not suffice.
    """
    dynamic, hints = cfg.grpo.use_dynamic_sampling, cfg.grpo.hints
    num_prompts = cfg.grpo.num_prompts_per_step
    size = sampling.num_generations
    sampled_prompts: list[Prompt] = []
    completions: list[Completion] = []
    scores: list[Tensor] = []
    first_scores: list[Tensor] = []
    answers = AnswerCounts()

    def ask(prompts: Sequence[Prompt], positions: Sequence[int | str]) -> Groups:
        with clock("generate", len(prompts)) as on_progress:
            seeds = [sample_seed(cfg.grpo.seed, step, position) for position in positions]
            groups = generation.generate([p.token_ids for p in prompts], seeds, sampling, on_progress)
        flat = [completion for group in groups for completion in group]
        with clock("reward"):
            rewards = score_answers(cfg, tokenizer, [p for p in prompts for _ in range(size)], flat)
        answers.add(flat, rewards)
        return Groups(list(prompts), flat, rewards)

    for round_ in range(cfg.grpo.dynamic_sampling_max_gen_batches if dynamic else 1):
        prompts = prompts_of_round(round_)
        if not prompts:
            break
        positions = [round_ * num_prompts + i for i in range(len(prompts))]
        groups = ask(prompts, positions)
        first_scores.append(groups.rewards)
        if hints.enabled and step > hints.start_step:
            groups = ask_with_hints(hints, tokenizer, groups, positions, ask)
        signal = torch.ones(len(groups.completions), dtype=torch.bool)
        if dynamic:
            signal = groups_with_signal(groups.rewards, torch.arange(len(prompts)).repeat_interleave(size))
        for i, prompt in enumerate(groups.prompts):
            rows = slice(i * size, (i + 1) * size)
            if signal[i * size] and len(scores) < num_prompts:
                sampled_prompts += [prompt] * size
                completions += groups.completions[rows]
                scores.append(groups.rewards[rows])
        if len(scores) == num_prompts:
            group_ids = torch.arange(num_prompts).repeat_interleave(size)
            return Rollout(
                sampled_prompts,
                completions,
                torch.cat(scores),
                group_ids,
                *(round_ + 1, torch.cat(answers.rewards), answers.generated_tokens, answers.truncated),
                clock.seconds["generate"],
                torch.cat(first_scores),
            )
    raise StepRefused(
        f"dynamic sampling found {len(scores)} of {num_prompts} prompts whose answers are not all alike in "
        f"grpo.dynamic_sampling_max_gen_batches={cfg.grpo.dynamic_sampling_max_gen_batches} rounds; raise it, or give "
        "more prompts that are neither too easy nor too hard"
    )


def pick_further_prompts(
    prompts: Sequence[Prompt], first: Sequence[Prompt], seed: int, step: int, round_: int
) -> list[Prompt]:
    """Return the prompts of round 1, 2, ... of a step: as many as in its first round, none twice; [] when none is left.

    The result depends on the arguments alone, so a resumed run samples the same prompts.
    """
    first_indices = {prompt.index for prompt in first}
    rest = [prompt for prompt in prompts if prompt.index not in first_indices]
    random.Random(f"{seed}/{step}/further prompts").shuffle(rest)
    return rest[(round_ - 1) * len(first) : round_ * len(first)]


def score_answers(
    cfg: Config, tokenizer: PromptTokenizer, prompts: Sequence[Prompt], completions: Sequence[Completion]
) -> Tensor:
    """Return the rewards, float32 [B], of the verifier or function that data.default.env_name names.

    Raises: StepRefused, with the sample, where a function of the user's own gives none
    """
    samples = [
        Answered(
            tokenizer.decode(completion.token_ids),
            (prompt.answer, *prompt.other_answers),
            prompt.fields,
            f"{prompt.place or 'a sample'}, prompt number {prompt.index}",
        )
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    with SCORING:
        return torch.tensor(load_scorer(cfg.data.default.env_name).score(samples), dtype=torch.float32)


def signal_metrics(cfg: Config, tokenizer: PromptTokenizer, rollout: Rollout) -> dict[str, float]:
    """Return metrics of what the loss can learn from the rewards; see `run.learning_signal`."""
    rewards = shape_rewards(rollout.rewards, rollout.completions, cfg.grpo.reward_shaping)
    metrics = group_metrics(rewards, rollout.group_ids)
    answers: dict[int, set[tuple[int, ...]]] = {}
    for group, completion in zip(rollout.group_ids.tolist(), rollout.completions, strict=True):
        answers.setdefault(group, set()).add(tuple(completion.token_ids))
    metrics["frac_identical_answers"] = sum(len(texts) == 1 for texts in answers.values()) / len(answers)
    if may_lack_answer(cfg.data.default.env_name) and not rollout.rewards.any():
        found = [
            has_answer(tokenizer.decode(completion.token_ids), (prompt.answer, *prompt.other_answers))
            for prompt, completion in zip(rollout.prompts, rollout.completions, strict=True)
        ]
        metrics["frac_answer_not_found"] = 1 - sum(found) / len(found)
    return metrics


def shape_rewards(rewards: Tensor, completions: Sequence[Completion], cfg: RewardShapingConfig) -> Tensor:
    """Return the rewards after grpo.reward_shaping, float32 [B]."""
    if not cfg.enabled:
        return rewards
    if cfg.stop_properly_penalty_coef is not None:
        truncated = torch.tensor([c.finish_reason == "length" for c in completions])
        return stop_properly_penalty(rewards, truncated, cfg.stop_properly_penalty_coef)
    assert cfg.max_response_length and cfg.overlong_buffer_length and cfg.overlong_buffer_penalty is not None
    lengths = torch.tensor([len(c.token_ids) for c in completions])
    return rewards + overlong_penalty(
        lengths,
        max_response_length=cfg.max_response_length,
        overlong_buffer_length=cfg.overlong_buffer_length,
        overlong_buffer_penalty=cfg.overlong_buffer_penalty,
    )


def compute_advantages(
    cfg: Config,
    rollout: Rollout,
    batch: RolloutBatch,
    prev_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
) -> Tensor:
    """Return float32 [B, T], 0 where nothing was generated.

    prev_logprobs, reference_logprobs:  float32 [B, T], for a KL in the reward; nothing else needs them
    """
    choice = cfg.grpo.adv_estimator
    rewards = shape_rewards(rollout.rewards, rollout.completions, cfg.grpo.reward_shaping)
    if choice.name == "grpo":
        grpo_advantages = group_advantages(
            rewards,
            rollout.group_ids,
            normalize_rewards=choice.normalize_rewards,
            use_leave_one_out_baseline=choice.use_leave_one_out_baseline,
        )
        return grpo_advantages[:, None] * batch.token_mask
    kl = None
    if cfg.loss_fn.use_kl_in_reward:
        assert prev_logprobs is not None and reference_logprobs is not None
        if not reference_logprobs[batch.loss_mask > 0].isfinite().all():
            raise StepRefused("the reference policy has log-probs that are not finite: look into policy.model_name")
        estimate = kl_estimate(prev_logprobs, reference_logprobs, torch.ones(()), cfg.loss_fn)
        kl = cfg.loss_fn.reference_policy_kl_penalty * estimate
        kl = torch.where(prev_logprobs.isfinite(), kl, 0.0)  # `correct_batch` rejects those tokens
    return reinforce_plus_plus_advantages(
        rewards, rollout.group_ids, batch.loss_mask, minus_baseline=choice.minus_baseline, kl=kl
    )
