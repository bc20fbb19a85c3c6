"""Two ranks that share a model of Transformer Engine's layers, against two of emulated ones, on gloo's collectives."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from nemo_fp8rl.policy.cpu import megatron_on_cpu
from nemo_fp8rl.policy.groups import join
from nemo_fp8rl.tiny import write_model
from tests.policy.ranks import Ranks, logprobs_and_norm
from tests.transformer_engine.fake_kernels import fake_hopper, install
from tests.transformer_engine.test_worker import batch

pytestmark = pytest.mark.transformer_engine
fakes = ExitStack()
"""In a rank's process: never left."""


@pytest.fixture(scope="module")
def emulated() -> Iterator[Ranks]:
    pool = Ranks(2, initializer=install)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def gpus() -> Iterator[Ranks]:
    pool = Ranks(2, initializer=install)
    pool.run(_pose_as_gpu, [(rank, pool.rendezvous) for rank in range(2)])
    yield pool
    pool.close()


def _pose_as_gpu(rank: int, rendezvous: tuple[str, int]) -> None:
    from tests.policy.ranks import worker

    join(rank, 2, rendezvous, worker.listener if rank == 0 else None)  # gloo alone: there is no NCCL
    fakes.enter_context(megatron_on_cpu())
    fakes.enter_context(fake_hopper())


TP = ("tensor_model_parallel_size=2",)
SP = (*TP, "sequence_parallel=true")
PP = ("pipeline_model_parallel_size=2",)
CP = ("context_parallel_size=2",)
EP = ("expert_model_parallel_size=2",)
QWEN2 = {"family": "qwen2", "num_key_value_heads": 2}
QWEN3, MOE = {"family": "qwen3"}, {"family": "qwen3_moe"}


@pytest.mark.parametrize("packed", ["true", "false"])
@pytest.mark.parametrize(
    ("sizes", "layout"),
    [(QWEN3, ()), (QWEN2, TP), (QWEN3, SP), (QWEN3, PP), (QWEN3, CP), (MOE, SP), (MOE, EP), (MOE, PP), (MOE, CP)],
    ids=["qwen3-dp", "qwen2-tp", "qwen3-sp", "qwen3-pp", "qwen3-cp", "moe-sp", "moe-ep", "moe-pp", "moe-cp"],
)
def test_two_ranks_say_what_two_emulated_ones_say(recipe, tmp_path, emulated, gpus, sizes, layout, packed):
    write_model(tmp_path / "model", seed=3, **sizes)
    cfg = recipe(
        f"policy.model_name={tmp_path}/model",
        "nemo_fp8rl.flow=fp8_e2e",
        "nemo_fp8rl.align=none",
        f"policy.sequence_packing.enabled={packed}",
        "policy.train_micro_batch_size=2",
        "policy.logprob_batch_size=2",
        "cluster.backend=ray",
        "cluster.train_ranks=2",
        *(f"policy.megatron_cfg.{key}" for key in layout),
    )
    expected, expected_norm = logprobs_and_norm(emulated, cfg, batch(0))
    logprobs, norm = logprobs_and_norm(gpus, cfg, batch(0))
    real = batch(0)["token_mask"].bool()
    assert (logprobs - expected)[real].abs().max() == 0
    assert norm == pytest.approx(expected_norm, rel=1e-5)
