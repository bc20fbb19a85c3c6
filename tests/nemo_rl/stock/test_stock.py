"""FP8 on the wire between NeMo RL's own workers: each half alone. Its transports need GPUs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.commands.export import export
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.fp8 import NonFiniteError, quantize_blockwise
from nemo_fp8rl.nemo_rl.compat import engines_survive_fp8_refit
from nemo_fp8rl.nemo_rl.recipe.checkout import find_checkout
from nemo_fp8rl.nemo_rl.run.run_loop import _ray
from nemo_fp8rl.nemo_rl.stock import pythonpath
from nemo_fp8rl.nemo_rl.stock.fp8_stream import STREAM_KEY, Fp8Stream
from nemo_fp8rl.nemo_rl.stock.worker_choice import (
    E8M0,
    ENGINE_WORKER,
    STOCK_WORKER,
    TRAINER_WORKER,
    choose_workers,
    declare_kv_cache,
)
from tests.nemo_rl.runs import environment, needs_checkout

ROOT = Path(__file__).parents[3]
WEIGHT = "model.layers.1.mlp.down_proj.weight"
KV_SCALES = [f"model.layers.{i}.self_attn.{x}_scale" for i in range(2) for x in ("attn.q", "k", "v")]
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

    def _is_fp8_export(self) -> bool:
        return False

    def _iter_params_with_optional_kv_scales(self, kv_scales=None, conversion_tasks=None) -> Iterator:
        yield from self.weights.items()
        if self.cfg["generation"]["vllm_cfg"].get("kv_cache_dtype", "auto") != "auto":
            for name in KV_SCALES:
                yield name, torch.tensor([(kv_scales or {}).get(name, 1.0)])

    def prepare_refit_info(self) -> dict:
        return {name: (x.shape, x.dtype) for name, x in self._iter_params_with_optional_kv_scales()}


class StreamingWorker(Fp8Stream, FakeMegatronWorkerOfNemoRl):
    pass


def weights() -> dict[str, Tensor]:
    names = [WEIGHT, "model.layers.0.mlp.down_proj.weight", "model.norm.weight"]
    return {name: torch.randn(256, 384).bfloat16() for name in names}


def test_the_trainer_streams_the_contracts_bytes_of_what_is_fp8_and_the_rest_as_it_is():
    cfg = policy()
    choose_workers(cfg, num_hidden_layers=2, version="0.6.0")
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
    choose_workers(cfg, num_hidden_layers=2, version="0.6.0")
    held = weights()
    assert repr(cfg) == before
    assert dict(StreamingWorker(cfg, held)._iter_params_with_optional_kv_scales()) == held


@pytest.mark.parametrize(("name", "value"), [(WEIGHT, torch.nan), ("model.norm.weight", torch.inf)])
def test_a_weight_that_is_not_finite_is_named(name, value):
    cfg = policy()
    choose_workers(cfg, num_hidden_layers=2, version="0.6.0")
    held = weights()
    held[name].view(-1)[5] = value
    with pytest.raises(NonFiniteError, match=name):
        list(StreamingWorker(cfg, held)._iter_params_with_optional_kv_scales())


def held_in_fp8(scale_format: str) -> dict[str, Tensor]:
    """As a worker with `fp8_param` streams it."""
    quantized = quantize_blockwise(weights()[WEIGHT], scale_format=scale_format)
    return {WEIGHT: quantized.data, f"{WEIGHT}_scale_inv": quantized.scale_inv, "model.norm.weight": torch.ones(384)}


def test_what_the_trainer_holds_in_fp8_goes_as_it_is():
    cfg = policy()
    choose_workers(cfg, num_hidden_layers=2, version="0.6.0")
    held = held_in_fp8("pow2")
    streamed = dict(StreamingWorker(cfg, held)._iter_params_with_optional_kv_scales())
    assert list(streamed) == list(held)
    assert all(streamed[name] is held[name] for name in held)


@pytest.mark.parametrize(
    ("tensor", "place", "value", "message"),
    [
        (WEIGHT, (3, 5), 0x7F, f"{WEIGHT}: 1 of 98304 FP8 values are NaN"),
        (WEIGHT, (3, 5), 0xFF, f"{WEIGHT}: 1 of 98304 FP8 values are NaN"),
        (f"{WEIGHT}_scale_inv", (1, 2), torch.nan, r"_scale_inv: 1 of 6 values are not finite, the first at \[1, 2\]"),
    ],
)
def test_fp8_that_is_not_finite_is_named(tensor, place, value, message):
    cfg = policy()
    choose_workers(cfg, num_hidden_layers=2, version="0.6.0")
    held = held_in_fp8("pow2")
    memory = held[tensor].view(torch.uint8) if tensor == WEIGHT else held[tensor]
    memory[place] = value
    with pytest.raises(NonFiniteError, match=message):
        list(StreamingWorker(cfg, held)._iter_params_with_optional_kv_scales())


def test_scales_of_a_trainer_that_are_not_the_recipes_are_refused():
    cfg = policy()
    choose_workers(cfg, num_hidden_layers=2, version="0.6.0")
    message = rf"{WEIGHT}_scale_inv: the trainer's scales are no powers of two.* set .*FP32_SCALES='0'"
    with pytest.raises(RuntimeError, match=message):
        list(StreamingWorker(cfg, held_in_fp8("fp32"))._iter_params_with_optional_kv_scales())


LAST = {"num_last_layers_in_bf16": 2}


@pytest.mark.parametrize(
    ("vllm_cfg", "given", "expected"),
    [
        ({}, None, (True, 1, 0)),
        (LAST, {"moe_router_fusion": True}, (True, 1, 2)),
        (LAST, {"num_layers_at_end_in_bf16": 2}, (True, 1, 2)),
        ({"num_first_layers_in_bf16": 0}, None, None),
    ],
)
def test_a_trainer_in_fp8_has_the_engines_layers_in_bfloat16(vllm_cfg, given, expected):
    cfg = policy(**vllm_cfg)
    cfg["megatron_cfg"] = cfg["megatron_cfg"] | {"model_overrides": given}
    choose_workers(cfg, num_hidden_layers=8, version="0.6.0")
    keys = ("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    layers = dict(zip(keys, expected, strict=True)) if expected else {}
    assert (cfg["megatron_cfg"]["model_overrides"] or {}) == (given or {}) | layers


def test_a_trainer_in_bfloat16_is_left_as_it_is():
    cfg = policy()
    before = cfg["megatron_cfg"] = {"enabled": True}
    choose_workers(cfg, num_hidden_layers=8, version="0.6.0")
    assert cfg["megatron_cfg"] is before


@pytest.mark.parametrize(
    ("vllm_cfg", "megatron", "message"),
    [
        (
            LAST,
            {"model_overrides": {"num_layers_at_end_in_bf16": 1}},
            r"end_in_bf16=1 .* 1 first and 2 last ones: leave",
        ),
        (
            {"num_first_layers_in_bf16": 0},
            {"model_overrides": {"first_last_layers_bf16": True}},
            r"first_last_layers_bf16=True gives the trainer other bfloat16 layers .* 0 first and 0 last ones",
        ),
        (
            {"num_last_layers_in_bf16": 3},
            {"pipeline_model_parallel_size": 4},
            r"num_first_layers_in_bf16=1 and num_last_layers_in_bf16=3: .* pipeline stage has, 2; lower them",
        ),
    ],
)
def test_layers_that_the_trainer_cannot_have_in_bfloat16_are_refused(vllm_cfg, megatron, message):
    cfg = policy(**vllm_cfg)
    cfg["megatron_cfg"] = cfg["megatron_cfg"] | megatron
    with pytest.raises(UserError, match=message):
        choose_workers(cfg, num_hidden_layers=8, version="0.6.0")


def test_the_engine_is_vllms_own_fp8_with_our_worker():
    cfg = policy()
    choose_workers(cfg, num_hidden_layers=2, version="0.6.0")
    generation = cfg["generation"]
    layers = {"first": 1, "end": 2, "ignored": []}
    assert cfg[STREAM_KEY] == {"scale_format": "pow2", "fp8_layers": layers, "hf_config_overrides": {}}
    assert generation["vllm_cfg"]["precision"] == "bfloat16"  # so that NeMo RL patches nothing
    assert generation["vllm_kwargs"]["worker_cls"] == ENGINE_WORKER
    assert generation["vllm_kwargs"]["moe_backend"] == "triton"
    quantization = cfg["hf_config_overrides"]["quantization_config"]
    assert quantization["quant_method"] == "fp8"
    assert "model.layers.0.mlp.down_proj" in quantization["modules_to_not_convert"]
    assert "model.layers.1.mlp.down_proj" not in quantization["modules_to_not_convert"]


def test_float32_scales_are_not_rounded_in_the_engine():
    from vllm import envs

    words = {"pow2_weight_scaling_factors": False, "pow2_activation_scaling_factors": False}
    cfg = policy(**words, env_vars={"OTHER": "1"})
    cfg["megatron_cfg"] = cfg["megatron_cfg"] | {"env_vars": {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}}
    choose_workers(cfg, num_hidden_layers=2, version="0.6.0")
    assert cfg["generation"]["vllm_cfg"]["env_vars"] == {"OTHER": "1", "VLLM_USE_DEEP_GEMM_E8M0": "0"}
    assert E8M0 in envs.environment_variables
    cfg = policy()
    choose_workers(cfg, num_hidden_layers=2, version="0.6.0")
    assert "env_vars" not in cfg["generation"]["vllm_cfg"]  # powers of two stay what they are


@pytest.mark.parametrize(("cuda", "calls"), [(True, ["load", "wait"]), (False, ["load"])])
def test_copies_of_a_batch_are_there_before_another_stream_reads_them(cuda, calls, monkeypatch):
    from nemo_fp8rl.nemo_rl.stock import vllm_worker

    done = []
    model = SimpleNamespace(load_weights=lambda weights: done.append("load"))
    worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))
    stream = SimpleNamespace(synchronize=lambda: done.append("wait"))
    monkeypatch.setattr(vllm_worker, "current_platform", SimpleNamespace(is_cuda=lambda: cuda))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    vllm_worker._Reload(worker).load_batch([(WEIGHT, torch.ones(2))])
    assert done == calls


def test_an_engine_that_nemo_rl_built_without_fp8_is_refused_before_a_refit():
    from nemo_fp8rl.nemo_rl.stock import vllm_worker

    worker = SimpleNamespace(
        vllm_config=SimpleNamespace(quant_config=None), model_config=SimpleNamespace(model="org/of-another-family")
    )
    with pytest.raises(RuntimeError, match=r"org/of-another-family without .*vllm_cfg\.precision=bfloat16 and"):
        vllm_worker._Reload(worker).set_refit_info({WEIGHT: None})


@pytest.mark.parametrize("missing", ["_load_weights", "_weight_update_lifecycle"])
def test_an_extension_without_the_methods_that_are_replaced_is_refused_before_the_model_is_loaded(missing):
    from nemo_fp8rl.nemo_rl.stock import vllm_worker

    names = {"_load_weights", "_weight_update_lifecycle"} - {missing}
    worker = type("Mixed", (vllm_worker.Fp8Worker, type("Extension", (), dict.fromkeys(names))), {})
    with pytest.raises(RuntimeError, match=rf"has no {missing}, .*workers=ours"):
        object.__new__(worker).load_model()


@pytest.mark.parametrize("installed", [False, True])
def test_ray_starts_with_this_package_and_none_beside_it_on_pythonpath(installed, tmp_path, monkeypatch):
    if installed:
        (tmp_path / "site-packages/torch").mkdir(parents=True)
        (tmp_path / "site-packages/nemo_fp8rl").symlink_to(ROOT / "nemo_fp8rl")
        monkeypatch.setattr(pythonpath, "PACKAGE", tmp_path / "site-packages/nemo_fp8rl")
    started = []
    for name in ("nemo_rl", "nemo_rl.distributed", "nemo_rl.distributed.virtual_cluster"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[name].init_ray = lambda: started.append(os.environ["PYTHONPATH"])
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    with _ray(2, ours=False):
        theirs, folder = started.pop().split(os.pathsep)
        found = subprocess.run(
            [sys.executable, "-c", "import nemo_fp8rl; print(nemo_fp8rl.__file__)"],
            capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True,
        )  # fmt: skip
        assert (theirs, found.stdout.strip()) == ("/theirs", f"{folder}/nemo_fp8rl/__init__.py")
        assert os.listdir(folder) == ["nemo_fp8rl"] if installed else folder == str(ROOT)
    assert os.environ["PYTHONPATH"] == "/theirs"
    assert Path(folder).is_dir() != installed


def test_what_nemo_rls_workers_import_of_this_package_needs_torch_and_numpy_alone():
    """Their own libraries apart: `megatron_worker` and `vllm_worker` import Megatron's and vLLM's."""
    code = """
