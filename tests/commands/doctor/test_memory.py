"""Bytes, against numbers worked out by hand."""

import pytest

from nemo_fp8rl.commands.doctor.hardware import GPUS
from nemo_fp8rl.commands.doctor.memory.engine_memory import WORKSPACE, engine_weights, kv_bytes_per_token
from nemo_fp8rl.commands.doctor.memory.phases import check_memory, memory_of
from nemo_fp8rl.commands.doctor.memory.trainer_memory import activations, logits, stage_parameters
from tests.commands.doctor.conftest import A16, BF16, ENGINE, MXFP8, NVFP4, TRAINER

H100 = GPUS["h100"]
LLAMA, MIXTURE, LATENT = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B", "moonshotai/Moonlight-16B-A3B"
LLAMA_PARAMETERS = 8_030_261_248
LLAMA_LINEARS = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)
EXPERTS = 48 * 128 * 3 * 2048 * 768
FP8 = 1 + 4 / 128**2
ON_HOST = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}


def train(plan) -> dict[str, float]:
    return memory_of(plan, H100).phases[0].parts


def test_a_dense_model_on_eight_replicas(plan):
    parts = train(plan())
    assert parts["parameters"] == parts["gradients"] == 2 * LLAMA_PARAMETERS
    assert parts["optimizer"] == 12 * LLAMA_PARAMETERS / 8
    assert parts["quantized weights"] == pytest.approx(2 * FP8 * LLAMA_LINEARS)


NO_FP8 = {"fp8_cfg": {"enabled": False}}
AWARE = {"use_precision_aware_optimizer": True}
IN_FP32 = {"distributed_data_parallel_config": {"grad_reduce_in_fp32": True}}


@pytest.mark.parametrize(
    ("changes", "gradient", "optimizer"),
    [
        ({"optimizer": AWARE}, 2, 12 / 8),  # Megatron's float32 masters, because of the FP8 recipe
        ({"optimizer": AWARE} | NO_FP8, 2, 10 / 8),
        ({"optimizer": AWARE | {"store_param_remainders": False}} | NO_FP8, 2, 12 / 8),
        (IN_FP32, 4, 12 / 8),
        ({"optimizer": {"use_distributed_optimizer": False}}, 2, 12),
        ({"optimizer": ON_HOST}, 2, 4 / 8),
        ({"optimizer": ON_HOST | {"optimizer_offload_fraction": 0.5}}, 2, (12 + 4) / 2 / 8),
        ({"optimizer": ON_HOST | AWARE}, 2, None),
        ({"optimizer": ON_HOST} | IN_FP32, 4, 4 / 8),
    ],
)
def test_bytes_a_parameter(plan, changes, gradient, optimizer):
    parts = train(plan(LLAMA, {TRAINER + key: value for key, value in changes.items()}))
    assert parts["gradients"] == gradient * LLAMA_PARAMETERS
    assert parts.get("optimizer") == (optimizer and optimizer * LLAMA_PARAMETERS)


