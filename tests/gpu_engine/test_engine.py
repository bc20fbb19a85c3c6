"""An engine of the methods for GPUs, as far as a CPU has it: every refit, and what it answers."""

from dataclasses import replace

import pytest
import torch

from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.algorithms.mismatch import mismatch_metrics
from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.policy.rank.worker import MegatronWorker
from nemo_fp8rl.rollout.step_metrics import known_route_share
from tests.batches import loss_totals
from tests.conftest import RECIPES, SMALL
from tests.generation.pair import GREEDY, Pair, outputs
from tests.policy.sent import sent_tensors

CASES = [("qwen3", "pow2"), ("qwen2", "fp32"), ("qwen3_moe", "pow2"), ("qwen2", "bf16")]
SHORT = replace(GREEDY, max_new_tokens=3)


LONG = CASES[1::2]
PARAMETERS = [pytest.param(case, marks=[pytest.mark.long] * (case in LONG), id="-".join(case)) for case in CASES]


@pytest.fixture(scope="module", params=PARAMETERS)
def pair(request, tmp_path_factory):
    family, numerics = request.param
    folder = tmp_path_factory.mktemp(family) / "tiny"
    make_tiny(folder, "add", 0, family)
    paths = (f"policy.model_name={folder}/model", f"data.train.data_path={folder}/data.jsonl")
    fp8 = ("nemo_fp8rl.flow=fp8_e2e", f"nemo_fp8rl.scale_format={numerics}")
    flow = (*(("nemo_fp8rl.flow=bf16",) if numerics == "bf16" else fp8), "nemo_fp8rl.refit.mode=delta")
    replay = [f"policy.router_replay.enabled={str(family == 'qwen3_moe').lower()}"]
    pair = Pair(load(RECIPES / "tiny_cpu.yaml", [*SMALL, *paths, *flow, *replay]))
    pair.prompts = pair.prompts[:3]
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def batch(pair):
    """The engine's own samples, of the first weights."""
    pair.refit()
    return pair.samples()


def test_its_layers_are_vllms_triton_kernels(pair):
    experts = {"fused_moe_kernel (Triton)"} if pair.worker.hf.family.experts else set()
    linears = {"TritonFp8BlockScaledMMKernel"} if pair.cfg.nemo_fp8rl.quantizes_rollout else set()
    assert pair.generation.describe().kernels == {"attention: CPU_ATTN", "CUDA graphs: none", *linears, *experts}


def test_it_samples_by_the_trainers_log_probs(pair, batch):
    logprobs = pair.worker.logprobs(batch)
    error = mismatch_metrics(logprobs, batch.generation_logprobs, batch.token_mask)["token_mult_prob_error"]
    print(f"token_mult_prob_error {error:.6f}")
    # products with fp32 scales are not exact, so their order counts; in a prompt's first tokens for all that follow
    exact = pair.cfg.nemo_fp8rl.scale_format == "pow2" and pair.cfg.nemo_fp8rl.quantizes_rollout
    assert 1 <= error < (1.001 if exact else 1.01)


def test_a_trainer_as_on_a_gpu_is_further_from_its_log_probs(pair, batch):
    """Without alignment, which follows vLLM's kernels for CPUs and is refused there."""
    cfg = replace(pair.cfg, nemo_fp8rl=replace(pair.cfg.nemo_fp8rl, align="none"))
    worker = MegatronWorker()
    worker.setup(cfg, 0, 1, None)
    logprobs = worker.logprobs(batch)
    error = mismatch_metrics(logprobs, batch.generation_logprobs, batch.token_mask)["token_mult_prob_error"]
    print(f"without alignment: token_mult_prob_error {error:.4f}")
    assert 1.001 < error < 1.05


def test_its_experts_come_along_as_vllm_returns_them(pair, batch):
    if not pair.worker.hf.family.experts:
        pytest.skip("no experts")
    assert known_route_share(batch) == {"routes_known": 1.0}
    routes = batch.routed_experts
    assert routes.shape == (*batch.input_ids.shape, 2, 2)
    assert routes.dtype == torch.int16
    assert (routes[..., 0] != routes[..., 1])[routes[..., 0] >= 0].all()


def test_it_is_a_fresh_engine_after_deltas_in_place(pair, batch, tmp_path):
    """To the bit, and every tensor stays where it is, for CUDA graphs hold addresses; vLLM's loaders are not asked."""
    pair.refit()
    store = pair.engine.core.llm.model_executor.driver_worker.worker.weight_store
    assert store.direct_names == store.slots.keys()
    before, held = outputs(pair.generate(SHORT)), addresses(pair)
    for _ in range(2):
        pair.worker.train_step(batch, NllLoss(), loss_totals(12.0, batch.token_mask.sum()))
        report = pair.refit()
    assert report.delta
    assert addresses(pair) == held
    got = outputs(pair.generate(SHORT))
    assert got != before
    fresh = pair.fresh_engine(sent_tensors(pair.worker), tmp_path / "fresh")
    assert got == outputs(pair.generate(SHORT, fresh))


def addresses(pair) -> dict[str, int]:
    (found,) = pair.engine.core.llm.apply_model(lambda model: list(model.named_parameters()))
    return {name: parameter.data_ptr() for name, parameter in found}
