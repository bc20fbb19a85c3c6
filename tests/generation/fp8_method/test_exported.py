"""An exported checkpoint in vLLM: our method and vLLM's own FP8 hold and generate what a refitted engine does."""

import logging
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_fp8rl.commands.export.convert import export
from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.fp8 import BLOCK, BlockScaled, LinearRecipe, fprop
from nemo_fp8rl.generation import vllm_compat
from nemo_fp8rl.generation.core import SteppedCore
from nemo_fp8rl.generation.engine import VllmEngine
from nemo_fp8rl.generation.engine_arguments import engine_arguments
from nemo_fp8rl.generation.fp8_method.on_cpu.emulated_experts import EmulatedMoEMethod
from tests.conftest import ALIGNED, RECIPES, SMALL, needs_vllms_fp8_cache
from tests.generation.pair import GREEDY, Pair, outputs
from tests.policy.sent import sent_tensors

FIRST = "policy.generation.vllm_cfg.num_first_layers_in_bf16=1"
CASES: dict[str, tuple[dict[str, Any], list[str], dict[str, Any]]] = {  # sizes, recipe, arguments of export
    "qwen3": ({"tie_word_embeddings": True}, [FIRST], {"num_first_layers_in_bf16": 1}),
    "qwen2": ({}, ["nemo_fp8rl.scale_format=fp32"], {"scale_format": "fp32"}),
    "qwen3_moe": ({}, [FIRST], {"num_first_layers_in_bf16": 1}),
}
METHODS = ("process_weights_after_loading", "apply", "multiply", "compute", "get_fused_moe_quant_config")
"""What vLLM's own method of experts takes from ours, as its kernels do not run on a CPU."""


class Exported:
    """A trainer, an engine refitted from it, and the trainer's checkpoint as `nemo-fp8rl export` writes it."""

    def __init__(self, family: str, folder: Path, case: tuple[dict[str, Any], list[str], dict[str, Any]]) -> None:
        sizes, overrides, arguments = case
        make_tiny(folder / "tiny", "add", 0, family, **sizes)
        paths = (f"policy.model_name={folder}/tiny/model", f"data.train.data_path={folder}/tiny/data.jsonl")
        self.cfg = load(RECIPES / "tiny_cpu.yaml", [*paths, *SMALL, "nemo_fp8rl.flow=fp8_e2e", *overrides])
        self.pair = Pair(self.cfg)
        self.pair.refit()
        self.pair.train(1)
        self.pair.refit()
        self.sent = sent_tensors(self.pair.worker)
        self.expected = outputs(self.pair.generate(GREEDY))
        self.pair.worker.save(folder / "saved")
        self.folder = folder / "fp8"
        assert export(folder / "saved" / "weights", self.folder, **arguments)

    def engine(self, **extra: Any) -> VllmEngine:
        """vLLM on the exported folder, as a user starts it, in this process."""
        from vllm import LLM

        own = self.pair.engine
        arguments = engine_arguments(self.cfg, "auto") | {"model": str(self.folder)} | extra
        for ours in ("hf_overrides", "worker_extension_cls"):
            del arguments[ours]
        engine = VllmEngine()
        engine.policy_version, engine.records_routes = own.policy_version, False
        engine.max_model_len, engine.is_in_driver_process = own.max_model_len, True
        engine.core = object.__new__(SteppedCore)
        engine.core.has_rank_processes, engine.core._ids = False, count()
        engine.core.llm = LLM(**arguments).llm_engine
        self.pair.others.append(engine)
        return engine


@pytest.fixture(scope="module", params=CASES)
def exported(request, tmp_path_factory) -> Iterator[Exported]:
    exported = Exported(request.param, tmp_path_factory.mktemp(request.param), CASES[request.param])
    yield exported
    exported.pair.close()


@pytest.fixture
def vllm_fp8_on_cpu(exported: Exported, monkeypatch) -> None:
    """vLLM's own FP8, all of it but the multiplication, which on a CPU needs AMX."""
    import vllm.model_executor.kernels.linear as kernels
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod
    from vllm.platforms import PlatformEnum

    scale_format = exported.cfg.nemo_fp8rl.scale_format
    dtype = torch.bfloat16 if scale_format == "pow2" else torch.float32
    recipe = LinearRecipe(scale_format=scale_format)

    class Kernel(Fp8BlockScaledMMLinearKernel):
        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability=None):
            return True, None

        def apply_block_scaled_mm(self, A, B, As, Bs):
            return fprop(A, BlockScaled(B, Bs, BLOCK).dequantize(dtype), recipe)

    class Experts(EmulatedMoEMethod):
        def process_weights_after_loading(self, layer):
            self.recipe, self.format, layer.activations_dtype = recipe, recipe.format, torch.bfloat16
            EmulatedMoEMethod.process_weights_after_loading(self, layer)

    monkeypatch.setitem(kernels._POSSIBLE_FP8_BLOCK_KERNELS, PlatformEnum.CPU, [Kernel])
    monkeypatch.setattr(Fp8MoEMethod, "is_monolithic", False)  # asked of its kernel, which a CPU has none of
    for name in (*METHODS, "stored", "project"):
        monkeypatch.setattr(Fp8MoEMethod, name, getattr(Experts, name), raising=False)