import sys
sys.modules.update(dict.fromkeys(("numba", "vllm", "megatron", "omegaconf", "pydantic", "xxhash", "zstandard")))
from nemo_fp8rl.fp8 import quantize_blockwise
from nemo_fp8rl.generation import vllm_compat
from nemo_fp8rl.nemo_rl.stock import fp8_stream, layer_agreement
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_an_fp8_kv_cache_is_vllms_own_and_nemo_rls_loop_hears_of_it_once_the_engine_is_there():
    cfg = policy(kv_cache_dtype="fp8_e4m3")
    choose_workers(cfg, num_hidden_layers=2, version="0.6.0")
    generation = cfg["generation"]
    assert generation["vllm_kwargs"]["kv_cache_dtype"] == "fp8_e4m3"
    assert generation["vllm_cfg"]["kv_cache_dtype"] == "auto"  # or NeMo RL would ask for patches of vLLM
    engine = SimpleNamespace(cfg=generation)
    declare_kv_cache(engine, cfg)
    assert engine.cfg == {**generation, "vllm_cfg": generation["vllm_cfg"] | {"kv_cache_dtype": "fp8_e4m3"}}


def test_an_fp8_kv_cache_of_latent_attention_is_refused_before_workers_are_built():
    with pytest.raises(UserError, match=r"no scales for latent attention .*set \S*kv_cache_dtype=auto"):
        choose_workers(policy(kv_cache_dtype="fp8"), num_hidden_layers=2, version="0.6.0", latent=True)
    choose_workers(cfg := policy(), num_hidden_layers=2, version="0.6.0", latent=True)
    assert STREAM_KEY in cfg