def test_the_step_of_the_optimizer_counts_where_its_copies_are_more_than_activations(plan):
    """bfloat16 gradients are copied for dense part and experts, states in FP8 and FP16 for one of them at a time."""
    short = {"policy.sequence_packing.train_mb_tokens": 64, TRAINER + "expert_model_parallel_size": 8}
    made = plan(MIXTURE, short)
    dense, experts = stage_parameters(made, 0)
    parts = train(made)
    assert parts["copies in the optimizer's step"] == 4 * (dense / 8 + experts)
    assert not {"activations", "logits"} & parts.keys()
    states = {"optimizer": AWARE | {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16"}}
    low = train(plan(MIXTURE, OURS | short | {TRAINER + key: value for key, value in (states | IN_FP32).items()}))
    assert low["optimizer"] == (2 + 1 + 2) * (dense / 8 + experts)
    assert low["copies in the optimizer's step"] == 8 * experts
    long = train(plan(MIXTURE, short | {"policy.sequence_packing.train_mb_tokens": 65536}))
    assert "copies in the optimizer's step" not in long
    assert sum(long[name] for name in ("activations", "logits")) > 4 * (dense / 8 + experts)


def test_what_an_optimizer_on_the_host_leaves_on_the_gpu_stays_there_through_refit_and_generation(plan):
    """NeMo RL moves no optimizer that is on the host, and its main parameters are on the GPU."""
    phases = memory_of(plan(LLAMA, {TRAINER + "optimizer": ON_HOST}), H100).phases
    assert [phase.parts["optimizer"] for phase in phases] == [LLAMA_PARAMETERS / 2] * 3
    aware = memory_of(plan(LLAMA, {TRAINER + "optimizer": ON_HOST | AWARE}), H100)
    assert not any("optimizer" in phase.parts for phase in aware.phases)


OURS = {"nemo_fp8rl.workers": "ours"}


def test_our_own_trainer_leaves_the_optimizer_on_the_gpu_and_recomputes_whole_layers(plan):
    unused = {
        TRAINER + "optimizer": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0},
        TRAINER + "activation_checkpointing": True,
        TRAINER + "recompute_granularity": "selective",
    }
    made = plan(LLAMA, OURS | unused)
    parts = train(made)
    assert (parts["gradients"], parts["optimizer"]) == (2 * LLAMA_PARAMETERS, 12 * LLAMA_PARAMETERS / 8)
    in_float32 = plan(LLAMA, OURS | {TRAINER + "distributed_data_parallel_config": {"grad_reduce_in_fp32": True}})
    assert (train(in_float32)["gradients"], train(in_float32)["logits"]) == (4 * LLAMA_PARAMETERS, 128256 * 1024 * 8)
    assert parts["quantized weights"] == pytest.approx(2 * FP8 * LLAMA_LINEARS / 32)
    assert activations(made, 0) == activations(plan(LLAMA, {TRAINER + "activation_checkpointing": True}), 0)


def test_weights_in_fp8_alone_stand_in_the_place_of_parameters(plan):
    phases = memory_of(plan(LLAMA, OURS | {TRAINER + "fp8_cfg.fp8_param": True}), H100).phases
    rest = 2 * (LLAMA_PARAMETERS - LLAMA_LINEARS)
    assert phases[0].parts["parameters"] == rest
    assert phases[0].parts["quantized weights"] == pytest.approx(2 * FP8 * LLAMA_LINEARS)
    assert phases[1].parts["parameters"] == pytest.approx(rest + FP8 * LLAMA_LINEARS)  # rows alone
    theirs = memory_of(plan(LLAMA, {TRAINER + "fp8_cfg.fp8_param": True}), H100).phases
    assert theirs[1].parts["parameters"] == pytest.approx(rest + 2 * FP8 * LLAMA_LINEARS)


@pytest.mark.parametrize(
    ("mode", "colocated", "phases"),
    [
        ("delta", True, {"train", "refit", "generate"}),
        ("delta", False, {"train"}),
        ("auto", False, {"train"}),
        ("auto", True, set()),
        ("full", False, set()),
    ],
)
def test_what_our_trainer_keeps_for_deltas_stays_on_its_gpu(plan, mode, colocated, phases):
    changes = {
        "nemo_fp8rl.refit.mode": mode,
        "policy.generation.colocated": {"enabled": colocated, "resources": {"num_nodes": None, "gpus_per_node": 4}},
    }
    memory = memory_of(plan(LLAMA, OURS | changes), H100)
    found = {phase.name: phase.parts["kept for deltas"] for phase in memory.phases if "kept for deltas" in phase.parts}
    assert found.keys() == phases
    assert list(found.values()) == [pytest.approx(engine_weights(plan()))] * len(phases)
    theirs = memory_of(plan(LLAMA, changes), H100)
    assert not any("kept for deltas" in phase.parts for phase in theirs.phases)


def test_fp8_weights_beside_the_parameters_stay_through_refit_and_generation_unless_cleared(plan):
    """As NeMo RL's `offload_before_refit` leaves them: of a stage the layers it has."""
    weights = pytest.approx(FP8 * LLAMA_LINEARS)  # rows and columns of half the layers
    two_stages = {TRAINER + "pipeline_model_parallel_size": 2}
    stay = memory_of(plan(LLAMA, two_stages), H100).phases
    assert [phase.parts.get("quantized weights") for phase in stay] == [weights] * 3
    for words in ({TRAINER + "fp8_cfg.force_clear_fp8_caches": True}, OURS):
        gone = memory_of(plan(LLAMA, two_stages | words), H100).phases
        assert [phase.parts.get("quantized weights") for phase in gone] == [weights, None, None]
        assert gone[2].total == pytest.approx(stay[2].total - FP8 * LLAMA_LINEARS)


@pytest.mark.parametrize("whose", [OURS, {}])
def test_layers_that_are_bfloat16_in_the_engine_are_so_in_the_trainer(plan, whose):
    some = whose | {ENGINE + "num_first_layers_in_bf16": 8}
    assert train(plan(LLAMA, some))["quantized weights"] == pytest.approx(2 * FP8 * LLAMA_LINEARS * 3 / 4)


def test_a_bfloat16_trainer_has_no_fp8_weights(plan):
    assert "quantized weights" not in train(plan(LLAMA, {TRAINER + "fp8_cfg": {"enabled": False}}))


def test_tensor_parallelism_splits_all_but_the_norms(plan):
    dense, experts = stage_parameters(plan(LLAMA, {TRAINER + "tensor_model_parallel_size": 4}), 0)
    norms = (2 * 32 + 1) * 4096
    assert (dense, experts) == ((LLAMA_PARAMETERS - norms) / 4 + norms, 0)


def test_pipeline_stages_have_their_layers_and_the_ends(plan):
    halves = [stage_parameters(plan(LLAMA, {TRAINER + "pipeline_model_parallel_size": 2}), i)[0] for i in range(2)]
    assert sum(halves) == LLAMA_PARAMETERS
    assert halves[1] - halves[0] == 4096  # the final norm; embedding and head are as large
    tied = plan("Qwen/Qwen2.5-1.5B", {TRAINER + "pipeline_model_parallel_size": 2})
    assert sum(stage_parameters(tied, i)[0] for i in range(2)) == 1_543_714_304 + 151936 * 1536


def test_experts_are_spread_and_share_their_optimizer_among_fewer(plan):
    layout = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 8, "sequence_parallel": True}
    made = plan(MIXTURE, {"cluster.num_nodes": 2} | {TRAINER + key: value for key, value in layout.items()})
    dense, experts = stage_parameters(made, 0)
    assert experts == EXPERTS / 8
    assert train(made)["optimizer"] == 12 * (dense / 8 + experts / 2)  # 16 GPUs: DP 8, but 2 copies of each expert


