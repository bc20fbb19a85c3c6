"""Trainer ranks by the shared operations have the sums of a tensor-parallel engine, also with sequence parallelism.

An engine's ranks each round their product to bfloat16; the products are added in rank order, with one more rounding.
One rank that multiplies the parts of each row-parallel matrix does the same.
"""

from unittest import mock

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.ops import alignment
from nemo_fp8rl.policy.layers.shared_ops import dense_layers
from nemo_fp8rl.policy.rank.worker import MegatronWorker
from tests.batches import loss_totals
from tests.conftest import RECIPES, SMALL
from tests.gpu_engine.test_aligned_trainer import make_batch
from tests.policy.ranks import Ranks


def interpret_kernels() -> None:
    """In a rank's process, before it imports kernels."""
    from tests.interpreted_triton import interpret

    interpret()
    alignment.has_gpu = lambda: True


def in_parts(matmul, count: int):
    """The product of an engine's ranks, each of which rounds its own before one more rounding of the sum."""

    def multiply(layer, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        shares = zip(x.chunk(count, -1), weight.chunk(count, -1), strict=True)
        total, *others = (matmul(layer, part, of_weight, None, out_dtype).float() for part, of_weight in shares)
        for part in others:
            total = total + part
        return total.to(out_dtype)

    return multiply


@pytest.mark.parametrize(
    ("count", "flow"),
    [(4, "fp8_e2e"), *(pytest.param(2, flow, marks=pytest.mark.long) for flow in ("fp8_e2e", "bf16"))],
    ids=["4-fp8_e2e", "2-fp8_e2e", "2-bf16"],
)
def test_ranks_have_the_bits_of_a_tensor_parallel_engine(tmp_path, count, flow):
    make_tiny(tmp_path / "tiny", "add", 0, "qwen3", hidden_size=256, num_attention_heads=4, num_key_value_heads=count)
    paths = (f"policy.model_name={tmp_path}/tiny/model", f"data.train.data_path={tmp_path}/tiny/data.jsonl")
    base = [*SMALL, *paths, f"nemo_fp8rl.flow={flow}", "nemo_fp8rl.align=vllm"]
    batch = make_batch(sequences=2)
    totals = loss_totals(2.0, float(batch.token_mask.sum()))
    inside = torch.arange(batch.input_ids.size(1)) < batch.input_lengths[:, None]
    with mock.patch.object(alignment, "has_gpu", lambda: True):
        worker = MegatronWorker()
        worker.setup(load(RECIPES / "tiny_cpu.yaml", base), 0, 1, None)
        alone = worker.logprobs(batch)[inside]
        plain, fp8 = dense_layers.linears()[1], dense_layers.fp8_linears("pow2", ())[1]
        with (
            mock.patch.object(plain, "matmul", in_parts(plain.matmul, count)),
            mock.patch.object(fp8, "matmul", in_parts(fp8.matmul, count)),
        ):
            expected = worker.logprobs(batch)[inside]
            norm = worker.train_step(batch, NllLoss(), totals)["grad_norm"]
        worker.shutdown()
    assert not torch.equal(alone, expected)  # one rank rounds once
    ranks = Ranks(count, [interpret_kernels] * count)
    try:
        for sequence_parallel in ("false", "true"):
            keys = (
                "cluster.backend=ray",
                f"cluster.train_ranks={count}",
                f"policy.generation.vllm_cfg.tensor_parallel_size={count}",
                f"policy.megatron_cfg.tensor_model_parallel_size={count}",
                f"policy.megatron_cfg.sequence_parallel={sequence_parallel}",
            )
            ranks.setup(load(RECIPES / "tiny_cpu.yaml", [*base, *keys]))
            for of_rank in ranks.call("logprobs", batch):
                assert torch.equal(of_rank[inside], expected), sequence_parallel
            for metrics in ranks.call("train_step", batch, NllLoss(), totals):
                assert metrics["grad_norm"] == pytest.approx(norm, rel=0.02), sequence_parallel
    finally:
        ranks.close()
