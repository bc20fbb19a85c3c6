"""Two ranks with Transformer Engine's layers, in comparison with two with emulated layers, on gloo."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.algorithms.quantization_error import weight_error
from nemo_fp8rl.batch import RolloutBatch, split_shards
from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.fp8 import BlockScaled, quantize_blockwise
from nemo_fp8rl.policy.on_cpu.megatron_on_cpu import megatron_on_cpu
from nemo_fp8rl.policy.rank.process_groups import start_process_groups
from nemo_fp8rl.refit.digest import digest_of
from tests.batches import loss_totals, rollout_batch
from tests.policy import ranks
from tests.policy.layers.test_routing_replay import random_routes
from tests.policy.ranks import Ranks, logprobs_and_norm
from tests.transformer_engine.fake_kernels import FakeKernels, fake_hopper, install
from tests.transformer_engine.test_worker import batch

pytestmark = pytest.mark.transformer_engine
fakes = ExitStack()
"""The patches of a rank's process, which stay until its end."""


@pytest.fixture(scope="module")
def emulated() -> Iterator[Ranks]:
    pool = Ranks(2, [install] * 2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def gpus() -> Iterator[Ranks]:
    pool = Ranks(2, [install] * 2, _pose_as_gpu)
    yield pool
    pool.close()


def _pose_as_gpu(rank: int, rendezvous: tuple[str, int]) -> None:
    from tests.policy.ranks import worker

    start_process_groups(rank, 2, rendezvous, worker.listener if rank == 0 else None)  # gloo alone: there is no NCCL
    fakes.enter_context(megatron_on_cpu())
    fakes.enter_context(fake_hopper())


def _pose_as_gpu_that_sums_in_rank_order(rank: int, rendezvous: tuple[str, int]) -> None:
    """Two ranks sum in rank order, too, although they need not; their sums have the bits of a collective's."""
    _pose_as_gpu(rank, rendezvous)
    from nemo_fp8rl.policy.layers import te_linears
    from nemo_fp8rl.policy.layers.shared_ops import rank_sum

    linears = te_linears.te_linears
    te_linears.te_linears = lambda scale_format, fp8_param, rank_order: linears(scale_format, fp8_param, True)
    rank_sum.UNORDERED_RANKS = 1
    rank_sum.sum_over_ranks = mock.Mock(wraps=rank_sum.sum_over_ranks)


def _ordered_sums() -> int:
    from nemo_fp8rl.policy.layers.shared_ops import rank_sum

    return rank_sum.sum_over_ranks.call_count


def _fp8_gathers() -> int:
    return FakeKernels.fp8_gathers


TP = ("tensor_model_parallel_size=2",)
SP = (*TP, "sequence_parallel=true")
PP = ("pipeline_model_parallel_size=2",)
CP = ("context_parallel_size=2",)
EP = ("expert_model_parallel_size=2",)
ETP1 = (*SP, *EP, "expert_tensor_parallel_size=1")
QWEN2 = {"family": "qwen2", "num_key_value_heads": 2}
QWEN3, MOE = {"family": "qwen3"}, {"family": "qwen3_moe"}


@pytest.fixture
def assert_alike(recipe, tmp_path, emulated, gpus):
    return make_check(recipe, tmp_path, emulated, gpus)


def make_check(recipe, tmp_path, emulated: Ranks, gpus: Ranks):
    """Return a function that asserts that two ranks of each kind compute the same, with these sizes and keys."""

    def check(batch: RolloutBatch, sizes: dict[str, Any], layout: tuple[str, ...], packed: str = "false") -> None:
        write_model(tmp_path / "model", seed=3, **sizes)
        cfg = recipe(
            f"policy.model_name={tmp_path}/model",
            "nemo_fp8rl.flow=fp8_e2e",
            "nemo_fp8rl.align=none",
            f"policy.sequence_packing.enabled={packed}",
            "policy.train_micro_batch_size=2",
            "policy.logprob_batch_size=2",
            "policy.max_total_sequence_length=160",
            "cluster.backend=ray",
            "cluster.train_ranks=2",
            *(f"policy.megatron_cfg.{key}" for key in layout),
        )
        expected, expected_norm = logprobs_and_norm(emulated, cfg, batch)
        logprobs, norm = logprobs_and_norm(gpus, cfg, batch)
        assert (logprobs - expected)[batch.token_mask.bool()].abs().max() == 0
        assert norm == pytest.approx(expected_norm, rel=1e-5)

    return check


@pytest.mark.parametrize("packed", ["true", "false"])
@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        *((QWEN3, ()), (QWEN2, TP), (QWEN3, SP), (QWEN3, PP), (QWEN3, CP)),
        *((MOE, SP), (MOE, EP), (MOE, ETP1), (MOE, PP), (MOE, CP)),
    ],
    ids=[
        *("qwen3-dp", "qwen2-tp", "qwen3-sp", "qwen3-pp", "qwen3-cp"),
        *("moe-sp", "moe-ep", "moe-sp-ep-etp1", "moe-pp", "moe-cp"),
    ],
)
def test_two_ranks_say_what_two_emulated_ones_say(assert_alike, sizes, layout, packed):
    assert_alike(batch(0), sizes, layout, packed)


