"""Start runs of NeMo RL's own loop by `nemo-fp8rl nemo`, on the tiny model, each in its own process, and read logs."""

import os
import subprocess
import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import RECIPES

needs_checkout = pytest.mark.skipif(
    "NEMO_RL_SRC" not in os.environ or find_spec("hydra") is None,
    reason="needs a checkout and what it imports: git clone https://github.com/NVIDIA-NeMo/RL, set NEMO_RL_SRC to that "
    "folder, make test-nemo-rl",
)
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""A template of the prompt's text alone, as `nemo-fp8rl train` uses for a tokenizer without a template."""
RECIPE = RECIPES / "nemo_rl/llama3.1-8b-instruct-fp8-e2e.yaml"
STEPS = 4
SIZES = (
    "policy.max_total_sequence_length=64",
    "policy.make_sequence_length_divisible_by=1",
    "policy.train_global_batch_size=64",
    "policy.train_micro_batch_size=64",
    "policy.logprob_batch_size=64",
    "policy.sequence_packing.enabled=false",
    "policy.megatron_cfg.pipeline_model_parallel_size=1",
    "policy.megatron_cfg.activation_checkpointing=false",
    "policy.megatron_cfg.optimizer.lr=3e-4",
    "policy.megatron_cfg.optimizer.min_lr=0",
    "policy.megatron_cfg.scheduler.lr_warmup_init=3e-4",  # constant: NeMo RL's warm-up does not move in the first step
    "policy.generation.max_new_tokens=5",
    "policy.generation.vllm_cfg.max_model_len=64",
    "policy.generation.vllm_cfg.enforce_eager=true",
    "++policy.generation.vllm_kwargs.kv_cache_memory_bytes=67108864",
    "grpo.num_prompts_per_step=16",
    "grpo.num_generations_per_prompt=4",
    f"grpo.max_num_steps={STEPS}",
    "grpo.val_period=0",
    "grpo.max_val_samples=32",
    "grpo.val_batch_size=32",
    "loss_fn.reference_policy_kl_penalty=0",
    "data.max_input_seq_length=64",
    "data.num_workers=0",
    "checkpointing.enabled=false",
    "checkpointing.metric_name=null",
    "logger.wandb_enabled=false",
    "logger.tensorboard_enabled=true",
    "logger.monitor_gpus=false",
    "cluster.num_nodes=1",
    "cluster.gpus_per_node=1",
)
NO_TRUNCATION = (
    "loss_fn.truncated_importance_sampling_type=null",
    "loss_fn.truncated_importance_sampling_ratio=null",
)
"""Removes the recipe's correction, so that a test can set another."""
ASYNC = (
    "grpo.async_grpo.enabled=true",
    "policy.generation.vllm_cfg.async_engine=true",
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=1",
    "cluster.gpus_per_node=2",
)


def overrides(tiny: Path, logs: Path, env: str = "exact_match") -> list[str]:
    """Return the overrides that shrink a recipe for 16 GPUs to the tiny model."""
    data = {
        "train": f"{{data_path:{tiny}/data.jsonl,split_validation_size:0.05,seed:42}}",
        "default": "{dataset_name:ResponseDataset,input_key:prompt,output_key:answer,prompt_file:null,"
        f"system_prompt_file:null,processor:math_hf_data_processor,env_name:{env}}}",
    }
    return [
        *SIZES,
        f"policy.model_name={tiny}/warm",
        f"policy.tokenizer.name={tiny}/warm",
        f'+policy.tokenizer.chat_template="{TEMPLATE}"',
        *(f"++data.{key}={value}" for key, value in data.items()),
        "~data.train.dataset_name",
        f"++env={{{env}:{{num_workers:1}}}}",
        f"logger.log_dir={logs}",
        f"checkpointing.checkpoint_dir={logs.parent}/checkpoints",
    ]


STARTED: "list[subprocess.Popen[bytes]]" = []
"""Processes that the current test started; `conftest` kills those that still run."""


def start(arguments: list[str], log: Path) -> "subprocess.Popen[bytes]":
    """Start `nemo-fp8rl nemo` in its own process group, with its output in the file `log`."""
    command = [sys.executable, "-m", "nemo_fp8rl.cli", "nemo", "--config", *arguments]
    with log.open("wb") as out:
        run = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, env=environment(log.parent))
    STARTED.append(run)
    return run


def environment(folder: Path) -> dict[str, str]:
    """Return environment variables with which data sets are cached in `folder`."""
    return {**os.environ, "HF_HOME": str(folder / "hf")}


def run(logs: Path, *arguments: str, recipe: Path = RECIPE) -> dict[str, list[float]]:
    """Run to the end, and return the values of every logged metric, in order of steps."""
    log = logs.parent / "output.txt"
    code = start([str(recipe), *arguments], log).wait(timeout=400)
    assert code == 0, "\n".join(log.read_text(errors="replace").splitlines()[-30:])
    return logged(logs)


def logged(logs: Path) -> dict[str, list[float]]:
    """Return the values of every metric in order of steps, of the latest attempt (exp_001, ...) in this folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    latest = max(logs.glob("exp_*"))
    values: dict[str, dict[int, float]] = defaultdict(dict)
    for file in sorted(latest.rglob("events*")):
        events = EventAccumulator(str(file))
        events.Reload()
        for name in events.Tags()["scalars"]:
            values[name] |= {event.step: event.value for event in events.Scalars(name)}
    return {name: [by_step[step] for step in sorted(by_step)] for name, by_step in values.items()}
