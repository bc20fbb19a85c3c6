"""Ranks that share a model equal one rank and HF's model. Processes on gloo; float32 unless a test says otherwise."""

from collections.abc import Iterable
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state
from transformers import AutoModelForCausalLM

from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.batch import RolloutBatch, split_shards
from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.common.region import region_slices
from nemo_fp8rl.hf.model_tensors import expected_tensors
from nemo_fp8rl.policy.layers import aligned_experts
from nemo_fp8rl.policy.layers.linears import SingleRounding
from nemo_fp8rl.policy.layers.logprobs import token_logprobs
from nemo_fp8rl.policy.weights.hf_names import to_hf
from tests.batches import loss_totals, rollout_batch
from tests.conftest import HALF_HEADS
from tests.policy import ranks
from tests.policy.ranks import Ranks, logprobs_and_norm
from tests.policy.test_worker import new_worker, train

TP = ("tensor_model_parallel_size=2",)
SP = (*TP, "sequence_parallel=true")
PP = ("pipeline_model_parallel_size=2",)
CP = ("context_parallel_size=2",)
EP = ("expert_model_parallel_size=2",)
ETP2 = ("expert_tensor_parallel_size=2",)
ETP1 = ("expert_tensor_parallel_size=1",)
UNEVEN = (*PP, "num_layers_in_first_pipeline_stage=1")
FROZEN = "freeze_moe_router=true"
QWEN2 = {"family": "qwen2", "num_key_value_heads": 2}
DENSE = [{"family": "llama"}, QWEN2, {"family": "qwen3", "tie_word_embeddings": True}]
MOE = {"family": "qwen3_moe", "vocab_size": 97}  # does not divide: the last rank has fewer
RANKS_OF_TWO = ("cluster.backend=ray", "cluster.train_ranks=2")
DP: tuple[str, ...] = ()
TP4, PP4 = ("tensor_model_parallel_size=4",), ("pipeline_model_parallel_size=4",)
SP4, EP4 = (*TP4, "sequence_parallel=true"), ("expert_model_parallel_size=4",)
HEADS4 = {"num_attention_heads": 4, "num_key_value_heads": 4}
ON_TWO = [
    *((sizes, layout) for sizes in DENSE for layout in (TP, SP, PP, CP)),
    ({**DENSE[0], **HALF_HEADS}, SP),
    (DENSE[2], DP),
    *((MOE, layout) for layout in (SP, PP, CP, EP, (*SP, *ETP1), (*SP, *EP, *ETP1), (*CP, *EP))),
    ({**DENSE[2], "num_hidden_layers": 3}, UNEVEN),
    (MOE, ETP2),
    (MOE, (*SP, FROZEN)),
    (DENSE[1], (*TP, *ETP1)),  # which a dense model does not read
]
ON_FOUR = [
    ({**QWEN2, "tie_word_embeddings": True}, (*SP, *PP)),
    (MOE, (*SP, *EP)),
    (MOE, (*SP, *PP)),
    ({**DENSE[2], "num_attention_heads": 4}, (*SP, *CP)),  # one key-value head for two ranks
    (MOE, (*SP, *CP, "activation_checkpointing=true")),
    ({**MOE, "num_hidden_layers": 3}, (*UNEVEN, *EP)),
    ({**DENSE[2], "num_hidden_layers": 4}, PP4),  # with two stages that have neither embedding nor head
    (MOE, EP4),
]
ON_FOUR_LONG = [
    (MOE, (*PP, *EP)),
    (MOE, (*SP, *EP, *ETP1)),
    (DENSE[2], (*PP, *CP)),
    (MOE, (*SP, *ETP1)),
    (MOE, (*EP, *ETP2)),
    ({**QWEN2, **HEADS4, "tie_word_embeddings": True}, TP4),
    (MOE, (*CP, *EP)),
    ({**DENSE[0], **HEADS4, "vocab_size": 97}, SP4),
    ({**DENSE[0], "num_attention_heads": 8}, ("context_parallel_size=4",)),  # two key-value heads for four ranks
    (DENSE[2], DP),
    ({**QWEN2, "num_hidden_layers": 7}, (*PP4, "num_layers_in_first_pipeline_stage=1")),
    ({**MOE, "num_hidden_layers": 4}, PP4),
    ({**MOE, **HEADS4}, SP4),
    ({**MOE, **HEADS4}, (*SP4, *EP4, *ETP1)),
    ({**MOE, **HEADS4}, (*SP4, *EP, *ETP2)),
]