@pytest.mark.parametrize("sizes", [QWEN3, QWEN2, MOE], ids=["qwen3", "qwen2", "moe"])
def test_ranks_with_whole_blocks_of_tokens_gather_them_in_fp8(assert_alike, gpus, sizes):
    """With a multiple of 128 tokens per rank, Transformer Engine quantizes before it gathers, not after."""
    tokens = 129  # of which the model gets 128, two sequences a microbatch
    ids = torch.randint(2, 60, (4, tokens), generator=torch.Generator().manual_seed(5))
    lengths = torch.tensor([tokens, 90, 128, tokens])
    whole = rollout_batch(
        input_ids=ids,
        input_lengths=lengths,
        token_mask=(torch.arange(tokens) < lengths[:, None]).float(),
    )
    before = gpus.run(_fp8_gathers, [()] * 2)
    assert_alike(whole, sizes, SP)
    assert all(now > then for now, then in zip(gpus.run(_fp8_gathers, [()] * 2), before, strict=True))


@pytest.mark.parametrize(
    ("sizes", "layout"), [(QWEN2, TP), (QWEN3, SP), (MOE, ETP1)], ids=["qwen2-tp", "qwen3-sp", "moe-sp-ep"]
)
def test_row_parallel_layers_leave_the_sum_to_us(recipe, tmp_path, emulated, sizes, layout):
    pool = Ranks(2, [install] * 2, _pose_as_gpu_that_sums_in_rank_order)
    try:
        make_check(recipe, tmp_path, emulated, pool)(batch(0), sizes, layout)
        assert all(pool.run(_ordered_sums, [()] * 2))
    finally:
        pool.close()