def test_a_recipe_without_an_fp8_kv_cache_leaves_it_to_vllm():
    for cfg in (policy(), policy(precision="bfloat16") | {"megatron_cfg": {"enabled": True}}):
        choose_workers(cfg, num_hidden_layers=2, version="0.6.0")
        assert "kv_cache_dtype" not in cfg["generation"]["vllm_kwargs"]
        engine = SimpleNamespace(cfg=cfg["generation"])
        declare_kv_cache(engine, cfg)
        assert engine.cfg["vllm_cfg"].get("kv_cache_dtype", "auto") == "auto"


def streaming_kv_scales() -> StreamingWorker:
    cfg = policy(kv_cache_dtype="fp8")
    choose_workers(cfg, num_hidden_layers=2, version="0.6.0")
    engine = SimpleNamespace(cfg=cfg["generation"])
    declare_kv_cache(engine, cfg)
    return StreamingWorker({**cfg, "generation": engine.cfg}, weights())


def test_kv_scales_ride_behind_the_weights_as_they_were_calibrated():
    worker = streaming_kv_scales()
    scales = {name: 0.01 * (i + 1) for i, name in enumerate(KV_SCALES)}
    streamed = dict(worker._iter_params_with_optional_kv_scales(kv_scales=scales))
    assert list(streamed)[-len(KV_SCALES) :] == KV_SCALES
    assert {name: streamed[name].item() for name in KV_SCALES} == pytest.approx(scales)