def test_layers_of_uneven_stages(plan):
    layout = {"pipeline_model_parallel_size": 4, "num_layers_in_first_pipeline_stage": 7}
    made = plan(
        LATENT, {TRAINER + key: value for key, value in (layout | {"num_layers_in_last_pipeline_stage": 6}).items()}
    )
    assert made.stages == [range(0, 7), range(7, 14), range(14, 21), range(21, 27)]


def test_activations_of_a_dense_layer(plan):
    layer = 2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 14336)  # bytes a token
    assert activations(plan(), 0) == 4096 * 32 * layer
    full = plan(LLAMA, {TRAINER + "activation_checkpointing": True})
    assert activations(full, 0) == 4096 * (32 * 2 * 4096 + layer)
    two = plan(LLAMA, {TRAINER + "pipeline_model_parallel_size": 2})
    assert (
        activations(two, 0) == 2 * activations(two, 1) == 4096 * 32 * layer
    )  # two microbatches in flight, half the layers
    split = {TRAINER + "tensor_model_parallel_size": 4, TRAINER + "sequence_parallel": True}
    assert activations(plan(LLAMA, split), 0) == 4096 * 32 * layer / 4


def test_logits_whole_and_in_chunks(plan):
    assert logits(plan()) == 4096 * 128256 * (2 + 4 + 4)
    assert logits(plan(LLAMA, {"policy.logprob_chunk_size": 1024})) == 128256 * (4096 * 4 + 1024 * 8)


def test_engine_weights_are_a_byte_and_a_scale_in_fp8(plan):
    rest = LLAMA_PARAMETERS - LLAMA_LINEARS
    assert engine_weights(plan()) == pytest.approx(FP8 * LLAMA_LINEARS + 2 * rest)
    bf16 = {ENGINE + "precision": "bfloat16"}
    assert engine_weights(plan(LLAMA, bf16)) == pytest.approx(2 * LLAMA_PARAMETERS)
    some = engine_weights(plan(LLAMA, {ENGINE + "num_first_layers_in_bf16": 8}))
    assert some == pytest.approx(FP8 * LLAMA_LINEARS * 3 / 4 + 2 * (rest + LLAMA_LINEARS / 4))


