"""Fixtures: a small stand-in for a checkout of NeMo RL, and the real checkout if NEMO_RL_SRC names one."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nemo_rl import runs

EXAMPLE = """
cluster: {gpus_per_node: 8, num_nodes: 1}
grpo:
  {num_prompts_per_step: 32, num_generations_per_prompt: 16, max_num_steps: 10, max_num_epochs: 1, seed: 42,
  val_at_start: false}
data: {train: null}
logger: {log_dir: logs, mlflow: {tracking_uri: null}}
checkpointing: {enabled: false, checkpoint_dir: results}
loss_fn: {use_importance_sampling_correction: false}
env: {math: {num_workers: 8}}
policy:
  model_name: Qwen/Qwen2.5-1.5B
  max_total_sequence_length: 512
  train_global_batch_size: 512
  train_micro_batch_size: 4
  train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
  tokenizer: {name: "${policy.model_name}"}
  hf_config_overrides: {}
  megatron_cfg:
    enabled: true
    env_vars: null
    tensor_model_parallel_size: 1
    pipeline_model_parallel_size: 1
    optimizer: {lr: 1.0e-6}
    scheduler: {lr_decay_style: constant}
    fp8_cfg: {enabled: false, fp8: e4m3, fp8_recipe: blockwise, fp8_param: false}
  generation:
    backend: vllm
    colocated: {enabled: true, resources: {num_nodes: null, gpus_per_node: null}}
    vllm_cfg:
      precision: ${policy.precision}
      kv_cache_dtype: auto
      max_model_len: 512
      tensor_parallel_size: 1
      async_engine: false
      gpu_memory_utilization: 0.6
  precision: bfloat16
"""
CLASSES = """
class MasterConfig(BaseModel, extra="allow"):
    policy: PolicyConfig
    grpo: "GRPOConfig"
    env: dict[str, Any]

class PolicyConfig(TypedDict):
    megatron_cfg: NotRequired[MegatronConfig | MegatronConfigDisabled]
    generation: NotRequired[GenerationConfig]

class MegatronConfig(TypedDict):
    env_vars: NotRequired[dict[str, str] | None]
    recompute_modules: NotRequired[list[str] | None]

class GenerationConfig(TypedDict):
    top_k: int | None

class VllmConfig(GenerationConfig):
    vllm_cfg: VllmSpecificArgs

class VllmSpecificArgs(TypedDict):
    is_mx: NotRequired[bool]
    env_vars: NotRequired[dict[str, str] | None]

class GRPOConfig(BaseModel):
    val_at_end: bool = False
    val_num_generations_per_prompt: int = 1

class Elsewhere(BaseModel):
    unreachable: int
"""
OF_SFT = {
    "examples/configs/sft.yaml": "sft: {max_num_epochs: 1}\npolicy: {of_sft: 1}\nloss_fn: {of_sft: 1}\n",
    "examples/configs/recipes/sft-small.yaml": "defaults: ../sft.yaml\ngrpo_like: {seed: 1}\n",
    "nemo_rl/algorithms/sft.py": """
class MasterConfig(BaseModel, extra="allow"):
    sft: SFTConfig
    grpo: SFTConfig

class SFTConfig(BaseModel):
    of_sft: int
""",
}
"""Files of another algorithm in the checkout, which make no key known to GRPO."""
OF_MAIN = """
class VllmInternalWorkerExtension:
    def _load_weights(self, weights):
        pass

    def _weight_update_lifecycle(self, transport):
        pass
"""
"""Methods of main's class for vLLM's workers, which v0.7.0 lacks."""


@pytest.fixture(autouse=True)
def kill_unfinished_runs() -> Iterator[None]:
    """Kill the runs that a failed test left behind."""
    yield
    while runs.STARTED:
        if (run := runs.STARTED.pop()).poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A stand-in for NeMo RL 0.7.0, named by NEMO_RL_SRC. It has no loops whose signatures could be known."""
    monkeypatch.setattr("nemo_fp8rl.nemo_rl.run.run_loop.check_interface", lambda *arguments: None)
    root = tmp_path / "RL"
    write(root / "nemo_rl/package_info.py", "MAJOR = 0\nMINOR = 7\nPATCH = 0\n")
    write(root / "nemo_rl/algorithms/grpo.py", CLASSES)
    write(root / "examples/configs/grpo.yaml", EXAMPLE)
    for name, text in OF_SFT.items():
        write(root / name, text)
    monkeypatch.setenv("NEMO_RL_SRC", str(root))
    return root


@pytest.fixture
def main_checkout(checkout) -> Path:
    """A stand-in for NeMo RL's main, which calls itself 0.6.0."""
    write(checkout / "nemo_rl/package_info.py", "MAJOR = 0\nMINOR = 6\nPATCH = 0\n")
    write(checkout / "nemo_rl/models/generation/vllm/vllm_backend.py", OF_MAIN)
    return checkout


@pytest.fixture
def real_checkout(monkeypatch) -> Path:
    if "NEMO_RL_SRC" not in os.environ:
        pytest.skip(
            "NEMO_RL_SRC names no checkout: git clone https://github.com/NVIDIA-NeMo/RL, and set it to that folder"
        )
    monkeypatch.setenv("HF_HOME", "/nowhere")  # some of NeMo RL's recipes read it
    return Path(os.environ["NEMO_RL_SRC"])


@pytest.fixture(scope="session")
def warm(warm_overrides: tuple[str, ...], tiny: Path) -> Path:
    """The tiny folder with warm/, a model whose answers are sometimes right."""
    return tiny


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