def test_kv_scales_are_announced_before_there_are_any():
    info = streaming_kv_scales().prepare_refit_info()
    assert all(info[name] == ((1,), torch.float32) for name in KV_SCALES)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (None, "model.layers.0.self_attn.attn.q_scale: this refit came without it"),
        (dict.fromkeys(KV_SCALES[:-1], 0.5), "model.layers.1.self_attn.v_scale: this refit came without it"),
        (dict.fromkeys(KV_SCALES, 0.0), r"q_scale=0\.0 is no valid scale"),
        (dict.fromkeys(KV_SCALES, float("nan")), "q_scale=nan is no valid scale"),
    ],
)
def test_no_refit_goes_out_with_kv_scales_that_nobody_calibrated(scales, message):
    worker = streaming_kv_scales()
    worker.prepare_refit_info()
    with pytest.raises(RuntimeError, match=message):
        list(worker._iter_params_with_optional_kv_scales(kv_scales=scales))


class Cached(torch.nn.Module):
    """An attention layer, of which vLLM has several kinds."""

    kv_cache_dtype = "fp8"


@pytest.mark.parametrize("known", [True, False])
def test_an_fp8_cache_for_which_no_scales_are_announced_is_refused_before_a_refit(known, monkeypatch):
    from nemo_fp8rl.nemo_rl.stock import vllm_worker

    model = torch.nn.Module()
    model.attn = Cached()
    names = ("k_scale", "v_scale", "attn.q_scale")
    monkeypatch.setattr(vllm_worker, "fp8_caches", lambda model: {names: model.attn} if known else {})
    refusal = "the trainer announces no scales for the FP8 KV cache of attn: "
    assert vllm_worker.find_missing_kv_scales(model, names[:2]).startswith(refusal)  # queries have one, too
    assert (
        bool(vllm_worker.find_missing_kv_scales(model, names)) != known
    )  # not known: latent attention has names of its own
    model.attn.kv_cache_dtype = "auto"
    assert vllm_worker.find_missing_kv_scales(model, []) == ""


