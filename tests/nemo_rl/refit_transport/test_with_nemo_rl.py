"""The checkpoint engine between NeMo RL's own mixins and its own synchronizer, on a CPU; threads stand for actors."""

import asyncio
import copy
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.nemo_rl.compat import prepare
from nemo_fp8rl.nemo_rl.recipe.checkout import find_checkout
from nemo_fp8rl.nemo_rl.refit_transport import rollout_side
from nemo_fp8rl.nemo_rl.refit_transport.settings import ENGINE
from tests.nemo_rl.refit_transport.sides import K_SCALE, SETTINGS, by_contract, check_equal, make_weights, step
from tests.nemo_rl.refit_transport.test_refits import FlippingEnd
from tests.nemo_rl.runs import needs_checkout

pytestmark = [pytest.mark.nemo_rl, needs_checkout]
GPU_BYTES = 80 << 30
POLICY_RANKS, ROLLOUT_RANKS = 3, 2


@pytest.fixture
def nemo_rl(monkeypatch) -> SimpleNamespace:
    """NeMo RL's classes of a refit, with what of torch.cuda they ask for."""
    if not find_checkout().has_checkpoint_engines:
        pytest.skip("v0.7.x has no checkpoint engines")
    prepare()
    from nemo_rl.models.generation.vllm.checkpoint_engine import VllmCheckpointEngineMixin
    from nemo_rl.models.policy.workers.checkpoint_engine import (
        MegatronCheckpointEngineSendMixin,
        PolicyCheckpointEngineMixin,
    )
    from nemo_rl.weight_sync import checkpoint_engine_config, checkpoint_engine_weight_synchronizer

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=GPU_BYTES))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: None)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: None)

    def get(futures: list[Future]) -> list[Any]:
        wait(futures)
        return [future.result() for future in futures]

    monkeypatch.setattr(checkpoint_engine_weight_synchronizer, "ray", SimpleNamespace(get=get, ObjectRef=Future))

    class PolicyWorker(MegatronCheckpointEngineSendMixin, PolicyCheckpointEngineMixin):
        def __init__(self, rank: int, weights: Callable[[], Mapping[str, Tensor]]) -> None:
            self.rank, self.weights = rank, weights

        def _iter_params_with_optional_kv_scales(self, kv_scales=None) -> Iterator[tuple[str, Tensor]]:
            weights = {name: tensor for name, tensor in self.weights().items() if name != K_SCALE}
            yield from weights.items()
            yield from ((name, torch.tensor([scale])) for name, scale in (kv_scales or {}).items())

    class VllmWorker(VllmCheckpointEngineMixin):
        def __init__(self) -> None:
            self.loaded: dict[str, Tensor] = {}

        def _load_weights(self, batch: list[tuple[str, Tensor]]) -> None:
            self.loaded |= {name: tensor.clone() for name, tensor in batch}

        def _maybe_process_fp8_kv_cache(self) -> None: ...

    return SimpleNamespace(
        PolicyWorker=PolicyWorker,
        VllmWorker=VllmWorker,
        Synchronizer=checkpoint_engine_weight_synchronizer.CheckpointEngineWeightSynchronizer,
        config=checkpoint_engine_config.checkpoint_engine_refit_config,
    )


class FakeWorkerGroup:
    """Threads in place of Ray's actors. call(worker, method, its arguments)."""

    def __init__(self, workers: list[Any], call: Callable[..., Any]) -> None:
        self.workers, self.call, self.threads = workers, call, ThreadPoolExecutor(8)

    def run_all_workers_single_data(self, method: str, *, checkpoint_method: str, **arguments: Any) -> list[Future]:
        arguments.pop("run_rank_0_only_axes", None)
        ((_, given),) = arguments.items()
        return [self.threads.submit(self.call, worker, checkpoint_method, given) for worker in self.workers]

    def run_all_workers_multiple_data(
        self, method: str, *, method_args: list[Any], common_kwargs: dict[str, str], **axes: Any
    ) -> list[Future]:
        name = common_kwargs["checkpoint_method"]
        return [
            self.threads.submit(self.call, worker, name, given)
            for worker, given in zip(self.workers, method_args, strict=True)
        ]