def name(value: object) -> str:
    if isinstance(value, dict):
        return "-".join(str(v) for v in value.values())
    short = {"tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp", "sequence_parallel": "sp"}
    short |= {"expert_model_parallel_size": "ep", "expert_tensor_parallel_size": "etp"}
    short |= {"freeze_moe_router": "frozen", "context_parallel_size": "cp", "activation_checkpointing": "again"}
    short |= {"num_layers_in_first_pipeline_stage": "first"}
    keys = (part.split("=") for part in value) if isinstance(value, tuple) else ()
    return "".join(f"{short[key]}{size}" for key, size in keys) or ("dp" if value == DP else str(value))


@pytest.mark.parametrize("align", ["vllm", pytest.param("none", marks=pytest.mark.long)])
@pytest.mark.parametrize(("sizes", "layout"), ON_TWO, ids=name)
def test_two_ranks_equal_hf(two, recipe, tmp_path, sizes, layout, align):
    equal_hf(two, recipe, tmp_path, sizes, layout, align)


@pytest.mark.parametrize(
    ("sizes", "layout"), ON_FOUR + [pytest.param(*case, marks=pytest.mark.long) for case in ON_FOUR_LONG], ids=name
)
def test_four_ranks_equal_hf(four, recipe, tmp_path, sizes, layout):
    equal_hf(four, recipe, tmp_path, sizes, layout, "vllm")


@pytest.mark.parametrize("layout", [SP, PP, EP], ids=name)
def test_reference_logprobs_of_two_ranks_stay_those_of_the_start(two, recipe, tmp_path, layout):
    write_model(tmp_path / "model", **MOE)
    choices = ("loss_fn.reference_policy_kl_penalty=0.1", "policy.train_micro_batch_size=4")
    keys = (f"policy.megatron_cfg.{key}" for key in (*layout, "optimizer.lr=0.01"))
    cfg = recipe(f"policy.model_name={tmp_path}/model", *RANKS_OF_TWO, "nemo_fp8rl.flow=bf16", *choices, *keys)
    batch, tokens = random_batch(), 100.0
    infos = two.setup(cfg)
    parts = split_shards(batch, cfg.data_parallel_size)
    results = two.run(_reference_and_moved, [(parts[info.shard], tokens) for info in infos])
    for info, (start, reference, moved) in zip(infos, results, strict=True):
        if info.is_reporter:
            assert torch.equal(reference, start)
            assert not torch.equal(moved, start)


def _reference_and_moved(part: RolloutBatch, tokens: float):
    start = ranks.worker.logprobs(part)
    for _ in range(2):
        ranks.worker.train_step(part, NllLoss(), loss_totals(len(part.input_ids), tokens))
    return start, ranks.worker.reference_logprobs(part), ranks.worker.logprobs(part)


@pytest.mark.parametrize("keys", [("top_k=5",), ("top_k=40", "top_p=0.7")], ids=["k", "k-p"])
def test_two_ranks_select_the_tokens_that_one_rank_selects(two, recipe, tmp_path, keys):
    """Each rank has about half of the vocabulary, and the selection of tokens is over all of it."""
    write_model(tmp_path / "model", seed=3, vocab_size=97)
    base = (f"policy.model_name={tmp_path}/model", "policy.precision=float32", "nemo_fp8rl.flow=bf16")
    base = (*base, "policy.train_micro_batch_size=8", "policy.train_global_batch_size=8")
    limits = [f"policy.generation.{key}" for key in keys]
    batch, whole, single_rank = random_batch(), new_worker(recipe(*base)), new_worker(recipe(*base, *limits))
    expected, metrics = single_rank.logprobs(batch), train(single_rank, batch)
    assert (expected - whole.logprobs(batch)).abs().max() > 0.1  # the token_filter says something
    split = ("cluster.backend=ray", "cluster.train_ranks=2", *(f"policy.megatron_cfg.{key}" for key in TP))
    actual, norm_of_two = logprobs_and_norm(two, recipe(*base, *limits, *split), batch)
    inside = torch.arange(22) < batch.input_lengths[:, None]
    torch.testing.assert_close(actual[inside], expected[inside], rtol=1e-5, atol=1e-5)
    assert norm_of_two == pytest.approx(metrics["grad_norm"], rel=1e-5)


