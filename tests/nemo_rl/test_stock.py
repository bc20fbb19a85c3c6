"""FP8 on the wire between NeMo RL's own workers: each half alone. Its transports need GPUs."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.errors import UserError
from nemo_fp8rl.export import export
from nemo_fp8rl.fp8 import NonFiniteError, quantize_blockwise
from nemo_fp8rl.nemo_rl.checkout import find_checkout
from nemo_fp8rl.nemo_rl.stock.choose import ENGINE_WORKER, choose
from nemo_fp8rl.nemo_rl.stock.stream import CHOICE, Fp8Stream
from tests.nemo_rl.runs import environment, needs_checkout

WEIGHT = "model.layers.1.mlp.down_proj.weight"
POLICY = {
    "megatron_cfg": {"enabled": True, "fp8_cfg": {"enabled": True}, "env_vars": None},
    "generation": {
        "vllm_cfg": {
            "precision": "fp8",
            "pow2_weight_scaling_factors": True,
            "pow2_activation_scaling_factors": True,
            "num_first_layers_in_bf16": 1,
        },
    },
}


def policy(**vllm_cfg: object) -> dict:
    generation = {"vllm_cfg": POLICY["generation"]["vllm_cfg"] | vllm_cfg, "vllm_kwargs": {"moe_backend": "triton"}}
    return {**POLICY, "generation": generation}


class FakeMegatronWorkerOfNemoRl:
    """Streams what it holds; the real one gathers it from GPUs."""

    def __init__(self, cfg: dict, weights: dict[str, Tensor]) -> None:
        self.cfg, self.weights = cfg, weights

    def _iter_params_with_optional_kv_scales(self, kv_scales=None, conversion_tasks=None) -> Iterator:
        yield from self.weights.items()


class StreamingWorker(Fp8Stream, FakeMegatronWorkerOfNemoRl):
    pass


def weights() -> dict[str, Tensor]:
    names = [WEIGHT, "model.layers.0.mlp.down_proj.weight", "model.norm.weight"]
    return {name: torch.randn(256, 384).bfloat16() for name in names}


def test_the_trainer_streams_the_contracts_bytes_of_what_is_fp8_and_the_rest_as_it_is():
    cfg = policy()
    choose(cfg, num_hidden_layers=2, version="0.6.0")
    held = weights()
    streamed = dict(StreamingWorker(cfg, held)._iter_params_with_optional_kv_scales(conversion_tasks=None))
    expected = quantize_blockwise(held[WEIGHT], scale_format="pow2")
    assert torch.equal(streamed[WEIGHT].view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(streamed[f"{WEIGHT}_scale_inv"], expected.scale_inv)
    assert all(streamed[name] is held[name] for name in held.keys() - {WEIGHT})
    assert len(streamed) == len(held) + 1


def test_without_fp8_in_the_recipe_nothing_changes():
    cfg = policy(precision="bfloat16") | {"megatron_cfg": {"enabled": True}}
    before = repr(cfg)
    choose(cfg, num_hidden_layers=2, version="0.6.0")
    held = weights()
    assert repr(cfg) == before
    assert dict(StreamingWorker(cfg, held)._iter_params_with_optional_kv_scales()) == held


def test_a_weight_that_is_not_finite_is_named():
    cfg = policy()
    choose(cfg, num_hidden_layers=2, version="0.6.0")
    held = weights()
    held[WEIGHT][3, 5] = torch.nan
    with pytest.raises(NonFiniteError, match=WEIGHT):
        list(StreamingWorker(cfg, held)._iter_params_with_optional_kv_scales())


def test_the_engine_is_vllms_own_fp8_with_our_worker():
    cfg = policy()
    choose(cfg, num_hidden_layers=2, version="0.6.0")
    generation = cfg["generation"]
    assert cfg[CHOICE] == {"scale_format": "pow2", "fp8_layers": [1, 2, []]}
    assert generation["vllm_cfg"]["precision"] == "bfloat16"  # so that NeMo RL patches nothing
    assert generation["vllm_kwargs"]["worker_cls"] == ENGINE_WORKER
    assert generation["vllm_kwargs"]["moe_backend"] == "triton"
    quantization = generation["vllm_kwargs"]["hf_overrides"]["quantization_config"]
    assert quantization["quant_method"] == "fp8"
    assert "model.layers.0.mlp.down_proj" in quantization["modules_to_not_convert"]
    assert "model.layers.1.mlp.down_proj" not in quantization["modules_to_not_convert"]


def test_an_fp8_kv_cache_is_refused():
    with pytest.raises(UserError, match="kv_cache_dtype"):
        choose(policy(kv_cache_dtype="fp8"), num_hidden_layers=2, version="0.6.0")


@pytest.mark.nemo_rl
@needs_checkout
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_vllm_worker_with_nemo_rls_extension_loads_the_stream_as_a_fresh_engine_does(family, tmp_path):
    """Twice, in small batches whose memory is overwritten afterwards; tokens and log-probs of the exported model. After
    a refit that ends early there is no other.
    """
    from nemo_fp8rl.tiny import write_model

    if find_checkout().version.startswith("0.7"):
        pytest.skip("`nemo-fp8rl nemo` refuses FP8 between v0.7.0's own workers")
    for seed in (0, 1):
        write_model(tmp_path / f"model_{seed}", seed, family)
        export(tmp_path / f"model_{seed}", tmp_path / f"fp8_{seed}", "pow2", 0, 0, [])
    command = [sys.executable, "-m", "tests.nemo_rl.stock_engine", str(tmp_path)]
    variables = environment(tmp_path) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=root, env=variables, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    answers = dict(
        line.split("\t") for line in done.stdout.splitlines() if line.startswith(("fresh", "streamed", "half", "after"))
    )
    assert answers["streamed_0"] == answers["fresh_0"] != answers["fresh_1"] == answers["streamed_1"]
    assert answers["half"].startswith("the refit ended without ")
    assert "start it again" in answers["after_half"]
