"""Gradients that several ranks sum, against their rule in plain torch. Processes on gloo."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed.reduce_scatter_with_fp32_accumulation import reduce_scatter_with_fp32_accumulation
from torch import Tensor

from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.batch import RolloutBatch, split_shards
from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.fp8.block_scaled import ALONG_LAST
from nemo_fp8rl.fp8.quantize import quantize_blockwise
from nemo_fp8rl.policy.interface import DivergenceError
from nemo_fp8rl.policy.on_cpu.megatron_on_cpu import megatron_on_cpu
from nemo_fp8rl.policy.optimizer import grad_reduce
from nemo_fp8rl.policy.optimizer.grad_reduce import ParameterBlocks
from tests.batches import loss_totals
from tests.policy import ranks
from tests.policy.test_worker import new_worker, random_batch, train

FP8 = "nemo_fp8rl.grad_reduce=fp8"
DDP = "policy.megatron_cfg.distributed_data_parallel_config"
BF16 = f"{DDP}.grad_reduce_in_fp32=false"
FLOAT32_SUM = (BF16, f"{DDP}.reduce_scatter_with_fp32_accumulation=true")
EXPERTS = {"family": "qwen3_moe"}
ODD = {"vocab_size": 97, "hidden_size": 192, "num_attention_heads": 2, "head_dim": 48, "intermediate_size": 136}
"""Sizes with which parameters begin in the middle of 128 values of a bucket."""


@dataclass
class Bucket:
    """A bucket of gradients on one rank: before the sum, this rank's shard after it, and what is where.

    members:     the ranks that sum it
    parameters:  (first value, end) of each, in the bucket, by name
    """

    before: Tensor
    shard: Tensor
    members: list[int]
    parameters: dict[str, tuple[int, int]]


def recipe_for(recipe, tmp_path, count, *keys, **sizes):
    write_model(tmp_path / "model", seed=1, **sizes)
    size = f"cluster.train_ranks={count}"
    base = ("nemo_fp8rl.flow=bf16", "cluster.backend=ray", size, "policy.train_micro_batch_size=4")
    return recipe(f"policy.model_name={tmp_path}/model", *base, *keys)


def sums(pool, cfg, piece_values: int = grad_reduce.PIECE_VALUES, infinity: bool = False):
    """Return the buckets of each rank after a backward pass and the sum, and the bytes that it sent."""
    infos, batch = pool.setup(cfg), random_batch(3)
    parts = split_shards(batch, cfg.data_parallel_size)
    arguments = [(parts[info.shard], piece_values, infinity and i == 1) for i, info in enumerate(infos)]
    return zip(*pool.run(_sum, arguments), strict=True)


def _sum(part: RolloutBatch, piece_values: int, infinity: bool) -> tuple[list[Bucket], int]:
    ddp, buckets = ranks.worker.ddp, []
    grad_reduce.PIECE_VALUES = piece_values

    def compute_loss(values, _, rows):
        return NllLoss()(values.logprobs, rows, loss_totals(8.0, 40.0), values.unfiltered)

    with megatron_on_cpu():
        ddp.zero_grad_buffer()
        ranks.worker.pipeline.run(part, compute_loss, training=True)
        buffers = [*ddp.buffers, *ddp.expert_parallel_buffers]
        pairs = [(buffer, bucket) for buffer in buffers for bucket in buffer.buckets]
        if infinity:
            pairs[0][1].grad_data[0] = math.inf
        before = [bucket.grad_data.cpu().clone() for _, bucket in pairs]
        ddp.finish_grad_sync()
    names = {parameter: name for name, parameter in ranks.worker.model.named_parameters()}
    for values, (buffer, bucket) in zip(before, pairs, strict=True):
        members = dist.get_process_group_ranks(buffer.data_parallel_group)
        places = {names[p]: buffer.param_index_map[p] for p in bucket.params_list}
        spans = {name: (start - bucket.offset, end - bucket.offset) for name, (start, end, _) in places.items()}
        shard = bucket.grad_data.chunk(len(members))[members.index(dist.get_rank())].cpu().clone()
        buckets.append(Bucket(values, shard, members, spans))
    return buckets, ddp.sent_bytes


def rounded(values: Tensor, parameters: dict[str, tuple[int, int]]) -> Tensor:
    """Return gradients of a bucket as FP8 holds them, float32: blocks of 128 values from each parameter's start."""
    out = torch.zeros(len(values))
    for start, end in parameters.values():
        padded = torch.nn.functional.pad(values[start:end], (0, -(end - start) % 128)).view(-1, 128)
        blocks = quantize_blockwise(padded, block=ALONG_LAST, kernel="reference")
        out[start:end] = blocks.dequantize().view(-1)[: end - start]
    return out