def test_an_engine_splits_experts_or_spreads_them(plan):
    whole = engine_weights(plan(MIXTURE))
    split = engine_weights(plan(MIXTURE, {ENGINE + "tensor_parallel_size": 2}))
    spread = engine_weights(plan(MIXTURE, {ENGINE + "tensor_parallel_size": 2, ENGINE + "expert_parallel_size": 8}))
    assert whole == pytest.approx(30_532_122_624 * FP8 + (30_532_122_624 - linears_of_mixture()) * (2 - FP8))
    assert split - spread == pytest.approx(FP8 * EXPERTS * (1 / 2 - 1 / 8))


def linears_of_mixture() -> int:
    return EXPERTS + 48 * (2048 * (4096 + 2 * 512) + 4096 * 2048)


@pytest.mark.parametrize(
    ("model", "changes", "size"),
    [
        (LLAMA, {}, 131072),  # 2 (keys and values) x 32 layers x 8 heads x 128 x 2 bytes
        (LLAMA, {ENGINE + "kv_cache_dtype": "fp8"}, 65536),
        (LLAMA, {ENGINE + "tensor_parallel_size": 4}, 32768),
        (MIXTURE, {ENGINE + "tensor_parallel_size": 8}, 2 * 48 * 128 * 2),  # 4 heads: each on two of eight
        (LATENT, {}, 27 * (512 + 64) * 2),
        (LATENT, {ENGINE + "tensor_parallel_size": 4}, 27 * (512 + 64) * 2),
    ],
)
def test_bytes_of_a_token_in_the_cache(plan, model, changes, size):
    assert kv_bytes_per_token(plan(model, changes)) == size


def test_the_cache_takes_what_utilization_leaves(plan):
    made = plan()
    room = 81559 * 2**20 * 0.6 - engine_weights(made) - WORKSPACE
    assert memory_of(made, H100).cache_tokens == int(room // 131072)
    pinned = plan(LLAMA, {"policy.generation.vllm_kwargs.kv_cache_memory_bytes": 2**30})
    assert memory_of(pinned, H100).cache_tokens == 8192


def test_phases_of_a_colocated_engine_and_of_one_with_gpus_of_its_own(plan):
    assert [phase.name for phase in memory_of(plan(), H100).phases] == ["train", "refit", "generate"]
    apart = {"policy.generation.colocated": {"enabled": False, "resources": {"num_nodes": None, "gpus_per_node": 4}}}
    made = plan(LLAMA, apart)
    assert [phase.name for phase in memory_of(made, H100).phases] == ["train", "generate"]
    assert (made.trainer_gpus, made.engine_gpus, made.data) == (4, 4, 4)


def levels(plan, gpu="h100") -> list[tuple[str, str]]:
    memory = memory_of(plan, GPUS[gpu])
    return [
        (finding.level, finding.text.split(":")[0].split(" ")[0]) for finding in check_memory(plan, GPUS[gpu], memory)
    ]


def test_what_does_not_fit_is_an_error_and_a_larger_gpu_mends_it(plan):
    large = plan(LLAMA, {"policy.sequence_packing.train_mb_tokens": 12288})
    assert ("error", "train") in levels(large)
    assert ("ok", "train") in levels(large, "b200")


def test_where_fp8_weights_leave_no_room_to_generate_the_key_that_clears_them_is_named(plan):
    made = plan(LLAMA, {ENGINE + "gpu_memory_utilization": 0.85})
    (text,) = [f.text for f in check_memory(made, H100, memory_of(made, H100)) if f.text.startswith("generate")]
    assert text.endswith("set policy.megatron_cfg.fp8_cfg.force_clear_fp8_caches=true")


def test_a_cache_that_holds_no_sequence_is_an_error(plan):
    assert ("error", "the") in levels(plan(LLAMA, {ENGINE + "gpu_memory_utilization": 0.135}))
    assert ("warn", "the") in levels(plan(LLAMA, {ENGINE + "gpu_memory_utilization": 0.14}))


def test_a_window_is_said_to_let_more_sequences_into_the_cache(plan):
    def of_cache(changes) -> str:
        made = plan(LLAMA, changes)
        (text,) = [f.text for f in check_memory(made, H100, memory_of(made, H100)) if f.text.startswith("the KV cache")]
        return text

    dense = of_cache({})
    longest = int(dense.rpartition(" ")[2])
    told = f"{dense}, and more with kv_window=128, as an answer keeps its prompt and 128 tokens"
    assert of_cache({ENGINE + "kv_window": 128}) == told
    assert of_cache({ENGINE + "kv_window": longest}) == dense


@pytest.mark.parametrize(("changes", "width"), [(MXFP8, 1 + 1 / 32), (A16, 0.5 + 1 / 16)])
def test_engine_weights_in_the_other_formats_have_a_scale_for_each_row(plan, changes, width):
    rest = LLAMA_PARAMETERS - LLAMA_LINEARS
    assert engine_weights(plan(LLAMA, changes)) == pytest.approx(width * LLAMA_LINEARS + 2 * rest)


def test_experts_alone_are_4_bits_in_an_engine_of_nemo_rls_nvfp4(plan):
    """NeMo RL's guide says 18.07 GiB of 56.88. Layers in bfloat16 are the trainer's."""
    bf16 = engine_weights(plan(MIXTURE, {ENGINE + "precision": "bfloat16"}))
    nvfp4 = engine_weights(plan(MIXTURE, NVFP4))
    assert (nvfp4 / 2**30, bf16 / 2**30) == (pytest.approx(18.07, rel=0.005), pytest.approx(56.88, rel=0.005))
    kept = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 4}
    some = engine_weights(plan(MIXTURE, NVFP4 | {TRAINER + key: value for key, value in kept.items()}))
    assert some - nvfp4 == pytest.approx((bf16 - nvfp4) * 6 / 48)


