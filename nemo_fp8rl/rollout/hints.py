"""grpo.hints: prompts that the policy never answers are asked again with the beginning of a reference solution.

A stage is one of grpo.hints.shares. All groups of a stage are asked in one call of the engines, and only groups without
an answer that the verifier gives more than 0 come to the next stage. The prompt with the hint takes the place of the
prompt: answers were sampled behind it, so trainer and engine compare the same context. Left out: the cold start of the
paper, which hints every prompt in the first steps.

Source: GHPO, arXiv 2507.10628, and its released code. This differs where that code is at fault: shares are of tokens,
nothing of a prompt is cut off, and no group is asked without need.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_fp8rl.batch import Completion, Prompt
from nemo_fp8rl.config.grpo_schema import HintsConfig
from nemo_fp8rl.data.tokenizer import PromptTokenizer


@dataclass(frozen=True)
class Groups:
    """Prompts with equally many answers each, which are neighbours.

    prompts:  one a group
    rewards:  float32 [answers], the verifier's
    """

    prompts: list[Prompt]
    completions: list[Completion]
    rewards: Tensor


Ask = Callable[[Sequence[Prompt], Sequence[int | str]], Groups]
"""Generates and scores answers; the second argument has the positions of the seeds."""


def ask_with_hints(
    hints: HintsConfig, tokenizer: PromptTokenizer, groups: Groups, positions: Sequence[int], ask: Ask
) -> Groups:
    """Return the groups after all stages; those with a right answer, and those that take no hint, are as they were.

    positions:  of the prompts in the step; seeds of a stage are those of "POSITION/hint STAGE"
    """
    prompts, completions = list(groups.prompts), list(groups.completions)
    rewards, size = groups.rewards.clone(), len(completions) // len(prompts)
    for stage, share in enumerate(hints.shares, 1):
        failed = (rewards.view(-1, size) <= 0).all(-1).nonzero()[:, 0].tolist()
        questions = dict[int, Prompt]()
        for i in failed:
            prompt = tokenizer.add_hint(prompts[i], share, stage, hints.template)
            if prompt and prompt.token_ids != prompts[i].token_ids:  # a short solution may have no token to add
                questions[i] = prompt
        if not questions:
            continue
        answers = ask(list(questions.values()), [f"{positions[i]}/hint {stage}" for i in questions])
        for row, i in enumerate(questions):
            old, new = (slice(at * size, (at + 1) * size) for at in (i, row))
            prompts[i], completions[old], rewards[old] = questions[i], answers.completions[new], answers.rewards[new]
    return Groups(prompts, completions, rewards)


def hint_metrics(hints: HintsConfig, prompts: Sequence[Prompt], unhinted_rewards: Tensor) -> dict[str, float]:
    """Return shares of the groups that train with a hint, and the mean reward of all first answers.

    prompts:           of the answers that train
    unhinted_rewards:  float32 [answers]
    """
    stages = torch.tensor([prompt.hint_stage for prompt in prompts])
    shares = {
        f"hinted_ratio/stage_{stage}": float((stages == stage).double().mean())
        for stage in range(1, len(hints.shares) + 1)
    }
    ratio, reward = float((stages > 0).double().mean()), float(unhinted_rewards.mean())
    return {"hinted_ratio": ratio, **shares, "unhinted_reward": reward}