def test_a_drafter_whose_fp8_cache_no_refit_brings_scales_is_refused(monkeypatch):
    from nemo_fp8rl.nemo_rl.stock import vllm_worker

    monkeypatch.setattr(vllm_worker, "fp8_caches", lambda model: {})
    drafter = torch.nn.Sequential(Cached())
    runner = SimpleNamespace(get_model=torch.nn.Module, drafter=SimpleNamespace(model=drafter))
    config = SimpleNamespace(quant_config=SimpleNamespace(packed_modules_mapping={}))
    reload = vllm_worker._Reload(SimpleNamespace(vllm_config=config, model_runner=runner))
    with pytest.raises(RuntimeError, match="no scales for the FP8 KV cache of 0: "):
        reload.set_refit_info({})
    drafter[0].kv_cache_dtype = "auto"
    reload.set_refit_info({})


@pytest.mark.parametrize(("backend", "refused"), [("FLASHINFER", True), ("TRITON_ATTN", False)])
@pytest.mark.parametrize("graphs", [True, False])
def test_cuda_graphs_that_keep_the_scales_of_an_fp8_cache_are_refused(backend, refused, graphs, monkeypatch):
    from vllm.config import CUDAGraphMode

    from nemo_fp8rl.nemo_rl.stock import vllm_worker

    cache = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: backend))
    monkeypatch.setattr(vllm_worker, "fp8_caches", lambda model: {("a.k_scale", "a.v_scale", "a.attn.q_scale"): cache})
    monkeypatch.setattr(vllm_worker.Worker, "load_model", lambda self: None)
    worker = object.__new__(type("Mixed", (vllm_worker.Fp8Worker,), dict.fromkeys(vllm_worker.REPLACED_METHODS)))
    worker.model_runner = SimpleNamespace(get_model=lambda: None)
    mode = CUDAGraphMode.FULL_AND_PIECEWISE if graphs else CUDAGraphMode.PIECEWISE
    worker.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode))
    if refused and graphs:
        with pytest.raises(RuntimeError, match=r"FlashInfer.*vllm_cfg\.enforce_eager=true, or"):
            worker.load_model()
    else:
        worker.load_model()