def test_an_emulated_trainer_keeps_bfloat16_values_and_a_delta_base_of_the_wires_bytes(plan):
    separate = {"policy.generation.colocated": {"enabled": False, "resources": {"num_nodes": None, "gpus_per_node": 4}}}
    parts = memory_of(plan(LLAMA, A16 | separate), GPUS["h200"]).phases[0].parts
    rest = LLAMA_PARAMETERS - LLAMA_LINEARS
    assert parts["quantized weights"] == 2 * LLAMA_LINEARS
    assert parts["kept for deltas"] == pytest.approx((0.5 + 1 / 256) * LLAMA_LINEARS + 2 * rest)


ADAPTERS = {TRAINER + "peft": {"enabled": True, "dim": 32, "alpha": 32}}
LLAMA_ADAPTERS = (
    32 * 32 * ((4096 + 4096 + 2 * 1024) + (4096 + 4096) + (4096 + 2 * 14336) + (14336 + 4096))
)  # q, k and v share one A, so do gate and up
QWEN = {"3B": "Qwen/Qwen2.5-Coder-3B", "7B": "Qwen/Qwen2.5-7B", "14B": "Qwen/Qwen2.5-14B", "32B": "Qwen/Qwen2.5-32B"}
PUBLISHED = {"3B": (6.2, 2.8), "7B": (15.2, 5.9), "14B": (29.6, 10.6), "32B": (62.3, 20.7)}
"""GB of QeRL's models in bfloat16 and NVFP4 (arXiv 2510.11696, tables 3 and 5 to 8)."""


def test_only_adapters_have_gradients_and_an_optimizer_and_the_base_is_there_once(plan):
    """Between steps 14 bytes a parameter of adapters on one replica; the base as the refit sends it."""
    one = {"cluster": {"num_nodes": 1, "gpus_per_node": 1}}
    parts = train(plan(LLAMA, OURS | ADAPTERS | one))
    assert parts["frozen base"] == pytest.approx(FP8 * LLAMA_LINEARS + 2 * (LLAMA_PARAMETERS - LLAMA_LINEARS))
    assert (parts["adapters"], parts["gradients"]) == (2 * LLAMA_ADAPTERS, 2 * LLAMA_ADAPTERS)
    assert parts["optimizer"] == 12 * LLAMA_ADAPTERS
    assert parts["quantized weights"] == pytest.approx(FP8 * LLAMA_LINEARS)  # transposed, for the backward
    assert "parameters" not in parts
    assert train(plan(LLAMA, OURS | ADAPTERS))["optimizer"] == 12 * LLAMA_ADAPTERS / 8