class Run:
    """A policy and a generation whose weights NeMo RL's synchronizer joins through the class that the recipe names."""

    def __init__(self, nemo_rl: SimpleNamespace, monkeypatch, **settings: Any) -> None:
        self.nemo_rl, self.weights = nemo_rl, make_weights()
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
        policy = [nemo_rl.PolicyWorker(rank, lambda: self.weights) for rank in range(POLICY_RANKS)]
        self.engines = [nemo_rl.VllmWorker() for _ in range(ROLLOUT_RANKS)]
        self.policy = SimpleNamespace(
            worker_group=FakeWorkerGroup(policy, self._call_policy), prepare_refit_info=lambda **kwargs: {}
        )
        self.generation = SimpleNamespace(
            worker_group=FakeWorkerGroup(self.engines, self._call_engine),
            prepare_refit_info=lambda info: None,
            cfg={
                "vllm_cfg": {"async_engine": False},
                "refit_transport": ENGINE,
                "refit_cfg": {ENGINE: SETTINGS | settings},
            },
            dp_size=ROLLOUT_RANKS,
        )
        self.synchronizer = nemo_rl.Synchronizer(self.policy, self.generation, nemo_rl.config(self.generation.cfg))
        self.synchronizer.init_communicator()

    @staticmethod
    def _call_policy(worker: Any, method: str, kwargs: dict[str, Any]) -> Any:
        return asyncio.run(worker.checkpoint_engine_rpc(method, kwargs))

    @staticmethod
    def _call_engine(worker: Any, method: str, args: tuple[Any, ...]) -> Any:
        return [getattr(worker, method)(*args)]

    def refit(self) -> None:
        """Refit with the weights; the scale of the KV cache comes as NeMo RL's loop gives it."""
        self.synchronizer.sync_weights(kv_scales={K_SCALE: float(self.weights[K_SCALE])})

    def check(self) -> None:
        for engine in self.engines:
            check_equal(engine.loaded, by_contract(self.weights))

    def metrics(self) -> list[dict[str, Any]]:
        """Return the numbers of the policy ranks, by the call with which the driver of a run gets them."""
        futures = self.policy.worker_group.run_all_workers_single_data(
            "checkpoint_engine_rpc", checkpoint_method="policy_metrics", method_kwargs={}
        )
        return [future.result() for future in futures]

    def counts(self, name: str) -> list[int]:
        return [metrics[name] for metrics in self.metrics()]


@pytest.fixture
def run(nemo_rl, monkeypatch) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(**settings: Any) -> Run:
        runs.append(Run(nemo_rl, monkeypatch, **settings))
        return runs[-1]

    yield start
    for started in runs:
        started.synchronizer.shutdown()


@pytest.mark.parametrize("release_after_refit", [False, True])
def test_bytes_are_the_contracts_after_whole_versions_and_deltas(run, release_after_refit):
    """Also where NeMo RL closes and opens the engine around every refit."""
    started = run(release_after_refit=release_after_refit)
    started.refit()
    started.check()
    assert started.counts("whole") == [1, 1, 0], "two policy ranks have a receiver, the third has none"
    for metrics in started.metrics()[:2]:
        assert metrics["report"]["quantized_nbytes"] <= 0.505 * metrics["report"]["quantized_bf16_nbytes"]
    for _ in range(2):
        started.weights = step(started.weights)
        started.refit()
        started.check()
        assert started.counts("deltas") == [1, 1, 0]
        for metrics in started.metrics()[:2]:
            assert metrics["report"]["quantized_nbytes"] <= 0.01 * metrics["report"]["quantized_bf16_nbytes"]


def test_a_bit_that_flips_in_flight_is_found_named_and_sent_again(run, monkeypatch, caplog):
    places, connect = [5], rollout_side.connect
    monkeypatch.setattr(rollout_side, "connect", lambda *args: FlippingEnd(connect(*args), places))
    started = run()
    started.refit()
    started.check()
    assert "model.embed_tokens.weight" in caplog.text
    assert sorted(started.counts("retries")) == [0, 0, 1]


