"""The engine's half of FP8 on the wire: vLLM's worker with fakes, and with NeMo RL's extension."""

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nemo_fp8rl.commands.export.convert import export
from nemo_fp8rl.nemo_rl.recipe.checkout import find_checkout
from tests.nemo_rl.runs import environment, needs_checkout
from tests.nemo_rl.stock.fake_trainer import WEIGHT

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("cuda", "calls"), [(True, ["load", "wait"]), (False, ["load"])])
def test_a_batch_is_copied_before_another_stream_reads_it(cuda, calls, monkeypatch):
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
def test_an_extension_without_the_replaced_methods_is_refused(missing):
    from nemo_fp8rl.nemo_rl.stock import vllm_worker

    names = {"_load_weights", "_weight_update_lifecycle"} - {missing}
    worker = type("Mixed", (vllm_worker.Fp8Worker, type("Extension", (), dict.fromkeys(names))), {})
    with pytest.raises(RuntimeError, match=rf"has no {missing}, .*workers=ours"):
        object.__new__(worker).load_model()


class FakeEngine:
    """A checkpoint engine that yields these batches, then raises this error."""

    def __init__(self, batches: list, error: Exception | None = None) -> None:
        self.batches, self.error = batches, error

    async def receive_weight_batches(self):
        for batch in self.batches:
            yield batch
        if self.error is not None:
            raise self.error


def test_a_checkpoint_engine_begins_a_refit_with_its_first_batch(monkeypatch):
    """One that fails before leaves the engine's weights; one that fails later, or ends early, spoils them."""
    from nemo_fp8rl.nemo_rl.stock import vllm_worker

    done = []
    for name in ("forget_packed_experts", "initialize_layerwise_reload"):
        monkeypatch.setattr(vllm_worker, name, lambda model, name=name: done.append(name))
    monkeypatch.setattr(vllm_worker, "finalize_layerwise_reload", lambda model, config: done.append("finalize"))
    for name in ("set_current_vllm_config", "preserve_nonpersistent_buffers"):
        monkeypatch.setattr(vllm_worker, name, lambda value: nullcontext())
    model = SimpleNamespace(load_weights=lambda weights: done.append(sorted(name for name, _ in weights)))
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(get_model=lambda: model), vllm_config=None, model_config=None,
        state_dict_info={"a": None, "b": None},
    )  # fmt: skip
    reload, batches = vllm_worker._Reload(worker), [[("a", torch.ones(1))], [("b", torch.ones(1))]]
    worker.checkpoint_engine = FakeEngine([], ConnectionError("the trainer is gone"))
    with pytest.raises(ConnectionError):
        reload.load_from_checkpoint_engine()
    assert done == []
    worker.checkpoint_engine = FakeEngine(batches)
    assert reload.load_from_checkpoint_engine()
    assert done == ["forget_packed_experts", "initialize_layerwise_reload", ["a"], ["b"], "finalize"]
    worker.checkpoint_engine = FakeEngine(batches[:1])
    with pytest.raises(RuntimeError, match="the refit ended without b"):
        reload.load_from_checkpoint_engine()
    worker.checkpoint_engine = FakeEngine(batches)
    with pytest.raises(RuntimeError, match="holds a mixture of weights"):
        reload.load_from_checkpoint_engine()


class AttentionWithFp8Cache(torch.nn.Module):
    """An attention layer, of which vLLM has several kinds."""

    kv_cache_dtype = "fp8"


@pytest.mark.parametrize("known", [True, False])
def test_an_fp8_cache_without_announced_scales_is_refused(known, monkeypatch):
    from nemo_fp8rl.nemo_rl.stock import vllm_worker

    model = torch.nn.Module()
    model.attn = AttentionWithFp8Cache()
    names = ("k_scale", "v_scale", "attn.q_scale")
    monkeypatch.setattr(vllm_worker, "fp8_caches", lambda model: {names: model.attn} if known else {})
    refusal = "the trainer announces no scales for the FP8 KV cache of attn: "
    assert vllm_worker.find_missing_kv_scales(model, names[:2]).startswith(refusal)  # queries have one, too
    assert (
        bool(vllm_worker.find_missing_kv_scales(model, names)) != known
    )  # not known: latent attention has names of its own
    model.attn.kv_cache_dtype = "auto"
    assert vllm_worker.find_missing_kv_scales(model, []) == ""


def test_a_drafter_with_an_fp8_cache_is_refused(monkeypatch):
    from nemo_fp8rl.nemo_rl.stock import vllm_worker

    monkeypatch.setattr(vllm_worker, "fp8_caches", lambda model: {})
    drafter = torch.nn.Sequential(AttentionWithFp8Cache())
    runner = SimpleNamespace(get_model=torch.nn.Module, drafter=SimpleNamespace(model=drafter))
    config = SimpleNamespace(quant_config=SimpleNamespace(packed_modules_mapping={}))
    reload = vllm_worker._Reload(SimpleNamespace(vllm_config=config, model_runner=runner))
    with pytest.raises(RuntimeError, match="no scales for the FP8 KV cache of 0: "):
        reload.set_refit_info({})
    drafter[0].kv_cache_dtype = "auto"
    reload.set_refit_info({})


@pytest.mark.parametrize(("backend", "refused"), [("FLASHINFER", True), ("TRITON_ATTN", False)])
@pytest.mark.parametrize("graphs", [True, False])
def test_cuda_graphs_that_keep_initial_kv_scales_are_refused(backend, refused, graphs, monkeypatch):
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


def test_kv_scales_are_restored_after_a_wake_up(monkeypatch):
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
@pytest.mark.parametrize(
    ("family", "kv_cache_dtype", "transport"),
    [
        ("qwen3", "auto", "batches"),
        ("qwen3", "fp8", "batches"),
        ("qwen3_moe", "auto", "batches"),
        ("qwen3", "fp8", "checkpoint_engine"),
    ],
)
def test_a_streamed_engine_equals_a_fresh_one(family, kv_cache_dtype, transport, tmp_path):
    """Again and again, in small batches whose memory is overwritten afterwards; tokens and log-probs of the exported
    model. One without scales is refused before it begins, and after one that ends early there is no other.
    """
    from nemo_fp8rl.commands.tiny_model import write_model

    if not find_checkout().engines_survive_fp8_refit:
        pytest.skip("`nemo-fp8rl nemo` refuses FP8 between v0.7.0's own workers")
    if kv_cache_dtype == "fp8" and not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()):
        pytest.skip("vLLM's FP8 KV cache needs a CPU with AVX-512 or AMX")
    for seed in (0, 1):
        write_model(tmp_path / f"model_{seed}", seed, family)
        export(tmp_path / f"model_{seed}", tmp_path / f"fp8_{seed}", "pow2", 1, 0, [])
    command = [sys.executable, "-m", "tests.nemo_rl.stock.stock_engine", str(tmp_path), kv_cache_dtype, transport]
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