def test_kv_scales_outlast_a_wake_up_for_which_vllm_puts_1(monkeypatch):
    from nemo_fp8rl.nemo_rl.stock import vllm_worker

    scales = {f"_{x}_scale{end}": torch.tensor(0.0) for x in "qkv" for end in ("", "_cpu")}
    attention = SimpleNamespace(**scales, impl=SimpleNamespace(bmm1_scale=3.0))
    monkeypatch.setattr(
        vllm_worker, "fp8_caches", lambda model: {("a.k_scale", "a.v_scale", "a.attn.q_scale"): attention}
    )
    monkeypatch.setattr(vllm_worker.Worker, "wake_up", lambda self, tags: attention._k_scale.fill_(1.0))
    worker = object.__new__(vllm_worker.Fp8Worker)
    worker.model_runner = SimpleNamespace(get_model=lambda: SimpleNamespace(load_weights=lambda weights: None))
    worker.reload = vllm_worker._Reload(worker)
    worker.wake_up(tags=["weights"])
    assert attention._k_scale == 1.0  # there was no refit
    worker.reload.load_batch([(name, torch.tensor([0.3])) for name in ("a.k_scale", "a.v_scale", "a.attn.q_scale")])
    worker.wake_up(tags=["kv_cache"])
    held = (attention._k_scale, torch.tensor(attention._v_scale_float), attention._q_scale)
    assert all(torch.equal(one, torch.tensor(0.3)) for one in held)  # not as bfloat16
    assert attention.impl.bmm1_scale is None


@pytest.mark.nemo_rl
@needs_checkout
@pytest.mark.parametrize(("family", "kv_cache_dtype"), [("qwen3", "auto"), ("qwen3", "fp8"), ("qwen3_moe", "auto")])
def test_a_vllm_worker_with_nemo_rls_extension_loads_the_stream_as_a_fresh_engine_does(
    family, kv_cache_dtype, tmp_path
):
    """Again and again, in small batches whose memory is overwritten afterwards; tokens and log-probs of the exported
    model. One without scales is refused before it begins, and after one that ends early there is no other.
    """
    from nemo_fp8rl.commands.tiny_model import write_model

    if not engines_survive_fp8_refit(find_checkout().version):
        pytest.skip("`nemo-fp8rl nemo` refuses FP8 between v0.7.0's own workers")
    if kv_cache_dtype == "fp8" and not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()):
        pytest.skip("vLLM's FP8 KV cache needs a CPU with AVX-512 or AMX")
    for seed in (0, 1):
        write_model(tmp_path / f"model_{seed}", seed, family)
        export(tmp_path / f"model_{seed}", tmp_path / f"fp8_{seed}", "pow2", 1, 0, [])
    command = [sys.executable, "-m", "tests.nemo_rl.stock.stock_engine", str(tmp_path), kv_cache_dtype]
    variables = environment(tmp_path) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=variables, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    answers = dict(
        line.split("\t") for line in done.stdout.splitlines() if "\t" in line and not line.startswith((" ", "\t"))
    )
    assert answers["streamed_0"] == answers["fresh_0"] != answers["fresh_1"] == answers["streamed_1"]
    assert (answers["other_scales"] != answers["streamed_0"]) == (kv_cache_dtype == "fp8")
    if kv_cache_dtype == "fp8":
        assert "no scales for the FP8 KV cache of model.layers.1.self_attn.attn" in answers["scaleless"]
    assert "the engine holds model.layers.1.self_attn.o_proj in FP8" in answers["without"]
    assert answers["half"].startswith("the refit ended without ")
    assert "start it again" in answers["after_half"]


