"""Ranks have every weight once in any layout; an impossible layout is refused with key and dimension."""

import dataclasses
import itertools

import pytest
import torch

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.region import region_slices, shape_of
from nemo_fp8rl.hf.model_config import FAMILIES, HfConfig
from nemo_fp8rl.hf.model_tensors import expected_tensors
from nemo_fp8rl.policy.weights.hf_names import from_hf, to_hf
from nemo_fp8rl.policy.weights.layout import Axis, Layout, check_layout

DENSE = HfConfig(
    family=FAMILIES["qwen2"],
    vocab_size=50,
    hidden_size=6,
    intermediate_size=8,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=2,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    rope_type="default",
    tie_word_embeddings=False,
    max_position_embeddings=64,
    eos_token_ids=(1,),
)
MOE = dataclasses.replace(DENSE, family=FAMILIES["qwen3_moe"], num_experts=8, num_experts_per_tok=2)
TIED = dataclasses.replace(DENSE, tie_word_embeddings=True)


def layouts(
    hf: HfConfig, tp: int, pp: int, dp: int, ep: int = 1, etp: int | None = None, cp: int = 1, first: int | None = None
) -> list[Layout]:
    """Return the layouts of all ranks in Megatron's order: tensor fastest, then context, data, pipeline last."""
    etp = tp if etp is None else etp
    ranks = []
    for stage, rank in itertools.product(range(pp), range(tp * cp * dp)):
        ranks.append(
            Layout(
                hf,
                tensor=Axis(rank % tp, tp),
                context=Axis(rank // tp % cp, cp),
                data=Axis(rank // tp // cp, dp),
                pipeline=Axis(stage, pp),
                expert_tensor=Axis(rank % etp, etp),
                expert=Axis(rank // etp % ep, ep),
                expert_data=Axis(rank // etp // ep, tp * cp * dp // etp // ep),
                first_stage_layers=first,
            )
        )
    return ranks


CASES = [
    (DENSE, layouts(DENSE, 1, 1, 3)),
    (DENSE, layouts(DENSE, 4, 1, 1)),
    (DENSE, layouts(DENSE, 2, 4, 2)),
    (TIED, layouts(TIED, 2, 2, 2)),
    (MOE, layouts(MOE, 1, 1, 4, ep=4)),
    (MOE, layouts(MOE, 2, 2, 2, ep=2)),
    (MOE, layouts(MOE, 2, 2, 2, ep=4, etp=1)),
    (MOE, layouts(MOE, 4, 1, 2, ep=4, etp=2)),
    (DENSE, layouts(DENSE, 2, 1, 2, cp=2)),
    (MOE, layouts(MOE, 1, 2, 2, ep=4, cp=2)),
    (MOE, layouts(MOE, 1, 3, 1, first=2)),
]


@pytest.mark.parametrize(("hf", "ranks"), CASES)
def test_every_weight_is_exported_once_and_survives_a_round_trip(hf, ranks):
    generator = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(shape, generator=generator) for n, shape in expected_tensors(hf).items()}
    counts = {n: torch.zeros(shape) for n, shape in expected_tensors(hf).items()}
    for layout in ranks:

        def part(name: str, layout: Layout = layout) -> torch.Tensor:
            region = layout.region(name, tensors[name].shape)
            return tensors[name][region_slices(region)]

        parameters = dict(from_hf(layout, part))
        for name, tensor in to_hf(layout, parameters.__getitem__):
            region = layout.region(name, tensors[name].shape)
            assert tensor.shape == shape_of(region)
            assert torch.equal(tensor, part(name))
            if layout.is_writer(name):
                counts[name][region_slices(region)] += 1
    assert all((count == 1).all() for count in counts.values())


def test_the_last_stage_of_a_tied_model_exports_no_embedding():
    first, last = layouts(TIED, 1, 2, 1)
    tensors = {n: torch.randn(shape) for n, shape in expected_tensors(TIED).items()}
    head = dict(from_hf(last, tensors.__getitem__))["output_layer.weight"]
    assert torch.equal(head, tensors["model.embed_tokens.weight"])
    parameters = dict(from_hf(last, tensors.__getitem__))
    assert "model.embed_tokens.weight" not in dict(to_hf(last, parameters.__getitem__))
    assert "output_layer.weight" not in dict(from_hf(first, tensors.__getitem__))


def test_vocabulary_padding_is_zero_and_is_not_exported():
    hf = dataclasses.replace(DENSE, vocab_size=51)
    ranks = layouts(hf, 4, 1, 1)
    assert [len(layout.vocabulary) for layout in ranks] == [13, 13, 13, 12]
    tensors = {n: torch.ones(shape) for n, shape in expected_tensors(hf).items()}

    def part(name: str) -> torch.Tensor:
        region = ranks[3].region(name, tensors[name].shape)
        return tensors[name][region_slices(region)]

    parameters = dict(from_hf(ranks[3], part))
    for megatron, hf_name in (("embedding.word_embeddings", "model.embed_tokens"), ("output_layer", "lm_head")):
        rows = parameters[megatron + ".weight"]
        assert rows.shape == (13, 6)
        assert (rows[:12] == 1).all()
        assert (rows[12] == 0).all()
        assert dict(to_hf(ranks[3], parameters.__getitem__))[hf_name + ".weight"].shape == (12, 6)


def test_experts_span_replicas_where_megatron_groups_them_so():
    """With four ranks per replica and three per expert, ranks 3, 4 and 5 share experts, with rows of two replicas."""
    sizes = [(tp, cp, ep, etp) for tp in (1, 2, 4) for cp in (1, 2) for ep in (1, 2, 4) for etp in (1, 2, 3, 4)]
    combinations = set()
    for tp, cp, ep, etp in sizes:
        ranks = layouts(MOE, tp, 1, ep * etp, ep=ep, etp=etp, cp=cp)
        replicas: dict[int, set[int]] = {}
        for layout in ranks:
            replicas.setdefault(layout.expert_data.rank, set()).add(layout.data.rank)
        spans = any(len(of_group) > 1 for of_group in replicas.values())
        assert {layout.experts_span_replicas for layout in ranks} == {spans}
        combinations.add((spans, etp > tp, ep > 1))
    assert combinations >= {(True, False, False), (False, False, True), (True, True, False), (False, False, False)}


WIDE = dataclasses.replace(DENSE, head_dim=128, intermediate_size=1536)
REFUSED = [
    (WIDE, ("tensor_model_parallel_size=3",), "size=3 .*num_attention_heads=8 of self_attn.q_proj;.*fit: 1, 2, 4$"),
    (WIDE, ("tensor_model_parallel_size=8",), "size=8 .*num_key_value_heads=4 of self_attn.k_proj;.*fit: 1, 2, 4$"),
    (DENSE, ("pipeline_model_parallel_size=3",), "pipeline_model_parallel_size=3.*num_hidden_layers=4.*fit: 1, 2, 4$"),
    (DENSE, ("context_parallel_size=3",), "context_parallel_size=3.* 8 .* 4 .*self_attn.*fit: 1, 2, 4, 8$"),
    (
        WIDE,
        ("tensor_model_parallel_size=4", "context_parallel_size=4"),
        "context_parallel_size=4.* 2 attention heads and 1 key-value heads of self_attn on a .*rank; .*fit: 1, 2$",
    ),
    (
        DENSE,
        ("pipeline_model_parallel_size=3", "num_layers_in_last_pipeline_stage=1"),
        r"num_layers_in_last_pipeline_stage=1 leaves 3 of .*num_hidden_layers=4 to the other 2 of .*_parallel_size=3",
    ),
    (
        DENSE,
        (
            "pipeline_model_parallel_size=2",
            "num_layers_in_first_pipeline_stage=1",
            "num_layers_in_last_pipeline_stage=2",
        ),
        r"first_pipeline_stage=1 and .*last_pipeline_stage=2 leave 1 of .*num_hidden_layers=4 to the other 0 of ",
    ),
    (DENSE, ("num_layers_in_first_pipeline_stage=4",), "num_layers_in_first_pipeline_stage=4 needs .*size above 1"),
    (MOE, ("expert_model_parallel_size=3",), "expert_.*_size=3.*num_experts=8 of mlp.experts; .*fit: 1, 2, 4, 8$"),
    (DENSE, ("expert_model_parallel_size=2",), "expert_model_parallel_size=2.*no experts; set it to 1"),
    (MOE, ("tensor_model_parallel_size=2",), "needs policy.megatron_cfg.sequence_parallel=true"),
    (
        dataclasses.replace(WIDE, vocab_size=9),
        ("tensor_model_parallel_size=4",),
        "tensor_model_parallel_size=4 leaves a rank without tokens of the model's vocab_size=9; sizes that fit: 1, 2$",
    ),
    (
        dataclasses.replace(DENSE, intermediate_size=384, head_dim=128),
        ("tensor_model_parallel_size=2",),
        "size=2 does .*intermediate_size=384 of mlp.gate_proj in multiples of 128, the size of its blocks; .*fit: 1$",
    ),
    (
        dataclasses.replace(MOE, intermediate_size=768, head_dim=128),
        ("tensor_model_parallel_size=4", "sequence_parallel=true"),
        r"expert_tensor.*=4.*moe_intermediate_size=768 of mlp\.experts\.\*\.gate_proj in .* 128.*fit: 1, 2, 3, 6$",
    ),
]


@pytest.mark.parametrize(("hf", "keys", "message"), REFUSED)
def test_a_split_that_the_model_does_not_allow_is_refused(recipe, hf, keys, message):
    ranks = 1
    for name, size in (key.split("=") for key in keys):
        ranks *= int(size) if name.endswith("parallel_size") else 1
    cfg = recipe(
        "cluster.backend=ray",
        f"cluster.train_ranks={ranks}",
        "policy.train_global_batch_size=24",
        "policy.train_micro_batch_size=1",
        "grpo.num_prompts_per_step=6",
        *(f"policy.megatron_cfg.{key}" for key in keys),
    )
    with pytest.raises(UserError, match=message):
        check_layout(hf, cfg)


def test_a_model_that_cannot_be_quantized_is_not_a_layout_error(recipe):
    check_layout(dataclasses.replace(DENSE, intermediate_size=352, head_dim=128), recipe())


def test_routing_replay_of_a_dense_model_is_refused(recipe):
    with pytest.raises(UserError, match=r"policy\.router_replay\.enabled=true: the model has no experts"):
        check_layout(DENSE, recipe("policy.router_replay.enabled=true", "nemo_fp8rl.flow=bf16"))


@pytest.mark.parametrize(
    ("keys", "ranks", "message"),
    [
        (("tensor_model_parallel_size=2",), 3, "train_ranks=3 is not a multiple of .*tensor_model_parallel_size=2"),
        (("pipeline_model_parallel_size=2",), 1, "train_ranks=1 is not a multiple of .*pipeline_model_parallel_size=2"),
        (("context_parallel_size=2",), 3, "train_ranks=3 is not a multiple of .*context_parallel_size=2"),
        (("sequence_parallel=true",), 2, "sequence_parallel=true needs .*tensor_model_parallel_size above 1"),
        (("tensor_model_parallel_size=0",), 2, "tensor_model_parallel_size=0 must be a finite number above 0"),
    ],
)
def test_ranks_that_do_not_factor_are_refused(recipe, keys, ranks, message):
    overrides = [f"policy.megatron_cfg.{key}" for key in keys]
    with pytest.raises(UserError, match=message):
        recipe("cluster.backend=ray", f"cluster.train_ranks={ranks}", *overrides)


def test_too_few_ranks_for_the_experts_are_refused(recipe):
    two = ("cluster.backend=ray", "cluster.train_ranks=2", "policy.train_micro_batch_size=32")
    cfg = recipe(*two, "policy.megatron_cfg.expert_model_parallel_size=4")
    with pytest.raises(UserError, match=r"train_ranks=2 is not a multiple of .*expert_model_parallel_size=4"):
        check_layout(MOE, cfg)
    cfg = recipe(*two, "nemo_fp8rl.flow=bf16", "policy.megatron_cfg.expert_tensor_parallel_size=4")
    with pytest.raises(UserError, match=r"train_ranks=2 is not a multiple of .*expert_tensor_parallel_size=4"):
        check_layout(MOE, cfg)
    check_layout(DENSE, cfg)


def test_adapters_of_experts_that_ranks_share_are_refused(recipe):
    sizes = ("cluster.backend=ray", "cluster.train_ranks=2", "policy.train_micro_batch_size=32")
    tensor = ("policy.megatron_cfg.tensor_model_parallel_size=2", "policy.megatron_cfg.sequence_parallel=true")
    keys = (*sizes, *tensor, "nemo_fp8rl.flow=bf16", "policy.megatron_cfg.peft.enabled=true")
    with pytest.raises(UserError, match=r"expert_tensor_parallel_size=2 splits experts, .* set it to 1"):
        check_layout(MOE, recipe(*keys))
    check_layout(MOE, recipe(*keys, "policy.megatron_cfg.expert_tensor_parallel_size=1"))
    check_layout(MOE, recipe(*keys, "policy.megatron_cfg.peft.target_modules=[linear_qkv]"))
    check_layout(DENSE, recipe(*keys))


def test_a_batch_is_divided_among_replicas_not_among_ranks(recipe):
    sizes = ("policy.train_global_batch_size=4", "policy.train_micro_batch_size=4")
    tensor = ("cluster.backend=ray", "cluster.train_ranks=2", "policy.megatron_cfg.tensor_model_parallel_size=2")
    assert recipe(*sizes, *tensor).data_parallel_size == 1
    with pytest.raises(UserError, match=r"the 2 replicas of the model on cluster\.train_ranks=4"):
        recipe(*sizes, *tensor, "cluster.train_ranks=4")
