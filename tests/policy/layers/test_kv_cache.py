"""The trainer calibrates an FP8 KV cache's scales and saves them in a checkpoint."""

import json
from dataclasses import replace

import pytest
import torch

from nemo_fp8rl.batch import split_shards
from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.fp8 import KvScales
from nemo_fp8rl.generation.engine_checks import check_for_driver, check_machine
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.ops import alignment
from nemo_fp8rl.policy.layers.kv_cache import TrainerKvCache, make_kv_cache
from nemo_fp8rl.policy.rank.worker import MegatronWorker
from tests.policy import ranks
from tests.policy.test_worker import new_worker, random_batch

FP8 = "policy.generation.vllm_cfg.kv_cache_dtype=fp8"


def test_padding_is_not_calibrated(recipe):
    worker, batch = new_worker(recipe(FP8)), random_batch(0)
    worker.calibrate_kv(batch)
    scales = worker.kv_cache.scales
    real = torch.arange(10) < batch.input_lengths[:, None]
    others = torch.randint(16, 60, (8, 10), generator=torch.Generator().manual_seed(1))
    worker.calibrate_kv(replace(batch, input_ids=torch.where(real, batch.input_ids, others)))
    assert worker.kv_cache.scales == scales


def test_scales_fit_what_attention_saw(recipe):
    """The largest query, key and value, with the margin, are in the upper half of E4M3's range."""
    worker, batch = new_worker(recipe(FP8)), random_batch(0)
    maxima: dict[int, list[tuple[float, ...]]] = {}
    read = worker.kv_cache.read

    def spy(layer, query, key, value, rows=None):
        maxima.setdefault(layer, []).append(tuple(float(x.abs().max()) for x in (key, value, query)))
        return read(layer, query, key, value, rows)

    worker.kv_cache.read = spy
    full = replace(batch, input_lengths=torch.full((8,), 10))
    worker.calibrate_kv(full)
    for layer, scales in enumerate(zip(*_of(worker), strict=True)):
        for amax, scale in zip(map(max, zip(*maxima[layer], strict=True)), scales, strict=True):
            assert 448 / 2 <= amax * 1.05 / scale <= 448


def test_rounding_needs_calibration_and_a_unified_cache(recipe):
    batch = random_batch(0)
    plain = new_worker(recipe()).logprobs(batch)
    for kv in ("unified", "rollout"):
        worker = new_worker(recipe(FP8, f"nemo_fp8rl.kv={kv}"))
        assert torch.equal(worker.logprobs(batch), plain)
        worker.calibrate_kv(batch)
        assert torch.equal(worker.logprobs(batch), plain) == (kv == "rollout")


def test_amx_drops_denormals_and_keeps_their_gradient():
    cache = TrainerKvCache(1, "toward_zero", loses_denormals=True)
    cache.scales = KvScales((0.5,), (2.0,), (1.0,))
    x = torch.tensor([1.0, 2.0**-6, 2.0**-7, 2.0**-8, -(2.0**-4)], requires_grad=True)
    key, value = cache.read(0, x, x, x)
    assert key.tolist() == [1.0, 2.0**-6, 2.0**-7, 0.0, -(2.0**-4)]
    assert value.tolist() == [1.0, 0.0, 0.0, 0.0, -(2.0**-4)]
    assert cache.smallest_sum(0) == 2.0**-5
    (key + value).sum().backward()
    assert x.grad.tolist() == [2.0] * 5


def test_scales_come_back_with_the_checkpoint(recipe, tmp_path):
    worker, batch = new_worker(recipe(FP8)), random_batch(0)
    worker.calibrate_kv(batch)
    worker.save(str(tmp_path))
    resumed = new_worker(recipe(FP8))
    resumed.load(str(tmp_path))
    assert resumed.kv_cache.scales == worker.kv_cache.scales
    assert torch.equal(resumed.logprobs(batch), worker.logprobs(batch))


def test_values_that_are_not_finite_are_named(recipe):
    """The error comes before the first refit, which would name the weight."""
    worker = new_worker(recipe(FP8))
    with torch.no_grad():
        worker.model.decoder.layers[1].self_attention.linear_qkv.weight[-1, 3] = torch.nan
    with pytest.raises(
        UserError, match=r"^the FP8 KV cache cannot be calibrated: v of layer 1: .* values .*; look into"
    ):
        worker.calibrate_kv(random_batch(0))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), r"kv_scales\.json cannot be read"),
        (lambda path: path.write_text("{"), r"kv_scales\.json cannot be read"),
        (lambda path: _write(path, [1, 1], [1, 1], [1]), "another number of layers"),
        (lambda path: _write(path, [1, 0], [1, 1], [1, 1]), "not a finite number above"),
        (
            lambda path: path.write_text(json.dumps({"k_scale": [1, 1], "v_scale": [1, 1]})),
            "lacks 'q_scale': .* start a new run with policy.model_name=",
        ),
    ],
)
def test_a_checkpoint_with_damaged_scales_is_refused(recipe, tmp_path, damage, message):
    worker = new_worker(recipe(FP8))
    worker.calibrate_kv(random_batch(0))
    worker.save(str(tmp_path))
    damage(tmp_path / "kv_scales.json")
    with pytest.raises(UserError, match=message):
        new_worker(recipe(FP8)).load(str(tmp_path))


