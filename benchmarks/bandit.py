"""What rollout correction does to learning, where the right answer is known: a bandit of 32 arms, pulled 8 times.

    python benchmarks/bandit.py [--seeds 5] [--steps 200] [--json FILE]

A sample is a sequence of 8 arms drawn from p = softmax(32 logits); its reward is the mean of theirs. The objective

    J(p) = E_p[reward of an arm] - BETA KL(p || start),   largest at p proportional to start * e^(reward / BETA)

has one optimum, and its gradient is a sum over arms. But the samples come from an engine whose logits are off: rounded
to a grid, with noise that stays, noise of heavy tails that changes every step, and a few arms that are off by a lot.
The KL is added exactly; the rest of the gradient is what the real loss (`GrpoLoss`, one update a rollout) with the real
correction (`correct_batch`) and RLOO advantages makes of the samples. Measured are

    the gradient of a rollout of 64 samples at the start, against the exact one: relative bias |E g - exact| / |exact|,
    noise sqrt(trace of the covariance) / |exact|, and the cosine of its mean with the exact one
    training by gradient descent: E_p[reward], the regret J(optimum) - J(p), and on how many seeds it is better, that
    is, the regret below that of training without a correction

Means and standard deviations over seeds; a seed is another bandit and another engine. Left out: a state that depends on
what was sampled before, where weights of single tokens are biased as well. Results go to
benchmarks/results/bandit.json unless --json says otherwise.
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from nemo_fp8rl.algorithms.advantages import group_advantages
from nemo_fp8rl.algorithms.correction import correct_batch
from nemo_fp8rl.algorithms.correction_config import CorrectionConfig
from nemo_fp8rl.algorithms.loss import GrpoLoss
from nemo_fp8rl.algorithms.loss_config import LossConfig
from nemo_fp8rl.batch import LossTotals, ScoredBatch
from nemo_fp8rl.config.typed_tree import read_block

RESULTS = Path(__file__).resolve().parent / "results" / "bandit.json"
ARMS, PULLS, SAMPLES, GROUP = 32, 8, 64, 8
GRADIENT_SAMPLES = 1 << 16
"""Samples from which the bias of a gradient is taken: 1,024 rollouts, so noise is a thirty-second of one's."""
GRID, STAYS, CHANGES, OUTLIERS = 0.25, 0.2, 0.05, (-3.0, -2.0, 2.0)
"""The engine's logits: rounded to GRID, plus normal noise that STAYS, Student's t (2 degrees) that CHANGES every step,
and OUTLIERS on arms drawn among the better half."""
BETA, RATE = 0.3, 5.0

K3 = {"weight": "none", "weight_max": None, "reject": [{"statistic": "seq_mean_k3", "max": 0.2}]}
SEQUENCE_RULE = {"statistic": "seq_mean_k1", "max": 1.25, "min": 0.8}
SEQUENCE_MASK = {"weight": "token", "weight_max": None, "reject": [SEQUENCE_RULE]}
MODES: dict[str, dict[str, Any] | None] = {
    "engine = trainer": None,
    "none": {"preset": "none"},
    "bypass": {"preset": "bypass"},
    "is": {"preset": "is"},
    "tis": {"preset": "tis"},
    "geo-tis": {"preset": "geo-tis"},
    "seq-tis": {"preset": "seq-tis"},
    "sequence, unbounded": {"weight": "sequence", "weight_max": None},
    "icepop": {"preset": "icepop"},
    "mis": {"preset": "mis"},
    "seq-mis": {"preset": "seq-mis"},
    "k3-rs": {"preset": "k3-rs"},
    "k3-rs at 0.2": K3,
    "k3-rs at 0.2, kept": K3 | {"denominator": "kept"},
    "geo-rs": {"preset": "geo-rs"},
    "geo-rs-token-tis": {"preset": "geo-rs-token-tis"},
    "seq-mask-tis": {"preset": "seq-mask-tis"},
    "seq-mask-tis at 0.8": SEQUENCE_MASK,
    "seq-mask-tis at 0.8, kept": SEQUENCE_MASK | {"denominator": "kept"},
    "veto": {"preset": "veto"},
    "veto at 0.2": {"weight": "token", "weight_max": 2.0, "reject": [{"statistic": "seq_max_k1", "min": 0.2}]},
    "ipo": {"preset": "ipo"},
    "sparse-rl": {"preset": "sparse-rl"},
    "trm": {"preset": "trm"},
}
"""Every preset as it comes; where its bounds, made for mismatches of a per mille, keep next to nothing here (or all),
also with bounds that do, and these also divided by the tokens that are kept."""


