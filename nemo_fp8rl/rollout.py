"""The first half of a step: answers to prompts, judged, and with dynamic sampling asked for until they differ."""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_fp8rl.algorithms.advantages import groups_with_signal, overlong_penalty, stop_properly_penalty
from nemo_fp8rl.batch import Completion, Prompt
from nemo_fp8rl.common.errors import StepRefused
from nemo_fp8rl.common.stopwatch import Stopwatch
from nemo_fp8rl.config.grpo_schema import RewardShapingConfig
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.data.rewards import AT_ONCE, VERIFIERS
from nemo_fp8rl.data.tokenizer import PromptTokenizer
from nemo_fp8rl.generation.interface import Generation, Sampling, sample_seed


@dataclass(frozen=True)
class Rollout:
    """Samples of one step, those of a prompt side by side.

    prompts:      the prompt of each completion
    rewards:      float32 [B], the verifier's
    group_ids:    int64 [B], one value a prompt
    rounds:       how often the engine was asked; more than once only with dynamic sampling
    all_rewards:  float32, the verifier's of the answers of all rounds, also of those that were dropped
    generated:    tokens of these answers
    truncated:    how many of them were cut off at their longest
    """

    prompts: list[Prompt]
    completions: list[Completion]
    rewards: Tensor
    group_ids: Tensor
    rounds: int
    all_rewards: Tensor
    generated: int
    truncated: int


def collect(
    cfg: Config,
    generation: Generation,
    tokenizer: PromptTokenizer,
    sampling: Sampling,
    clock: Stopwatch,
    step: int,
    prompts_of_round: Callable[[int], Sequence[Prompt]],
) -> Rollout:
    """Completions of a step's prompts. With grpo.use_dynamic_sampling, groups whose rewards are all equal are dropped
    and other prompts asked in further rounds (DAPO, arXiv 2503.14476). Raises StepRefused when these do not suffice.
    """
    dynamic = cfg.grpo.use_dynamic_sampling
    wanted = cfg.grpo.num_prompts_per_step
    size = sampling.num_generations
    asked: list[Prompt] = []
    completions: list[Completion] = []
    scores: list[Tensor] = []
    all_scores: list[Tensor] = []
    generated = truncated = 0
    for round_ in range(cfg.grpo.dynamic_sampling_max_gen_batches if dynamic else 1):
        prompts = prompts_of_round(round_)
        if not prompts:
            break
        with clock("generate", len(prompts)) as answered:
            seeds = [sample_seed(cfg.grpo.seed, step, round_ * wanted + i) for i in range(len(prompts))]
            groups = generation.generate([p.token_ids for p in prompts], seeds, sampling, answered)
        flat = [completion for group in groups for completion in group]
        generated += sum(len(completion.token_ids) for completion in flat)
        truncated += sum(completion.finish_reason == "length" for completion in flat)
        with clock("reward"):
            rewards = score(cfg, tokenizer, [p for p in prompts for _ in range(size)], flat)
        all_scores.append(rewards)
        signal = torch.ones(len(flat), dtype=torch.bool)
        if dynamic:
            signal = groups_with_signal(rewards, torch.arange(len(prompts)).repeat_interleave(size))
        for i, prompt in enumerate(prompts):
            rows = slice(i * size, (i + 1) * size)
            if signal[i * size] and len(scores) < wanted:
                asked += [prompt] * size
                completions += flat[rows]
                scores.append(rewards[rows])
        if len(scores) == wanted:
            group_ids = torch.arange(wanted).repeat_interleave(size)
            kept, judged = torch.cat(scores), torch.cat(all_scores)
            return Rollout(asked, completions, kept, group_ids, round_ + 1, judged, generated, truncated)
    raise StepRefused(
        f"dynamic sampling found {len(scores)} of {wanted} prompts whose answers are not all alike in "
        f"grpo.dynamic_sampling_max_gen_batches={cfg.grpo.dynamic_sampling_max_gen_batches} rounds; raise it, or give "
        "more prompts that are neither too easy nor too hard"
    )


def further_prompts(
    prompts: Sequence[Prompt], first: Sequence[Prompt], seed: int, step: int, round_: int
) -> list[Prompt]:
    """What dynamic sampling asks in round 1, 2, ... of a step: as many as in its first, none twice; [] at the end.

    A function of its arguments, so a resumed run asks the same.
    """
    asked = {prompt.index for prompt in first}
    rest = [prompt for prompt in prompts if prompt.index not in asked]
    random.Random(f"{seed}/{step}/further prompts").shuffle(rest)
    return rest[(round_ - 1) * len(first) : round_ * len(first)]


def score(
    cfg: Config, tokenizer: PromptTokenizer, prompts: Sequence[Prompt], completions: Sequence[Completion]
) -> Tensor:
    """float32 [B] rewards in 0..1."""
    verifier = VERIFIERS[cfg.data.default.env_name]
    texts = [tokenizer.decode(completion.token_ids) for completion in completions]
    asked = [(text, prompt.answer) for text, prompt in zip(texts, prompts, strict=True)]
    unique = list(dict.fromkeys(asked))
    with ThreadPoolExecutor(AT_ONCE, "verify") as pool:
        found = dict(zip(unique, pool.map(lambda pair: verifier(*pair), unique), strict=True))
    return torch.tensor([found[pair] for pair in asked])


def shaped(rewards: Tensor, completions: Sequence[Completion], cfg: RewardShapingConfig) -> Tensor:
    """Rewards after grpo.reward_shaping, float32 [B]."""
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