def test_the_base_stays_through_a_refit_and_the_engine_has_the_adapters(plan):
    with_adapters, without = (plan(LLAMA, OURS | keys) for keys in (ADAPTERS, {}))
    assert engine_weights(with_adapters) - engine_weights(without) == pytest.approx(2 * LLAMA_ADAPTERS)
    _, refit, generate = memory_of(with_adapters, H100).phases
    base = pytest.approx(FP8 * LLAMA_LINEARS + 2 * (LLAMA_PARAMETERS - LLAMA_LINEARS))
    assert (refit.parts["frozen base"], "frozen base" in generate.parts) == (base, False)
    assert (refit.parts["adapters"], "adapters" in generate.parts) == (2 * LLAMA_ADAPTERS, False)


def test_of_an_adapter_the_side_of_the_weight_is_split(plan):
    """Over 4 ranks: B of qkv and gate_up by rows, A of o and down by columns; the other matrix is whole."""
    layout = {TRAINER + "tensor_model_parallel_size": 4, ENGINE + "tensor_parallel_size": 4}
    split = 32 * 32 * ((4096 + (4096 + 2048) / 4) + (4096 / 4 + 4096) + (4096 + 2 * 14336 / 4) + (14336 / 4 + 4096))
    made = plan(LLAMA, OURS | ADAPTERS | layout)
    assert train(made)["adapters"] == 2 * split
    assert engine_weights(made) - engine_weights(plan(LLAMA, OURS | layout)) == pytest.approx(2 * split)


def test_every_expert_has_adapters_of_its_own(plan):
    of_experts = 48 * 128 * 32 * ((2048 + 2 * 768) + (768 + 2048))
    of_attention = 48 * 32 * ((2048 + 4096 + 2 * 512) + (4096 + 2048))
    spread = {TRAINER + "expert_model_parallel_size": 8}
    assert train(plan(MIXTURE, OURS | ADAPTERS | spread))["adapters"] == 2 * (of_experts / 8 + of_attention)
    some = ADAPTERS[TRAINER + "peft"] | {"target_modules": ["linear_qkv", "*.layers.0.*.linear_proj"]}
    few = plan(MIXTURE, OURS | spread | {TRAINER + "peft": some})
    assert train(few)["adapters"] == 2 * 32 * (48 * (2048 + 4096 + 2 * 512) + (4096 + 2048))


def test_nemo_rls_own_trainer_has_the_base_in_bfloat16(plan):
    bf16 = {TRAINER + "fp8_cfg": {"enabled": False}, "nemo_fp8rl.workers": "nemo_rl"}
    parts = train(plan(LLAMA, ADAPTERS | bf16))
    assert parts["frozen base"] == 2 * LLAMA_PARAMETERS
    assert (parts["gradients"], parts["optimizer"]) == (2 * LLAMA_ADAPTERS, 12 * LLAMA_ADAPTERS / 8)
    assert engine_weights(plan(LLAMA, ADAPTERS | bf16)) == engine_weights(plan(LLAMA, bf16))


@pytest.mark.parametrize("size", QWEN)
def test_qerls_models_have_the_published_sizes(plan, size):
    """Blocks of 16x16 have fewer scales than those of 1x16, as theirs are.

    Their NVFP4 checkpoint of 3B stores the tied head beside the embedding; their 62.3 GB of 32B are without the two.
    """
    one = {"cluster": {"num_nodes": 1, "gpus_per_node": 1}}

    def gigabytes(changes) -> float:
        return train(plan(QWEN[size], OURS | ADAPTERS | one | changes))["frozen base"] / 1e9

    bf16, line, square = (gigabytes(c) for c in (BF16, A16 | {"nemo_fp8rl.weight_block": "line"}, A16))
    copy_of_head = 2 * 151936 * 2048 / 1e9 if size == "3B" else 0
    left_out = 2 * 2 * 152064 * 5120 / 1e9 if size == "32B" else 0
    assert (bf16 - left_out, line + copy_of_head) == pytest.approx(PUBLISHED[size], rel=0.03)
    linears = (bf16 - line) / (2 - 0.5625)
    assert line - square == pytest.approx(linears * (1 / 16 - 1 / 256))
    print(f"{size}: bfloat16 {bf16:.1f}, 1x16 {line:.1f}, 16x16 {square:.1f} GB")
