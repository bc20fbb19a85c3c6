"""Two trainer ranks by the shared operations have the sums of a tensor-parallel engine, also with sequence parallelism.

An engine's ranks each round their product to bfloat16, and then two numbers are added with one rounding. One rank that
multiplies halves of each row-parallel matrix does the same.
"""

from unittest import mock

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.ops import alignment
from nemo_fp8rl.policy.layers.shared_ops import dense_layers
from nemo_fp8rl.policy.worker import MegatronWorker
from tests.conftest import RECIPES, SMALL
from tests.gpu_engine.test_aligned_trainer import make_batch
from tests.policy.ranks import Ranks

HALVES = ("policy.generation.vllm_cfg.tensor_parallel_size=2", "policy.megatron_cfg.tensor_model_parallel_size=2")
TWO_RANKS = ("cluster.backend=ray", "cluster.train_ranks=2")


def interpret_kernels() -> None:
    """In a rank's process, before it imports kernels."""
    from tests.interpreted_triton import interpret

    interpret()
    alignment.has_gpu = lambda: True


@pytest.fixture(scope="module")
def ranks():
    pool = Ranks(2, [interpret_kernels] * 2)
    yield pool
    pool.close()


def in_halves(matmul):
    def multiply(layer, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        parts = zip(x.chunk(2, -1), weight.chunk(2, -1), strict=True)
        left, right = (matmul(layer, part, of_weight, None, out_dtype) for part, of_weight in parts)
        return left + right

    return multiply


@pytest.mark.parametrize("flow", ["fp8_e2e", pytest.param("bf16", marks=pytest.mark.long)])
def test_two_ranks_have_the_bits_of_a_tensor_parallel_engine(ranks, tmp_path, flow):
    make_tiny(tmp_path / "tiny", "add", 0, "qwen3", hidden_size=256, num_attention_heads=4, num_key_value_heads=2)
    paths = (f"policy.model_name={tmp_path}/tiny/model", f"data.train.data_path={tmp_path}/tiny/data.jsonl")
    base = [*SMALL, *paths, f"nemo_fp8rl.flow={flow}", "nemo_fp8rl.align=vllm"]
    batch = make_batch()
    inside = torch.arange(batch.input_ids.size(1)) < batch.input_lengths[:, None]
    with mock.patch.object(alignment, "has_gpu", lambda: True):
        worker = MegatronWorker()
        worker.setup(load(RECIPES / "tiny_cpu.yaml", base), 0, 1, None)
        alone = worker.logprobs(batch)[inside]
        plain, fp8 = dense_layers.linears()[1], dense_layers.fp8_linears("pow2")[1]
        with (
            mock.patch.object(plain, "matmul", in_halves(plain.matmul)),
            mock.patch.object(fp8, "matmul", in_halves(fp8.matmul)),
        ):
            expected = worker.logprobs(batch)[inside]
        worker.shutdown()
    assert not torch.equal(alone, expected)  # one rank rounds once
    for sequence_parallel in ("false", "true"):
        keys = (*HALVES, f"policy.megatron_cfg.sequence_parallel={sequence_parallel}")
        ranks.setup(load(RECIPES / "tiny_cpu.yaml", [*base, *TWO_RANKS, *keys]))
        for of_rank in ranks.call("logprobs", batch):
            assert torch.equal(of_rank[inside], expected), sequence_parallel
