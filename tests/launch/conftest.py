from pathlib import Path

import pytest

from nemo_fp8rl.launch.job import Job
from nemo_fp8rl.launch.settings import LaunchConfig, read_settings


@pytest.fixture
def job() -> Job:
    command = ("train", "--restartable", "--config", "conf/tiny_cpu.yaml", "grpo.seed=3")
    return Job("tiny", "tiny-20260101-000000-abcd", command, nodes=2, generation_nodes=1, gpus_per_node=0)


def settings(folder: Path, *changes: str) -> LaunchConfig:
    return read_settings(None, [f"runs_dir={folder}/runs", *changes])
