"""The plugin costs nothing where it is not asked for, and knows an exported checkpoint where it is."""

import json
import os
import re
import subprocess
import sys
from difflib import unified_diff
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_fp8rl.fp8 import Fp8Layers, LinearRecipe
from nemo_fp8rl.generation.fp8_method.plugin import QUANTIZATION, register
from nemo_fp8rl.generation.fp8_method.quantization_config import quantization_config

RUN = """
import json, sys, time
from pathlib import Path
import vllm.plugins
from vllm import LLM, SamplingParams
seconds, load = [], vllm.plugins.load_general_plugins
def timed():
    start = time.perf_counter()
    load()
    seconds.append(time.perf_counter() - start)
vllm.plugins.load_general_plugins = timed
memory = {"max_model_len": 128, "kv_cache_memory_bytes": 1 << 26}
llm = LLM(sys.argv[1], enforce_eager=True, seed=0, use_tqdm_on_load=False, **memory)
params = [SamplingParams(temperature=t, max_tokens=24, logprobs=3, seed=5, ignore_eos=True) for t in (0.0, 1.0)]
answers = [
    [(t, [(k, v.logprob) for k, v in at.items()]) for t, at in zip(out.token_ids, out.logprobs)]
    for prompt in ("12+34=", "98+7=")
    for request in llm.generate([prompt, prompt], params, use_tqdm=False)
    for out in request.outputs
]
del llm
record = {"answers": answers, "seconds": sum(seconds), "modules": sorted(sys.modules)}
Path(sys.argv[2]).write_text(json.dumps(record))
"""
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "DEBUG",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "NO_COLOR": "1",
}
VLLMS_OWN = "lora_filesystem_resolver,lora_hf_hub_resolver"
"""vLLM's own general plugins."""


def run(model: Path, folder: Path, plugins: str) -> tuple[dict[str, Any], list[str]]:
    """What a bf16 vLLM in a process of its own generated, and what it logged."""
    folder.mkdir()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    environment = inherited | ENVIRONMENT | {"VLLM_PLUGINS": plugins}
    command = [sys.executable, "-c", RUN, str(model), str(folder / "record.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "record.json").read_text()), (done.stdout + done.stderr).splitlines()


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """Without the plugin, and with it."""
    folder = tmp_path_factory.mktemp("plugin")
    return run(tiny / "model", folder / "without", VLLMS_OWN), run(
        tiny / "model", folder / "with", f"{VLLMS_OWN},{QUANTIZATION}"
    )


def test_a_bf16_engine_generates_the_same_with_the_plugin(runs):
    (without, _), (with_plugin, _) = runs
    assert len(without["answers"]) == 4
    assert with_plugin["answers"] == without["answers"]  # tokens and log-probs, to the last bit


def test_a_bf16_engine_logs_the_same_with_the_plugin(runs):
    """Every line at level DEBUG, but for vLLM's own "Loading plugin nemo_fp8rl", which it logs in an engine process."""
    (_, without), (_, with_plugin) = runs
    assert len(without) > 100, "vLLM logged nothing to compare"
    assert not list(unified_diff(comparable(without), comparable(with_plugin), n=0, lineterm=""))


def comparable(lines: list[str]) -> list[str]:
    """Without what differs from run to run: numbers (times, process ids, addresses, ports), names of temporaries, how
    the class of the model was found in vLLM's cache, which other processes use too, and so the order; what nanobind
    says of Python's own end.
    """
    noise = ("models/registry.py", "Registry inspect model class", " - leaked ", "skipped remainder", "nanobind:")
    kept = (x for x in lines if not x.endswith(f"Loading plugin {QUANTIZATION}") and not any(y in x for y in noise))
    return sorted(re.sub(r"vllm_dist_\w+|0x[0-9a-f]+|[\d.]+", "_", line) for line in kept)


def test_the_plugin_imports_its_own_module_and_nothing_else(runs):
    (without, _), (with_plugin, _) = runs
    added = {*with_plugin["modules"]} - {*without["modules"]}
    plugin = "nemo_fp8rl.generation.fp8_method.plugin"
    assert added == {"nemo_fp8rl", "nemo_fp8rl.generation", "nemo_fp8rl.generation.fp8_method", plugin}
    assert not {*without["modules"]} - {*with_plugin["modules"]}


def test_loading_the_plugin_takes_milliseconds(runs):
    """All plugins together; on an idle machine ours takes one of these. Loading the method takes a second."""
    _, (with_plugin, _) = runs
    assert with_plugin["seconds"] < 0.2


@pytest.fixture
def method() -> Any:
    """What vLLM has registered."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    register()
    register()
    return get_quantization_config(QUANTIZATION)


def test_an_fp8_checkpoint_is_ours_only_where_the_user_says_so(method):
    for checkpoint, asked, expected in (
        ("fp8", QUANTIZATION, QUANTIZATION),
        ("fp8", None, None),
        ("fp8", "fp8", None),
        ("modelopt", QUANTIZATION, QUANTIZATION),
        ("modelopt", None, None),
        ("awq", QUANTIZATION, None),
        (QUANTIZATION, None, None),
    ):
        assert method.override_quantization_method({"quant_method": checkpoint}, asked) == expected


def test_the_method_loads_when_vllm_makes_its_config(method):
    from vllm.model_executor.layers.quantization import get_quantization_config

    from nemo_fp8rl.generation.fp8_method.quantization import NemoFp8RlConfig

    config = method.from_config(quantization_config("fp32", Fp8Layers(1, 3)))
    assert isinstance(config, NemoFp8RlConfig)
    assert (config.recipe, config.fp8_layers) == (LinearRecipe(scale_format="fp32"), Fp8Layers(1, 3))
    assert get_quantization_config("fp8") is not method


def test_a_machine_without_fp8_kernels_is_refused(monkeypatch):
    from nemo_fp8rl.generation.fp8_method import quantization

    monkeypatch.setattr(quantization, "current_platform", SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: False))
    with pytest.raises(ValueError, match="runs on CPUs and on NVIDIA's GPUs"):
        quantization.methods_for_device(LinearRecipe())


def test_a_checkpoint_of_somebody_else_is_refused(method):
    foreign = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    with pytest.raises(ValueError, match="lacks fp8_layers and scale_format, so it was not written by"):
        method.from_config(foreign)
    later = quantization_config("pow2", Fp8Layers(1, 3)) | {"format": "nvfp3"}
    with pytest.raises(ValueError, match="has the format 'nvfp3', which this version of nemo_fp8rl does not know"):
        method.from_config(later)
    with pytest.raises(ValueError, match=r"config\.json has no quantization_config"):
        method()