REGISTRY = f"""
import json, sys
sys.modules.update(dict.fromkeys(("numba", "vllm", "megatron")))  # which the driver's environment does not have

import nemo_fp8rl.cli, nemo_fp8rl.nemo_rl.run.setup
from nemo_fp8rl.nemo_rl.compat import prepare

prepare()
import nemo_fp8rl.nemo_rl.adapters.loss_fn
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_rl.models.policy import lm_policy
from nemo_rl.utils import venvs
from nemo_fp8rl.nemo_rl.adapters import environment
from nemo_fp8rl.nemo_rl.stock.worker_choice import policy_factory

lm_policy.Policy = lambda **arguments: arguments
venvs.create_local_venv_on_each_node = lambda command, name: f"/venvs/{{name}}/bin/python"
before = dict(ACTOR_ENVIRONMENT_REGISTRY)
generation = {{"vllm_cfg": {{}}, "vllm_kwargs": {{}}}}
made = policy_factory(config={{"{STREAM_KEY}": {{"hf_config_overrides": {{}}}}, "generation": generation}})
print(json.dumps([made["worker_extension_cls_fqn"], ACTOR_ENVIRONMENT_REGISTRY["{TRAINER_WORKER}"]]))
for ours in (False, True):
    environment.register(ours)
    print(json.dumps([ACTOR_ENVIRONMENT_REGISTRY[name] for name in environment.COLLECTORS]))
print(json.dumps([[before[name] for name in environment.COLLECTORS], sys.executable]))
"""


@pytest.mark.nemo_rl
@needs_checkout
@pytest.mark.parametrize("system", [False, True])
def test_actors_run_where_nemo_rl_has_what_they_need(system, tmp_path):
    """Ours of its trainer in the environment of its own; its collectors where they are, and with our workers here."""
    variables = environment(tmp_path) | {"NEMO_RL_PY_EXECUTABLES_SYSTEM": str(int(system))}
    command = [sys.executable, "-c", REGISTRY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    trainer, stays, ours, (before, here) = (json.loads(line) for line in done.stdout.splitlines() if line[0] == "[")
    assert trainer == [TRAINER_WORKER, here if system else f"/venvs/{STOCK_WORKER}/bin/python"]
    assert stays == before and all(command.startswith("uv ") for command in before)
    assert ours == [here, here]


BACKENDS = """
import sys
from types import SimpleNamespace
from nemo_fp8rl.nemo_rl.compat import prepare

prepare()
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_fp8rl.nemo_rl.adapters.environment import COLLECTORS
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.nemo_rl.run.install import backends

try:
    with backends(SimpleNamespace(model_dump=dict), None):
        pass
except UserError:  # a config without a policy
    print("HERE", all(ACTOR_ENVIRONMENT_REGISTRY[name] == sys.executable for name in COLLECTORS))
"""


@pytest.mark.nemo_rl
@needs_checkout
def test_in_a_runner_of_ones_own_collectors_are_in_the_drivers_environment(tmp_path):
    command = [sys.executable, "-c", BACKENDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment(tmp_path), check=False)
    assert "HERE True" in done.stdout, done.stderr[-3000:]
