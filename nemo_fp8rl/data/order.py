"""The order of prompts: a function of (seed, step) alone, so that a resumed run continues where it stopped."""

import random

import torch


def count_steps(max_num_steps: int, max_num_epochs: int | None, num_prompts: int, per_step: int) -> int:
    """Return the steps of a run: those of max_num_epochs, if these are fewer. An epoch counts its whole steps alone."""
    if max_num_epochs is None:
        return max_num_steps
    return min(max_num_steps, max_num_epochs * (num_prompts // per_step))


class PromptOrder:
    """Epochs of random permutations; each step takes the next `per_step` positions.

    The short tail of an epoch joins the next epoch.
    """

    def __init__(self, num_prompts: int, per_step: int, seed: int) -> None:
        self.num_prompts, self.per_step, self.seed = num_prompts, per_step, seed
        self._epoch: tuple[int, list[int]] = (-1, [])

    def indices(self, step: int) -> list[int]:
        """Return the dataset positions of step 1, 2, ...; no position occurs twice within an epoch."""
        first = (step - 1) * self.per_step
        return [
            self._permutation(i // self.num_prompts)[i % self.num_prompts] for i in range(first, first + self.per_step)
        ]

    def _permutation(self, epoch: int) -> list[int]:
        if self._epoch[0] != epoch:
            generator = torch.Generator().manual_seed(random.Random(f"{self.seed}/{epoch}").getrandbits(63))
            self._epoch = (epoch, torch.randperm(self.num_prompts, generator=generator).tolist())
        return self._epoch[1]
