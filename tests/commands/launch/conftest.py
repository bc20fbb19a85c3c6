import subprocess
import sys
from pathlib import Path

import pytest

from nemo_fp8rl.commands.launch.job import Job
from nemo_fp8rl.commands.launch.settings import LaunchConfig, read_settings

ON_JSONL = (
    "++data.train={dataset_name: ResponseDataset, data_path: data.jsonl, input_key: prompt, output_key: answer}",
    "data.validation=null",
    "data.default.prompt_file=null",
    "data.max_input_seq_length=null",
    "env.math.math_verify_impl=hf_math_verify",
)
"""With these our own loop takes a recipe of NeMo RL's: docs/launch.md."""


WRITES = {"checkpointing.checkpoint_dir": "checkpoints", "logger.log_dir": "logs"}


@pytest.fixture
def job() -> Job:
    command = ("train", "--restartable", "--config", "conf/tiny_cpu.yaml", "grpo.seed=3")
    return Job("tiny", "tiny-20260101-000000-abcd", command, 2, generation_nodes=1, gpus_per_node=0, writes=WRITES)


def settings(folder: Path, *changes: str) -> LaunchConfig:
    return read_settings(None, [f"runs_dir={folder}/runs", *changes])


def shellcheck(script: str) -> str:
    """What shellcheck finds in it; without its two guesses that what stands in quotes was meant otherwise."""
    command = [str(Path(sys.executable).with_name("shellcheck")), "--exclude=SC2016,SC1003", "-"]
    return subprocess.run(command, input=script, capture_output=True, text=True, check=False).stdout
