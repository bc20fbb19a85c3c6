"""Ranks on GPUs that share a model, over NCCL, equal HF's model. Everything is float32 unless a test says otherwise."""

import os
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from tests.fake_cuda.rank import FAKE, own_gpu
from tests.policy.optimizer.test_grad_reduce import FP8, follows_the_rule, recipe_for, sums
from tests.policy.ranks import Ranks
from tests.policy.test_parallel import ON_FOUR, ON_TWO, equal_hf, name

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[2, 4])
def gpus(request) -> Iterator[Ranks]:
    if not torch.cuda.is_available() or torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} CUDA GPUs")
    pool = Ranks(request.param, [partial(own_gpu, rank) for rank in range(request.param)])
    yield pool
    pool.close()


def exact(sizes: dict[str, object]) -> None:
    if sizes["family"] == "qwen3_moe" and FAKE not in os.environ:
        pytest.skip("Transformer Engine multiplies experts' float32 in TF32")


@pytest.mark.parametrize("gpus", [2], indirect=True)
@pytest.mark.parametrize(("sizes", "layout"), ON_TWO, ids=name)
def test_two_gpus_equal_hf(gpus, recipe, tmp_path, sizes, layout):
    exact(sizes)
    equal_hf(gpus, recipe, tmp_path, sizes, layout, "none")


@pytest.mark.parametrize("gpus", [2], indirect=True)
@pytest.mark.parametrize("sizes", [{"family": "llama"}, {"family": "qwen3_moe"}], ids=name)
def test_two_gpus_sum_gradients_in_fp8_by_the_rule(gpus, recipe, tmp_path, sizes):
    by_rank, sent = sums(gpus, recipe_for(recipe, tmp_path, 2, FP8, **sizes))
    follows_the_rule(by_rank, sent, torch.float32)


@pytest.mark.parametrize("gpus", [4], indirect=True)
@pytest.mark.parametrize(("sizes", "layout"), ON_FOUR, ids=name)
def test_four_gpus_equal_hf(gpus, recipe, tmp_path, sizes, layout):
    exact(sizes)
    equal_hf(gpus, recipe, tmp_path, sizes, layout, "none")