def decibels(signal: Tensor, value: Tensor) -> float:
    return float(10 * torch.log10(signal.pow(2).sum() / (signal - value).pow(2).sum()))


def follows_the_rule(by_rank, sent, dtype: torch.dtype) -> None:
    """The shards of all ranks equal the rule to the bit, are near the exact sum, and cost a quarter of its bytes."""
    for rank, buckets in enumerate(by_rank):
        float32_bytes = 0
        for number, bucket in enumerate(buckets):
            parts = [by_rank[member][number] for member in bucket.members]
            expected = torch.zeros(len(bucket.before))
            for part in parts:
                expected += rounded(part.before, part.parameters)
            place = bucket.members.index(rank)
            assert torch.equal(bucket.shard, expected.to(dtype).chunk(len(parts))[place])
            exact = sum(part.before.double() for part in parts)
            assert decibels(exact, expected.double()) > 30
            float32_bytes += 4 * (len(exact) - len(bucket.shard))
        assert 0.25 < sent[rank] / float32_bytes < 0.26


@pytest.mark.parametrize("keys", [(), (BF16,)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [{"family": "llama"}, EXPERTS, ODD], ids=["dense", "experts", "odd"])
def test_the_sum_of_two_ranks_in_fp8_follows_the_rule(two, recipe, tmp_path, sizes, keys):
    cfg = recipe_for(recipe, tmp_path, 2, FP8, *keys, **sizes)
    by_rank, sent = sums(two, cfg)
    follows_the_rule(by_rank, sent, torch.bfloat16 if keys else torch.float32)
    again, _ = sums(two, cfg, piece_values=4096)  # in many messages
    for buckets, same in zip(by_rank, again, strict=True):
        assert all(torch.equal(a.shard, b.shard) for a, b in zip(buckets, same, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("layout", ["expert_model_parallel_size=2", "context_parallel_size=2"])
def test_the_sum_of_four_ranks_in_fp8_follows_the_rule(four, recipe, tmp_path, layout):
    cfg = recipe_for(recipe, tmp_path, 4, FP8, f"policy.megatron_cfg.{layout}", **EXPERTS)
    by_rank, sent = sums(four, cfg)
    assert {len(bucket.members) for bucket in by_rank[0]} == ({2, 4} if "expert" in layout else {4})
    follows_the_rule(by_rank, sent, torch.float32)


@pytest.mark.long
def test_tensor_parallel_ranks_get_equal_gradients_of_what_they_share(four, recipe, tmp_path):
    """The vocabulary does not divide, so that a norm lies at another place of the bucket on each of the two."""
    keys = ("policy.megatron_cfg.tensor_model_parallel_size=2", "policy.precision=float32")
    by_rank, _ = sums(four, recipe_for(recipe, tmp_path, 4, FP8, *keys, **ODD))
    gradients = []
    for (bucket,) in by_rank[:2]:
        whole = torch.cat([by_rank[member][0].shard for member in bucket.members])
        shared = {n: span for n, span in bucket.parameters.items() if "norm" in n and "self_attention" not in n}
        gradients.append({name: whole[start:end] for name, (start, end) in shared.items()})
    first, second = gradients
    assert len(first) > 4
    for name, gradient in first.items():
        assert gradient.any()
        assert torch.equal(gradient, second[name]), name


@pytest.mark.parametrize("keys", [(), (BF16,)], ids=["float32", "bfloat16"])
def test_without_a_choice_gradients_are_megatrons_sums(two, recipe, tmp_path, keys):
    by_rank, sent = sums(two, recipe_for(recipe, tmp_path, 2, *keys, **EXPERTS))
    for rank, buckets in enumerate(by_rank):
        for a, b, bucket in zip(*by_rank, buckets, strict=True):
            assert a.before.dtype is (torch.bfloat16 if keys else torch.float32)
            assert torch.equal(bucket.shard, (a.before + b.before).chunk(2)[rank])
        assert sent[rank] == sum(bucket.shard.nbytes for bucket in buckets)


def test_float32_sums_of_bfloat16_gradients_are_megatrons(two, recipe, tmp_path):
    by_rank, sent = sums(two, recipe_for(recipe, tmp_path, 2, *FLOAT32_SUM, **EXPERTS), piece_values=4096)
    expected = two.run(_megatrons_sums, [([bucket.before for bucket in buckets],) for buckets in by_rank])
    for rank, buckets in enumerate(by_rank):
        assert all(torch.equal(b.shard, shard) for b, shard in zip(buckets, expected[rank], strict=True))
        assert sent[rank] == sum(bucket.shard.nbytes for bucket in buckets)


def _megatrons_sums(buckets: list[Tensor]) -> list[Tensor]:
    shards = [torch.empty(len(bucket) // 2, dtype=bucket.dtype) for bucket in buckets]
    for shard, bucket in zip(shards, buckets, strict=True):
        reduce_scatter_with_fp32_accumulation(shard, bucket, dist.ReduceOp.SUM, None, False)
    return shards


@pytest.mark.parametrize("keys", [(FP8,), FLOAT32_SUM], ids=["fp8", "float32-sum"])
def test_one_rank_sends_nothing_and_its_steps_do_not_change(recipe, keys):
    plain = (keys[0],) if keys is FLOAT32_SUM else ()
    steps = []
    for chosen in (plain, keys):
        worker = new_worker(recipe(*chosen))
        metrics = [train(worker, random_batch(n)) for n in range(2)]
        assert metrics[-1]["grad_bytes"] == 0
        steps.append((metrics, dict(worker.weights().for_checkpoint())))
    (expected, weights), (actual, changed) = steps
    assert actual == expected
    assert all(torch.equal(weights[name], changed[name]) for name in weights)


def test_a_step_tells_the_most_bytes_of_a_rank(two, recipe, tmp_path):
    cfg = recipe_for(recipe, tmp_path, 2, FP8)
    infos = two.setup(cfg)
    parts = split_shards(random_batch(3), 2)
    metrics = two.run(_step, [(parts[info.shard],) for info in infos])
    sent = two.run(_sent, [()] * 2)
    assert [m["grad_bytes"] for m in metrics] == [max(sent)] * 2
    assert sent[0] > 0


def _step(part: RolloutBatch) -> dict[str, float]:
    return ranks.worker.train_step(part, NllLoss(), loss_totals(8.0, 40.0))


def _sent() -> int:
    return ranks.worker.ddp.sent_bytes


def test_fp8_does_not_hide_an_infinite_gradient(two, recipe, tmp_path):
    """The value is of rank 1 and in the shard of rank 0, which gets the NaN; both ranks refuse the step."""
    by_rank, _ = sums(two, recipe_for(recipe, tmp_path, 2, FP8), infinity=True)
    assert by_rank[0][0].before.isfinite().all()
    assert by_rank[0][0].shard.isnan().any()
    assert two.run(_is_refused, [(), ()]) == [True, True]


def _is_refused() -> bool:
    from nemo_fp8rl.policy.optimizer.finite_check import overflows

    try:
        overflows({}, ranks.worker.ddp)
    except DivergenceError:
        return True
    return False


@pytest.mark.parametrize("seed", range(5))
def test_blocks_hold_every_value_of_a_bucket_once(seed):
    generator = torch.Generator().manual_seed(seed)
    spans, end = [], 0
    for length in torch.randint(1, 700, (9,), generator=generator).tolist():
        start = end + int(torch.randint(0, 300, (1,), generator=generator))
        end = start + length
        spans.append((start, end))
    blocks = ParameterBlocks.of(iter(spans[::-1]))
    shard = -(-(end + 100) // 4)
    values, inside = torch.arange(1.0, 4 * shard + 1), torch.zeros(4 * shard)
    for start, stop in spans:
        inside[start:stop] = 1
    written = torch.zeros(4, shard)
    for rank in range(4):
        first, stop = blocks.within(rank * shard, (rank + 1) * shard)
        assert stop - first <= shard // 128 + 2 * len(spans) + 1
        blocks.write(blocks.read(values, first, stop), first, written[rank], rank * shard)
    assert torch.equal(written.view(-1), values * inside)
    assert blocks.within(end, end + 10) == (0, 0)
