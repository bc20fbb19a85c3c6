"""A run on a machine that has nothing but Python: no compiler, and no code that an earlier run compiled."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

READERS = {
    "OMP_NUM_THREADS": "torch",
    "TORCH_CPP_LOG_LEVEL": "torch",
    "TORCH_COMPILE_DISABLE": "torch._dynamo",
    "VLLM_LOGGING_LEVEL": "vllm",
    "VLLM_NO_USAGE_STATS": "vllm",
    "VLLM_WORKER_MULTIPROC_METHOD": "vllm",
    "VLLM_CPU_OMP_THREADS_BIND": "vllm",
    "VLLM_CPU_ATTN_SPLIT_KV": "vllm",
    "VLLM_RPC_BASE_PATH": "vllm",
    "KMP_BLOCKTIME": "torch",  # of the recipe's env_vars
    "OMP_DISPLAY_ENV": "torch",
}
"""Variables that a run sets, and the library that reads them when it is imported."""
RUN = """
import json, os, sys
readers, late, seen = json.loads(sys.argv.pop()), [], set()
def look(event, arguments):
    if event == "os.putenv":
        name, value = (argument.decode() for argument in arguments)
        if name in readers and os.environ.get(name) != value:
            seen.add(name)
            if readers[name] in sys.modules:
                late.append(name)
sys.addaudithook(look)
from nemo_fp8rl.cli import main
code = main(sys.argv[1:])
import torch._dynamo.config, huggingface_hub.constants
print(json.dumps([code, late, sorted(seen), torch._dynamo.config.disable, huggingface_hub.constants.HF_HUB_OFFLINE]))
"""


def test_a_run_needs_no_compiler_and_every_variable_is_set_before_it_is_read(tiny_overrides, tmp_path):
    """Slim container images have no compiler; torch would compile a helper of vLLM's in the first generation."""
    set_by_run = {*READERS, "HF_HUB_OFFLINE", "CC", "CXX"}
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs/lscpu").symlink_to(shutil.which("lscpu"))  # util-linux, which vLLM needs on a CPU
    env = {name: value for name, value in os.environ.items() if name not in set_by_run}
    env |= {
        "PATH": str(tmp_path / "programs"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "HF_HUB_DISABLE_XET": "1",
    }
    once = ("grpo.max_num_steps=1", "grpo.val_at_start=false", "grpo.val_at_end=false", "checkpointing.enabled=false")
    variables = (
        "policy.megatron_cfg.env_vars.KMP_BLOCKTIME='1'",
        "policy.generation.vllm_cfg.env_vars.OMP_DISPLAY_ENV='false'",
    )
    overrides = (*tiny_overrides, *once, *variables, f"logger.log_dir={tmp_path}/run")
    words = [sys.executable, "-c", RUN, "train", "--config", "tiny_cpu", *overrides, json.dumps(READERS)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    code, late, seen, is_compiling_off, is_offline = json.loads(done.stdout.splitlines()[-1])
    assert (code, late, is_compiling_off, is_offline) == (0, [], True, True), done.stderr
    assert seen == sorted(READERS.keys() - {"OMP_NUM_THREADS"})  # the demo's
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text())["train/exact_logprob_fraction"] > 0.9