def test_the_softmax_of_an_aligned_rank_is_one_ranks_to_the_bit(two, recipe, tmp_path):
    """The logits are equal. Without `whole` a rank first sums over its own tokens, and last bits differ."""
    write_model(tmp_path / "model", **DENSE[2])
    two.setup(recipe(f"policy.model_name={tmp_path}/model", *RANKS_OF_TWO, f"policy.megatron_cfg.{TP[0]}"))
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator).bfloat16() for n in (100, 998))
    targets = torch.randint(998, (100,), generator=generator)
    expected, gradient = _logprobs_of(hidden, weight, targets)
    for whole in (True, False):
        results = two.run(_logprobs_of_part, [(hidden, weight, targets, whole)] * 2)
        assert all(torch.equal(logprobs, expected) for logprobs, _ in results) == whole
        torch.testing.assert_close(results[0][1] + results[1][1], gradient, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("flow", ["bf16", "fp8_e2e"])
def test_partial_products_are_summed_before_they_are_rounded(two, recipe, tmp_path, flow):
    """Log-probs equal one rank's, except for the order of sums; with Megatron's rounding first, hardly any is equal."""
    write_model(tmp_path / "model", seed=3, **DENSE[0])
    base = (f"policy.model_name={tmp_path}/model", f"nemo_fp8rl.flow={flow}", "nemo_fp8rl.align=vllm")
    batch = random_batch()
    inside = torch.arange(22) < batch.input_lengths[:, None]
    expected = new_worker(recipe(*base)).logprobs(batch)[inside]
    two.setup(recipe(*base, *RANKS_OF_TWO, f"policy.megatron_cfg.{TP[0]}"))
    equal = []
    for rounds_parts in (False, True):
        actual = two.run(_logprobs_with, [(batch, rounds_parts)] * 2)[0][inside]
        equal.append(float((actual == expected).float().mean()))
        error = float((actual - expected).abs().exp().mean())
        print(f"{flow}, parts rounded {'first' if rounds_parts else 'as a sum'}: {equal[-1]:.1%} equal, {error:.6f}")
    assert equal[0] > 0.5 > equal[1]


@pytest.mark.long
@pytest.mark.parametrize("flow", ["fp8_e2e", "bf16"])
def test_split_experts_equal_those_of_one_rank(two, recipe, tmp_path, flow):
    """An expert's output is rounded before it is weighed, also where ranks have a part of it each; in bfloat16 as vLLM
    before 0.28 does.
    """
    write_model(tmp_path / "model", seed=3, family="qwen3_moe", moe_intermediate_size=256)  # whole blocks on each rank
    base = (f"policy.model_name={tmp_path}/model", f"nemo_fp8rl.flow={flow}", "nemo_fp8rl.align=vllm")
    batch = random_batch()
    inside = torch.arange(22) < batch.input_lengths[:, None]
    expected = _logprobs_of_dense_mlps(new_worker(recipe(*base)), batch)[inside]
    two.setup(recipe(*base, *RANKS_OF_TWO, *(f"policy.megatron_cfg.{key}" for key in SP)))
    actual = two.run(_ranks_logprobs_of_dense_mlps, [(batch,)] * 2)[0][inside]
    assert (actual == expected).float().mean() > 0.9


def _ranks_logprobs_of_dense_mlps(batch) -> torch.Tensor:
    return _logprobs_of_dense_mlps(ranks.worker, batch)


def _logprobs_of_dense_mlps(worker, batch) -> torch.Tensor:
    with mock.patch.object(aligned_experts, "experts_are_dense_mlps", lambda: True):
        return worker.logprobs(batch)


def _logprobs_with(batch, rounds_parts) -> torch.Tensor:
    is_part = SingleRounding.is_part
    try:
        if rounds_parts:
            SingleRounding.is_part = False
        return ranks.worker.logprobs(batch)
    finally:
        SingleRounding.is_part = is_part


def _logprobs_of(hidden, weight, targets, *options, **keywords) -> tuple[torch.Tensor, torch.Tensor]:
    hidden.requires_grad_()
    logprobs = token_logprobs(hidden, weight, targets, 0.7, 32, *options, **keywords)
    (gradient,) = torch.autograd.grad(logprobs.sum(), hidden)
    return logprobs.detach(), gradient


def _logprobs_of_part(hidden, weight, targets, whole) -> tuple[torch.Tensor, torch.Tensor]:
    group = parallel_state.get_tensor_model_parallel_group()
    first = group.rank() * len(weight) // 2
    return _logprobs_of(hidden, weight[first : first + len(weight) // 2], targets, first, group, whole=whole)


def equal_hf(pool: Ranks, recipe, tmp_path, sizes, layout, align) -> None:
    write_model(tmp_path / "model", seed=3, **sizes)
    cfg = recipe(
        f"policy.model_name={tmp_path}/model",
        "policy.precision=float32",
        "nemo_fp8rl.flow=bf16",
        f"nemo_fp8rl.align={align}",
        "cluster.backend=ray",
        f"cluster.train_ranks={pool.count}",
        "policy.train_micro_batch_size=2",
        "policy.train_global_batch_size=8",
        "policy.megatron_cfg.optimizer.clip_grad=1.0e9",
        *(f"policy.megatron_cfg.{key}" for key in layout),
    )
    batch = random_batch()
    infos = pool.setup(cfg)
    parts = split_shards(batch, cfg.data_parallel_size)
    results = pool.run(logits_and_gradients, [(parts[info.shard],) for info in infos])

    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    for n, p in hf.named_parameters():
        p.requires_grad = FROZEN not in layout or not n.endswith("mlp.gate.weight")
    trained = {n: p for n, p in hf.named_parameters() if p.requires_grad}
    hf_logits = hf(batch.input_ids[:, :-1]).logits
    weighted_logprobs(hf_logits.log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1), batch).backward()
    longest = [int(lengths.max()) - 1 for lengths in batch.input_lengths.split(2)]
    rows = iter(zip(longest, hf_logits.split(2), strict=True))  # microbatches
    by_shard: dict[int, dict[int, list]] = {}
    for info, result in zip(infos, results, strict=True):
        if result["logits"]:
            by_shard.setdefault(info.shard, {}).setdefault(result["tokens"], []).append(result["logits"])
    for _, of_tokens in sorted(by_shard.items()):
        whole = [[torch.cat(parts, -1) for parts in zip(*of_tokens[part], strict=True)] for part in sorted(of_tokens)]
        for parts in zip(*whole, strict=True):
            length, expected = next(rows)
            logits = torch.cat(parts, 1)
            assert (logits[:, :length] - expected[:, :length]).abs().max() < 1e-5
    assert next(rows, None) is None
    expected_norm = norm(p.grad for p in trained.values())
    for result in results:
        assert result["grad_norm"] == pytest.approx(expected_norm, rel=1e-5)
    if cfg.data_parallel_size == cfg.policy.megatron_cfg.context_parallel_size == 1:  # else cut among copies
        gradients = {n: p.grad for n, p in trained.items()}
        covered = set()
        for result in results:
            for n, (region, gradient) in result["gradients"].items():
                if n in gradients:  # transformers stacks experts
                    expected = gradients[n][region_slices(region)]
                    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6 * norm([expected]))
                    covered.add(n)
        assert covered == {n for n in gradients if ".experts." not in n}


def random_batch() -> RolloutBatch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 60, (8, 22), generator=generator)  # HF has no gradient for the padding token, 0
    lengths = torch.tensor([22, 20, 15, 9, 22, 22, 12, 22])
    mask = (torch.arange(22) < lengths[:, None]).float()
    return rollout_batch(ids, lengths, mask)