@pytest.mark.parametrize(
    "layout",
    [("tensor_model_parallel_size=2",), ("pipeline_model_parallel_size=2",), ("context_parallel_size=2",), ()],
    ids=["tp", "pp", "cp", "dp"],
)
def test_all_ranks_compute_the_same_scales(two, recipe, layout):
    batch = random_batch(0)
    single_rank = new_worker(recipe(FP8))
    single_rank.calibrate_kv(batch)
    keys = (f"policy.megatron_cfg.{key}" for key in layout)
    infos = two.setup(
        recipe(FP8, "cluster.backend=ray", "cluster.train_ranks=2", "policy.train_micro_batch_size=4", *keys)
    )
    parts = split_shards(batch, 1 if layout else 2)
    scales_of_ranks = two.run(_calibrate, [(parts[info.shard],) for info in infos])
    assert scales_of_ranks == [_of(single_rank)] * 2


def _calibrate(part):
    ranks.worker.calibrate_kv(part)
    return _of(ranks.worker)


def _of(worker: MegatronWorker):
    scales = worker.kv_cache.scales
    return scales.k_scale, scales.v_scale, scales.q_scale


def _write(path, k, v, q):
    path.write_text(json.dumps({"k_scale": k, "v_scale": v, "q_scale": q}))


def test_a_head_size_that_vllm_cannot_hold_is_refused(recipe, tmp_path):
    write_model(tmp_path / "model", head_dim=48)
    cfg = recipe(FP8, f"policy.model_name={tmp_path}/model", "nemo_fp8rl.flow=bf16")
    hf = read_hf_config(tmp_path / "model")
    with pytest.raises(UserError, match=r"kv_cache_dtype=fp8 .*head_dim=48 is not a multiple of 32"):
        check_for_driver(hf, cfg)


def test_a_gpu_leaves_the_cache_dtype_to_vllm(recipe, tmp_path, monkeypatch):
    write_model(tmp_path / "model", head_dim=48)
    cfg = recipe(FP8, f"policy.model_name={tmp_path}/model", "nemo_fp8rl.flow=bf16")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_machine(read_hf_config(tmp_path / "model"), cfg)


def test_a_driver_of_a_cluster_ignores_its_own_machine(recipe, tmp_path, monkeypatch):
    """The head of a KubeRay cluster, for example, has no GPU."""
    write_model(tmp_path / "model", head_dim=48)
    hf = read_hf_config(tmp_path / "model")
    overrides = (FP8, f"policy.model_name={tmp_path}/model", "nemo_fp8rl.flow=bf16")
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    check_for_driver(hf, recipe(*overrides, "cluster.backend=ray"))
    with pytest.raises(UserError, match="head_dim=48"):
        check_for_driver(hf, recipe(*overrides))


def test_an_fp8_recipe_on_a_gpu_without_fp8_is_refused(recipe, tmp_path, monkeypatch):
    write_model(tmp_path / "model")
    hf, model = read_hf_config(tmp_path / "model"), f"policy.model_name={tmp_path}/model"
    fp8, bf16 = (recipe(model, f"nemo_fp8rl.flow={flow}") for flow in ("fp8_e2e", "bf16"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Fake A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    check_machine(hf, fp8)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    check_machine(hf, bf16)
    with pytest.raises(UserError, match=r"8\.9 or higher, and Fake A100 has 8\.0; set nemo_fp8rl\.flow=bf16"):
        check_machine(hf, fp8)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    check_machine(hf, fp8)
    with pytest.raises(UserError, match=r"training needs .* 9\.0 or higher, .* set nemo_fp8rl\.flow=fp8_rollout"):
        check_for_driver(hf, fp8)  # where the trainer is, too


def test_shared_operations_round_to_nearest_where_the_trainer_reads_the_cache(recipe, monkeypatch):
    monkeypatch.setattr(alignment, "has_gpu", lambda: True)
    roundings = []
    for keys in ((FP8,), (FP8, "nemo_fp8rl.kv=rollout")):
        cache = make_kv_cache(2, recipe(*keys, "nemo_fp8rl.align=vllm"))
        roundings.append((cache.rounding, cache.loses_denormals))
    assert roundings == [("nearest", False), (None, False)]
    assert make_kv_cache(2, recipe("nemo_fp8rl.align=vllm")) is None


def test_a_cache_option_without_an_fp8_cache_is_refused(recipe):
    with pytest.raises(UserError, match=r"nemo_fp8rl\.kv=rollout .* set policy\.\S*kv_cache_dtype=fp8"):
        recipe("nemo_fp8rl.kv=rollout")


def test_float32_is_refused(recipe):
    with pytest.raises(UserError, match=r"kv_cache_dtype=fp8 needs policy\.precision=bfloat16"):
        recipe(FP8, "policy.precision=float32", "nemo_fp8rl.flow=bf16")