class Trained(NamedTuple):
    """The metrics of two ranks in two steps, their sent digests before and after, and the tensors of their files."""

    losses: list[list[float | None]]
    norms: list[float]
    sent_before: list[dict[str, str]]
    sent_after: list[dict[str, str]]
    saved: dict[str, dict[str, torch.Tensor]]
    weight_error: dict[str, float]


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        *((QWEN3, ()), (QWEN2, TP), (QWEN3, SP), (QWEN3, PP), (QWEN3, CP)),
        *((MOE, ()), (MOE, SP), (MOE, EP), (MOE, (*SP, "expert_tensor_parallel_size=1")), (MOE, PP)),
    ],
    ids=[
        *("qwen3-dp", "qwen2-tp", "qwen3-sp", "qwen3-pp", "qwen3-cp"),
        *("moe-dp", "moe-sp", "moe-ep", "moe-sp-etp1", "moe-pp"),
    ],
)
def test_fp8_parameters_equal_quantized_weights_at_every_step(recipe, tmp_path, gpus, sizes, layout):
    wide = {"moe_intermediate_size": 256} if sizes is MOE else {}  # whole blocks on each of two ranks
    write_model(tmp_path / "model", seed=3, **sizes, **wide)

    def trained(fp8_param: bool, folder: Path) -> Trained:
        cfg = recipe(
            f"policy.model_name={tmp_path}/model",
            "nemo_fp8rl.flow=fp8_e2e",
            "nemo_fp8rl.align=none",
            f"nemo_fp8rl.fp8_param={fp8_param}",
            "policy.sequence_packing.enabled=true",
            "policy.megatron_cfg.optimizer.lr=1e-3",
            "policy.megatron_cfg.optimizer.clip_grad=1e6",  # parameters' order decides the last bit of the norm
            "cluster.backend=ray",
            "cluster.train_ranks=2",
            *(f"policy.megatron_cfg.{key}" for key in layout),
        )
        parts = split_shards(batch(0), cfg.data_parallel_size)
        arguments = [(parts[info.shard],) for info in gpus.setup(cfg)]
        kernels = {"Transformer Engine, weights held in FP8" if fp8_param else "Transformer Engine"}
        assert [rank.kernels for rank in gpus.call("describe")] == [kernels, kernels]
        before = gpus.run(_sent, [()] * 2)
        steps = [gpus.run(_step, arguments) for _ in range(2)]
        norms = [norm for answers in steps for _, norm in answers]
        losses = [[loss for loss, _ in answers] for answers in steps]
        assert losses[1] != losses[0]
        gpus.call("save", str(folder))
        saved = {path.name: load_file(path) for path in sorted(folder.rglob("*.safetensors"))}
        error = weight_error(gpus.call("weight_squares"))
        return Trained(losses, norms, before, gpus.run(_sent, [()] * 2), saved, error)

    plain, fp8_only = trained(False, tmp_path / "plain"), trained(True, tmp_path / "held")
    assert (fp8_only.losses, fp8_only.sent_before, fp8_only.sent_after) == (
        plain.losses,
        plain.sent_before,
        plain.sent_after,
    )
    assert plain.sent_before != plain.sent_after
    assert fp8_only.norms == pytest.approx(plain.norms, rel=1e-6)
    assert fp8_only.weight_error == pytest.approx(plain.weight_error, rel=1e-6)
    assert {"weight_error/fp8", "weight_error/bf16", "weight_error/layer_1"} <= fp8_only.weight_error.keys()
    assert fp8_only.saved.keys() == plain.saved.keys()
    for file, tensors in plain.saved.items():
        assert fp8_only.saved[file].keys() == tensors.keys()
        assert all(torch.equal(tensor, fp8_only.saved[file][name]) for name, tensor in tensors.items())


def _sent() -> dict[str, str]:
    """Return, for the rank of this process, a digest of each weight as it is sent."""
    worker, digests = ranks.worker, {}
    for name, part in worker.weights().for_refit():
        sent = part
        if worker.engine_fp8_layers.quantizes(name) and not isinstance(part, BlockScaled):
            sent = quantize_blockwise(part)
        digests[name] = digest_of(*((sent.data, sent.scale_inv) if isinstance(sent, BlockScaled) else (sent,)))
    return digests


def _step(part: RolloutBatch) -> tuple[float | None, float]:
    """Return the loss (None before the last stage) and the gradient norm."""
    metrics = ranks.worker.train_step(part, NllLoss(), loss_totals(4.0, 90.0))
    return metrics.get("loss"), metrics["grad_norm"]


@pytest.mark.parametrize(
    "layout", [EP, SP, CP, (*PP, "activation_checkpointing=true")], ids=["ep", "sp", "cp", "pp-recomputed"]
)
def test_routers_of_two_ranks_replay_alike(assert_alike, layout):
    assert_alike(replace(batch(0), routed_experts=random_routes(4, 4, 33)), MOE, layout)