def weighted_logprobs(logprobs: torch.Tensor, batch: RolloutBatch) -> torch.Tensor:
    weights = torch.linspace(-1, 1, logprobs.size(1)) * batch.token_mask[:, 1:]
    return (logprobs * weights).sum() / 100


def weighted_loss(logprobs, batch, *_):
    full = torch.linspace(-1, 1, 21, device=logprobs.device)[: logprobs.size(1)] * batch.token_mask[:, 1:]
    loss = (logprobs * full).sum() / 100
    return loss, {"loss": float(loss)}


def norm(tensors: Iterable[torch.Tensor]) -> float:
    return sum(t.double().square().sum() for t in tensors).sqrt().item()


def logits_and_gradients(part: RolloutBatch) -> dict:
    """Take one step on a rank: logits of its part of the vocabulary by microbatch, gradients by HF name, their norm."""
    worker, layout = ranks.worker, ranks.worker.layout
    logits = []

    def keep(_module, _inputs, output):
        if layout.is_last_stage:
            logits.append((output.to(worker.model.head.dtype) @ worker.model.head.t()).detach().cpu())

    hook = worker.ddp.register_forward_hook(keep)
    metrics = worker.train_step(part, weighted_loss, loss_totals(1.0, 1.0))
    hook.remove()
    shapes = expected_tensors(layout.hf)
    grads = {n: p.main_grad if p.requires_grad else p for n, p in worker.model.named_parameters()}
    gradients = {n: (layout.region(n, shapes[n]), g.clone().cpu()) for n, g in to_hf(layout, grads.__getitem__)}
    return {"logits": logits, "tokens": layout.context.rank, "gradients": gradients, "grad_norm": metrics["grad_norm"]}
