"""Shared by all tests: a tiny checkpoint with data, and recipes on it. Real Megatron Core, vLLM and Ray, on CPU."""

import gc
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from nemo_fp8rl.common.vllm_version import vllm_version
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.config.schema import Config

needs_vllms_fp8_cache = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's own FP8 KV cache on a CPU needs AVX-512"
)
collect_ignore = [] if "tests.gpu_engine.plugin" in sys.modules else ["gpu_engine"]  # in processes of its own
RECIPES = Path(__file__).parent.parent / "conf"
COLOCATED = (
    "policy.generation.colocated.enabled=true",
    "policy.generation.vllm_cfg.sleep_level=2",
    "policy.megatron_cfg.offload_between_phases=true",
)
SMALL = (
    "grpo.num_prompts_per_step=16",
    "grpo.num_generations_per_prompt=4",
    "grpo.max_val_samples=32",
    "policy.train_global_batch_size=64",
    "policy.train_micro_batch_size=64",
    "logger.tensorboard_enabled=false",
)
"""Overrides that make a step take a fraction of a second."""
BATCH_INVARIANT = not torch.cpu._is_amx_tile_supported()
"""With AMX a log-prob's last bits depend, once in thousands of tokens, on what is answered beside (docs/alignment.md);
and what that is depends on the clock where the engine's core has a process of its own.
"""
ALIGNED = 1.001
if BATCH_INVARIANT and vllm_version() == (0, 32) and not torch.cuda.is_available():
    ALIGNED = 1.000_001
"""token_mult_prob_error of an aligned flow: last bits of a log-prob at most where the trainer follows each sum."""
HALF_HEADS = {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
"""Of an FP8 block, as Llama-3.2-1B's."""
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""Llama 3.1's kind of scaling, for a context as short as the tests'."""

YARN = {"rope_type": "yarn", "rope_theta": 1.0e6, "factor": 4.0, "original_max_position_embeddings": 32}
"""Qwen's kind."""


LONGEST_FILES = (
    "generation/test_faults.py",
    "workers/test_ray.py",
    "generation/test_processes.py",
    "policy/test_parallel_state.py",
    "test_train.py",
    "test_loop.py",
    "policy/test_parallel.py",
    "generation/test_engine.py",
    "generation/test_families.py",
    "gpu_engine/test_zero_mismatch.py",
)
"""They come first, so that no process of `make test` ends with one of them while the other has nothing left."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    longest = [str(Path(__file__).parent / file) for file in LONGEST_FILES]
    items.sort(key=lambda item: longest.index(str(item.path)) if str(item.path) in longest else len(longest))


_freeze, _modules_frozen = gc.freeze, [0]
gc.freeze = gc.unfreeze = lambda: None
"""vLLM's, of an engine's start and end; what `imports_are_not_collected` froze stays frozen."""


@pytest.fixture(scope="module", autouse=True)
def imports_are_not_collected() -> None:
    """vLLM collects garbage seven times in an engine's life. Imports leave nearly a million objects, of which each time
    takes a third of a second, which was half of the time of tests with engines: so they are left out of it.
    """
    if len(sys.modules) > _modules_frozen[0] + 200:
        gc.collect()
        _freeze()
        _modules_frozen[0] = len(sys.modules)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why tests were skipped, a line for each reason: what this machine cannot show is not to go unseen."""
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, tests in reasons.most_common():
        terminalreporter.write_line(f"{tests} skipped: {reason}")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/ (random Qwen3, tokenizer) and data.jsonl."""
    from nemo_fp8rl.commands.tiny_model import make_tiny

    folder = tmp_path_factory.mktemp("tiny") / "add"
    make_tiny(folder, "add")
    return folder


@pytest.fixture(scope="session")
def tiny_overrides(tiny: Path) -> tuple[str, ...]:
    """conf/tiny_cpu.yaml on the tiny folder, small."""
    return (f"policy.model_name={tiny}/model", f"data.train.data_path={tiny}/data.jsonl", *SMALL)


@pytest.fixture(scope="session")
def warm_overrides(
    tiny: Path, tiny_overrides: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, ...]:
    """The same after a short warm-up, in tiny/warm: some answers are right, so GRPO has a gradient. In float32, for the
    sake of CPUs without bfloat16. Test processes of one run share it.
    """
    from nemo_fp8rl.commands.sft import sft  # loads Megatron

    processes = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    folder = tmp_path_factory.getbasetemp()
    warm = folder.parent / f"warm-{processes}" if processes else folder / "warm"
    paths = (f"policy.model_name={tiny}/model", f"data.train.data_path={tiny}/data.jsonl")
    with FileLock(f"{warm}.lock"):
        if not warm.exists():
            sizes = ("policy.train_global_batch_size=128", "policy.train_micro_batch_size=128")
            choices = (
                *paths,
                *sizes,
                "sft.max_num_steps=150",
                "policy.precision=float32",
                f"logger.log_dir={warm}-run",
            )
            assert sft(load(RECIPES / "tiny_sft.yaml", choices), warm)
    (tiny / "warm").symlink_to(warm)
    return (*tiny_overrides, f"policy.model_name={tiny}/warm")


@pytest.fixture
def recipe(tiny_overrides: tuple[str, ...], tmp_path: Path) -> Callable[..., Config]:
    """recipe("key=value", ...) -> a small Config whose run directory is the test's own."""

    def make(*overrides: str) -> Config:
        return load(RECIPES / "tiny_cpu.yaml", [*tiny_overrides, f"logger.log_dir={tmp_path}/run", *overrides])

    return make