@dataclass(frozen=True)
class Bandit:
    rewards: Tensor  # float64 [ARMS]
    start: Tensor  # float64 [ARMS]
    stays: Tensor  # float64 [ARMS], what the engine always adds to the logits

    @staticmethod
    def of(seed: int) -> "Bandit":
        generator = torch.Generator().manual_seed(seed)

        def normal() -> Tensor:
            return torch.randn(ARMS, generator=generator, dtype=torch.float64)

        rewards, stays = normal(), STAYS * normal()
        better = rewards.argsort(descending=True)[: ARMS // 2]
        arms = better[torch.randperm(len(better), generator=generator)[: len(OUTLIERS)]]
        stays[arms] += torch.tensor(OUTLIERS, dtype=torch.float64)
        return Bandit(rewards, 0.5 * normal(), stays)

    def engine(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """The engine's log-probs of all arms."""
        normal = torch.randn(3, ARMS, generator=generator, dtype=torch.float64)
        student = normal[0] / (normal[1:].square().sum(0) / 2).sqrt()
        return ((logits / GRID).round() * GRID + self.stays + CHANGES * student).log_softmax(-1)

    def value(self, logits: Tensor) -> float:
        return float(logits.softmax(-1) @ self.rewards)

    def objective(self, logits: Tensor) -> float:
        return self.value(logits) - BETA * float((logits.softmax(-1) * self._excess(logits)).sum())

    def gradient(self, logits: Tensor) -> Tensor:
        """Of E_p[reward]: p (r - E r)."""
        return _centered(logits.softmax(-1), self.rewards)

    def pull(self, logits: Tensor) -> Tensor:
        """The gradient of -BETA KL(p || start): of E_p[-BETA log(p / start)]; what log p adds has mean 0."""
        return _centered(logits.softmax(-1), -BETA * self._excess(logits))

    def optimum(self) -> Tensor:
        return self.start.log_softmax(-1) + self.rewards / BETA

    def _excess(self, logits: Tensor) -> Tensor:
        return logits.log_softmax(-1) - self.start.log_softmax(-1)


def _centered(policy: Tensor, values: Tensor) -> Tensor:
    return policy * (values - policy @ values)


def estimate(
    bandit: Bandit, logits: Tensor, loss: GrpoLoss, matched: bool, generator: torch.Generator, samples: int
) -> tuple[Tensor, float]:
    """Gradients of E reward, float64 [samples / SAMPLES, ARMS], one a rollout, and the share of tokens rejected."""
    log_policy = logits.log_softmax(-1)
    engine = log_policy if matched else bandit.engine(logits, generator)
    arms = torch.multinomial(engine.exp().expand(samples, -1), PULLS, replacement=True, generator=generator)
    rewards = bandit.rewards[arms].mean(-1).float()
    advantages = group_advantages(
        rewards, torch.arange(samples) // GROUP, normalize_rewards=False, use_leave_one_out_baseline=True
    )
    prompt = torch.zeros(samples, 1)  # one token that was not generated
    batch = ScoredBatch(
        input_ids=torch.cat([prompt.long(), arms], 1),
        input_lengths=torch.full((samples,), PULLS + 1),
        token_mask=torch.cat([prompt, torch.ones(samples, PULLS)], 1),
        sample_mask=torch.ones(samples),
        rewards=rewards,
        advantages=advantages[:, None].expand(-1, PULLS + 1),
        generation_logprobs=torch.cat([prompt, engine[arms].float()], 1),
        prev_logprobs=torch.cat([prompt, log_policy[arms].float()], 1),
    )
    corrected, metrics = correct_batch(batch, loss.correction)
    curr = log_policy[arms].float().requires_grad_()
    mask = corrected.loss_mask
    loss(curr, corrected, LossTotals((mask.sum(-1) > 0).sum(), mask.sum()))[0].backward()
    assert curr.grad is not None
    # The loss is a mean over tokens of which each sees the sample's mean reward: d J / d logits is PULLS times it.
    by_token = -PULLS * samples / SAMPLES * curr.grad.double().view(-1, SAMPLES * PULLS)
    pulled = torch.zeros(len(by_token), ARMS, dtype=torch.float64)
    pulled.scatter_add_(1, arms.view(-1, SAMPLES * PULLS), by_token)
    # d log p(a) / d logits = onehot(a) - p
    gradients = pulled - by_token.sum(1, keepdim=True) * log_policy.exp()
    return gradients, metrics["correction/rejected_token_ratio"]


def quality(bandit: Bandit, loss: GrpoLoss, matched: bool, seed: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(seed)
    gradients, rejected = estimate(bandit, bandit.start, loss, matched, generator, GRADIENT_SAMPLES)
    exact = bandit.gradient(bandit.start)
    middle, variance = gradients.mean(0), float(gradients.var(0).sum())
    # The mean of n estimates is off by variance / n more than their expectation is.
    bias = math.sqrt(max(0.0, float((middle - exact).square().sum()) - variance / len(gradients)))
    size = float(exact.norm())
    cosine = float(middle @ exact / (middle.norm() * size)) if middle.any() else 0.0
    return {"bias": bias / size, "noise": math.sqrt(variance) / size, "cosine": cosine, "rejected": rejected}


def training(bandit: Bandit, loss: GrpoLoss, matched: bool, seed: int, steps: int) -> dict[str, float]:
    """E reward and what is missing to the optimum, means over the last quarter of the steps."""
    generator, logits, tail = torch.Generator().manual_seed(seed), bandit.start.clone(), []
    best = bandit.objective(bandit.optimum())
    for step in range(steps):
        gradients, _ = estimate(bandit, logits, loss, matched, generator, SAMPLES)
        rate = RATE * (1 - step / steps)
        logits = logits + rate * (gradients[0] + bandit.pull(logits))
        if step >= steps * 3 // 4:
            tail.append((bandit.value(logits), best - bandit.objective(logits)))
    return {"reward": mean(value for value, _ in tail), "regret": mean(gap for _, gap in tail)}


def measure(seeds: int, steps: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    bandits = [Bandit.of(seed) for seed in range(seeds)]
    modes: dict[str, Any] = {}
    for name, keys in MODES.items():
        loss = GrpoLoss(
            LossConfig(reference_policy_kl_penalty=0.0),
            read_block(keys or {"preset": "none"}, CorrectionConfig, "nemo_fp8rl.correction."),
        )
        runs = [
            quality(bandit, loss, keys is None, 1000 + seed) | training(bandit, loss, keys is None, 2000 + seed, steps)
            for seed, bandit in enumerate(bandits)
        ]
        modes[name] = {
            key: {"mean": mean(run[key] for run in runs), "std": stdev(run[key] for run in runs) if seeds > 1 else 0.0}
            for key in runs[0]
        } | {"regrets": [run["regret"] for run in runs]}
    optima = [bandit.optimum() for bandit in bandits]
    return {
        "seeds": seeds,
        "steps": steps,
        "start": {"reward": mean(bandit.value(bandit.start) for bandit in bandits)},
        "optimum": {"reward": mean(b.value(o) for b, o in zip(bandits, optima, strict=True))},
        "modes": modes,
    }


def show(result: dict[str, Any]) -> None:
    columns: tuple[tuple[str, Callable[[float], str]], ...] = (
        ("rejected", lambda value: f"{value:.0%}"),
        ("bias", lambda value: f"{value:.2f}"),
        ("noise", lambda value: f"{value:.2f}"),
        ("cosine", lambda value: f"{value:.3f}"),
        ("reward", lambda value: f"{value:.3f}"),
        ("regret", lambda value: f"{value:.3f}"),
    )
    names = (*(name for name, _ in columns), "better")
    table = Table("correction", *names, title=f"{result['seeds']} seeds, mean (std)", padding=(0, 0), box=box.ASCII)
    uncorrected = result["modes"]["none"]["regrets"]
    for name, row in result["modes"].items():
        cells = (f"{form(row[key]['mean'])} ({form(row[key]['std'])})" for key, form in columns)
        better = sum(own < other for own, other in zip(row["regrets"], uncorrected, strict=True))
        table.add_row(name, *cells, f"{better}/{len(uncorrected)}")
    console = Console(width=120)
    console.print(table)
    console.print(
        f"E reward: {result['start']['reward']:.3f} at the start, {result['optimum']['reward']:.3f} at the optimum"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.seeds < 1 or arguments.steps < 4:
        parser.error("--seeds must be 1 or more and --steps 4 or more")
    result = measure(arguments.seeds, arguments.steps)
    show(result)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