def test_exported_tensors_are_a_refits_to_the_byte(exported):
    stored = load_file(exported.folder / "model.safetensors")
    assert stored.keys() == exported.sent.keys()
    for name, tensor in exported.sent.items():
        assert (stored[name].dtype, stored[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(stored[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in stored.values())


def test_our_method_serves_it_as_a_refitted_engine(exported):
    engine = exported.engine(quantization="nemo_fp8rl")
    assert outputs(exported.pair.generate(GREEDY, engine)) == exported.expected
    check_methods(engine, exported, "Emulated")


@needs_vllms_fp8_cache
def test_an_fp8_cache_has_the_checkpoints_scales_or_vllm_warns_that_there_are_none(
    exported, tmp_path, caplog, monkeypatch
):
    if exported.pair.worker.hf.family.qkv_bias or exported.pair.worker.hf.family.experts:
        pytest.skip("one model will do")
    log = logging.getLogger("vllm.model_executor.layers.quantization.kv_cache")
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    caplog.set_level(logging.WARNING, log.name)

    def scales(folder: Path) -> list[tuple[float, float]]:
        engine = exported.engine(model=str(folder), quantization="nemo_fp8rl", kv_cache_dtype="fp8")
        attention = [layer.self_attn.attn for layer in engine.core.llm.apply_model(lambda model: model)[0].model.layers]
        return [(float(one._k_scale), one._v_scale_float) for one in attention]

    assert scales(exported.folder) == [(1.0, 1.0)] * 2
    assert "Using KV cache scaling factor 1.0" in caplog.text
    shutil.copytree(exported.folder, tmp_path / "with")
    own = {
        f"model.layers.{i}.self_attn.{x}_scale": torch.tensor(s) for i in range(2) for x, s in (("k", 0.5), ("v", 2.0))
    }
    save_file(own, tmp_path / "with" / "kv_scales.safetensors")
    assert scales(tmp_path / "with") == [(0.5, 2.0)] * 2


@pytest.mark.usefixtures("vllm_fp8_on_cpu")
def test_vllms_own_fp8_serves_it_as_a_refitted_engine(exported):
    if exported.pair.worker.hf.family.experts and vllm_compat.is_routing_by_experts():
        pytest.skip("vLLM 0.25's own FP8 experts have no router on a CPU")
    engine = exported.engine()
    assert engine.core.llm.vllm_config.model_config.quantization == "fp8"
    assert outputs(exported.pair.generate(GREEDY, engine)) == exported.expected
    check_methods(engine, exported, "Fp8")


def check_methods(engine: VllmEngine, exported: Exported, fp8: str) -> None:
    """Exactly the trainer's FP8 layers have a method called `fp8`..., of all linears and experts of the model."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase

    (methods,) = engine.core.llm.apply_model(
        lambda model: {
            name.removesuffix(".routed_experts"): type(module.quant_method).__name__
            for name, module in model.named_modules()
            if isinstance(module, (LinearBase, RoutedExperts))
        }
    )
    quantized = {name for name, method in methods.items() if method.startswith(fp8)}
    assert quantized == {name for name in methods if exported.pair.worker.engine_fp8_layers.quantizes(name)}
    layers = exported.pair.worker.engine_fp8_layers
    assert len(quantized) == layers.count * (3 if "experts" in "".join(methods) else 4)


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="vLLM's own FP8 needs AMX on a CPU")
def test_plain_vllm_serves_it_with_its_own_kernels(exported):
    """Nothing of ours in it. These kernels leave activations in bfloat16, so the trainer's numbers are not theirs."""
    if exported.pair.worker.hf.family.qkv_bias:
        pytest.skip("vLLM 0.32's FP8 kernel for AMX takes no bfloat16 bias")
    engine = exported.engine()
    check_methods(engine, exported, "Fp8")
    got = outputs(exported.pair.generate(GREEDY, engine))
    for ((tokens, logprobs),), ((our_tokens, our_logprobs),) in zip(got, exported.expected, strict=True):
        assert tokens[0] == our_tokens[0]
        assert abs(logprobs[0] - our_logprobs[0]) < 0.1
    assert exported.pair.mismatch() < ALIGNED
    assert exported.pair.mismatch(engine=engine) > 1.005
