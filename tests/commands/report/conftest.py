"""Run directories for the report, written with the run's StepLog. test_train.py makes reports of real runs."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_fp8rl.run.step_log import StepLog

PHASES = {"generate": 0.2, "reward": 0.01, "logprob": 0.1, "train": 0.4, "refit": 0.02}
STAGES = ("export", "quantize", "encode", "send", "load", "verify")


def write_run(
    folder: Path, steps: int, last: int = 0, *, layers: int = 2, tokens: int = 4, positions: int = 4, every: int = 10
) -> Path:
    """Write the files of a run after `steps` of `last` steps, with a validation and answers every `every` steps."""
    folder.mkdir(parents=True)
    config = {"grpo": {"max_num_steps": last or steps}, "nemo_fp8rl": {"flow": "fp8_e2e"}, "logger": {"log_dir": "x"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    environment = {"python": "3.11.7", "versions": {"torch": "2.13.0"}, "choices": {"flow": "fp8_e2e"}}
    (folder / "environment.json").write_text(json.dumps(environment))
    noise = random.Random(0)
    logs = {name: StepLog(folder / f"{name}.jsonl", 0) for name in ("metrics", "histograms", "samples")}
    for step in range(steps + 1):
        validates = step % every == 0
        logs["metrics"].append(step, make_metrics(noise, step, layers if validates else 0, positions))
        if step:
            bins = [[-0.01, -0.005, noise.randint(1, 9)], [-0.0001, 0.0001, 900], [1.0, 1.77828, noise.randint(1, 9)]]
            logs["histograms"].append(step, {"log_weights": bins})
        if step and validates:
            logs["samples"].append(step, {"samples": [make_sample(noise, tokens) for _ in range(3)]})
    for log in logs.values():
        log.close()
    return folder


def make_metrics(noise: random.Random, step: int, layers: int, positions: int) -> dict[str, float]:
    row = {"refit/bytes": noise.randint(80_000, 90_000), "timing/refit": 0.02 + noise.random() / 100}
    row |= {f"timing/refit_{stage}": noise.random() / 100 for stage in STAGES}
    if layers:
        row |= {"validation/accuracy": noise.random(), "weight_error/fp8": 0.0265 + noise.random() / 1e4}
        row |= {f"weight_error/layer_{i}": 0.022 + noise.random() / 1e4 for i in range(layers)}
    if not step:
        return row
    starts = [0, 1, *(2**i for i in range(1, positions - 1))]
    for start in starts[:positions]:
        name = f"position_{start}" if start < 2 else f"position_{start}_{2 * start - 1}"
        row[f"train/gen_kl_error/{name}"] = noise.random() * 1e-6
        row[f"train/mean_logprob_error/{name}"] = noise.random() * 1e-4
    for name in ("reward", "loss", "grad_norm", "approx_entropy", "mean_gen_tokens_per_sample"):
        row[f"train/{name}"] = noise.random()
    row |= {"train/token_mult_prob_error": 1 + noise.random() / 1e4, "train/gen_kl_error": noise.random() * 1e-6}
    for name in (
        *("exact_logprob_fraction", "max_logprob_error", "ess", "ess_seq", "correction/rejected_token_ratio"),
        *("frac_reward_zero_std", "truncation_rate"),
    ):
        row[f"train/{name}"] = noise.random()
    row |= {f"timing/{name}": seconds * (1 + noise.random()) for name, seconds in PHASES.items()}
    row["timing/total_step_time"] = sum(row[f"timing/{name}"] for name in PHASES) + 0.01
    row["performance/generation_tokens_per_sec"] = 5000 + 1000 * noise.random()
    return row


def make_sample(noise: random.Random, tokens: int, text: str = " 7") -> dict[str, Any]:
    engine = [-noise.random() for _ in range(tokens)]
    trainer = [value + noise.gauss(0, 1e-3) for value in engine]
    return {
        "chosen": "highest reward", "prompt": "3+4=", "reward": 1.0, "policy_version": 0, "num_tokens": tokens + 5,
        "tokens": [text] * tokens, "prev_logprobs": trainer, "generation_logprobs": engine,
    }  # fmt: skip


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """make_run(name, steps, ...) returns a run directory, see `write_run`."""
    return lambda name="run", *args, **kwargs: write_run(tmp_path / name, *args, **kwargs)


@pytest.fixture(scope="session")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,000 steps of a model of 36 layers, answers of up to 1,023 tokens, 100 validations, 512 tokens a sample."""
    return write_run(tmp_path_factory.mktemp("long") / "run", 1000, layers=36, tokens=512, positions=11)
