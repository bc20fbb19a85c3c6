"""FP8 on the wire between NeMo RL's own workers: what its real Megatron worker hands to NeMo RL's transports."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file

from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.fp8 import Fp8Layers, quantize_blockwise, scale_name
from nemo_fp8rl.hf.checkpoint_reader import CheckpointReader
from nemo_fp8rl.nemo_rl.recipe.checkout import find_checkout
from tests.nemo_rl.runs import environment, needs_checkout
from tests.nemo_rl.stock.fake_trainer import KV_SCALES

pytestmark = [
    pytest.mark.nemo_rl,
    needs_checkout,
    pytest.mark.skipif(find_spec("megatron.bridge") is None, reason="make test-nemo-rl-trainer runs it"),
]


@pytest.mark.parametrize("fp8_param", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_its_worker_announces_and_streams_the_contracts_bytes_and_the_calibrated_scales(family, fp8_param, tmp_path):
    if not find_checkout().engines_survive_fp8_refit:
        pytest.skip("`nemo-fp8rl nemo` refuses FP8 between v0.7.0's own workers")
    write_model(tmp_path / "model", 0, family)
    command = [sys.executable, "-m", "tests.nemo_rl.stock.stock_trainer", str(tmp_path), *["fp8_param"] * fp8_param]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment(tmp_path), check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"refused\t{KV_SCALES[0]}: this refit came without it" in done.stdout
    assert ("Float8Blockwise" in done.stdout) == fp8_param, done.stdout
    stream = load_file(tmp_path / "stream.safetensors")
    announced = json.loads((tmp_path / "announced.json").read_text())
    assert announced == {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in stream.items()}
    layers, expected = Fp8Layers(1, 2), dict[str, torch.Tensor]()
    with CheckpointReader(tmp_path / "model") as checkpoint:
        for name in checkpoint.names:
            weight = 4 * checkpoint.get(name)  # the trainer took a step after it had announced
            if layers.quantizes(name):
                quantized = quantize_blockwise(weight, scale_format="pow2")
                expected |= {name: quantized.data, scale_name(name): quantized.scale_inv}
            else:
                expected[name] = weight
    expected |= {name: torch.tensor([0.01 * (i + 1)]) for i, name in enumerate(KV_SCALES)}
    assert stream.keys() == expected.keys()
    different = [n for n in stream if not torch.equal(stream[n].view(torch.uint8), expected[n].view(torch.uint8))]
    assert different == []