def test_a_refit_that_fails_leaves_the_engine_as_it_is_and_may_be_repeated(run, monkeypatch):
    places, connect = list[int](), rollout_side.connect
    monkeypatch.setattr(rollout_side, "connect", lambda *args: FlippingEnd(connect(*args), places))
    started = run(retries=0)
    started.refit()
    before = started.weights
    started.weights = step(before)
    places.append(5)
    with pytest.raises(RuntimeError, match="has not got the weights in 1 attempts"):
        started.refit()
    assert started.synchronizer.is_stale
    assert sum(torch.equal(engine.loaded[K_SCALE], before[K_SCALE]) for engine in started.engines) == 1
    started.refit()
    started.check()
    assert sorted(started.counts("whole")) == [0, 0, 1], "the engine whose refit failed"
    assert sorted(started.counts("deltas")) == [0, 0, 1], "the other one"


def test_an_engine_that_was_started_again_gets_a_whole_version(run):
    started = run()
    started.refit()
    started.synchronizer.shutdown()
    started.engines[1] = started.nemo_rl.VllmWorker()
    started.synchronizer.init_communicator()
    started.weights = step(started.weights)
    started.refit()
    started.check()
    assert (sum(started.counts("whole")), sum(started.counts("deltas"))) == (1, 1)


def test_a_refit_reports_its_numbers_to_nemo_rls_loop(run, monkeypatch):
    from nemo_fp8rl.nemo_rl.refit_transport import reporting

    monkeypatch.setattr(reporting, "ray", SimpleNamespace(get=lambda futures: [f.result() for f in futures]))
    started = run()
    started.generation.weight_synchronizer = started.synchronizer
    reporting.report_refits(started.policy, started.generation)
    synchronizer = started.generation.weight_synchronizer
    first, second = (synchronizer.sync_weights(kv_scales={K_SCALE: 0.5}) for _ in range(2))
    assert (first["version"], first["delta"], first["retries"]) == (1, 0.0, 0)
    assert (second["version"], second["delta"]) == (2, 1.0)
    assert second["bytes"] < 0.02 * first["bytes"] and second["wire_over_bf16"] < 0.01 < first["wire_over_bf16"]
    assert first["kept_bytes"] > 1 << 20 and first["timing/refit"] > 0
    assert not synchronizer.is_stale and synchronizer._checkpoint_engine_ready
    assert not copy.copy(synchronizer).is_stale


def test_a_misspelled_setting_is_named_when_the_class_is_built(run):
    with pytest.raises(ValueError, match=r"unknown config key .*Fp8CheckpointEngine.*retrys; did you mean .*retries"):
        run(retrys=2)


@pytest.mark.parametrize("bucket_bytes", [1 << 16, 1 << 20])
def test_both_sides_in_one_event_loop(nemo_rl, bucket_bytes):
    """As NeMo RL's own tests of NIXL: tensors of any dtype, larger than a bucket; then no tensor at all."""
    from nemo_rl.utils.checkpoint_engines.base import create_checkpoint_engine

    sender, receiver = (
        create_checkpoint_engine(ENGINE, bucket_size_bytes=bucket_bytes, engine_kwargs={"timeout_seconds": 20.0})
        for _ in range(2)
    )
    sizes = {"train_world_size": 1, "rollout_world_size": 1, "metadata": [sender.prepare(), receiver.prepare()]}
    sender.init_policy_process_group(worker_rank=0, **sizes)
    receiver.init_rollout_process_group(rollout_rank=0, **sizes)
    expected = {
        "small": torch.tensor([1.0, 2.0, 3.0]).bfloat16(),
        "spanning": torch.arange(99_999.0).reshape(99_999, 1),
        "scalar": torch.tensor(3.0),
        "tail": torch.arange(5),
        "flags": torch.tensor([True, False]),
    }

    async def refit(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sending = asyncio.create_task(sender.send_weights(iter(weights.items())))
        received = {n: x.clone() async for batch in receiver.receive_weight_batches() for n, x in batch}
        await sending
        return received

    for weights in (expected, expected, {}, expected):
        check_equal(asyncio.run(refit(weights)), weights)
    sender.finalize()
    receiver.finalize()
