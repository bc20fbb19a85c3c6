"""A NeMo RL recipe as our config: what is copied, what is refused, what has no say."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_fp8rl.commands.doctor.known_models import KNOWN_MODELS
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.generation.engine_arguments import engine_arguments
from nemo_fp8rl.nemo_rl.recipe.config_from_recipe import convert_recipe
from nemo_fp8rl.nemo_rl.recipe.gpu_division import check_division, divide_gpus
from nemo_fp8rl.nemo_rl.recipe.keys import IGNORED_VALUES, describe_ignored_values
from nemo_fp8rl.nemo_rl.recipe.read_recipe import load_recipe
from nemo_fp8rl.nemo_rl.recipe.recipe_for_train import convert_keys_for_train
from nemo_fp8rl.nemo_rl.stock.stock_limits import why_policy_unsupported
from tests.conftest import RECIPES
from tests.nemo_rl.recipe.test_shipped_recipes import flow_of


def master(tiny: Any, **changes: Any) -> dict[str, Any]:
    """A MasterConfig as a mapping, as far as it is read; changes by dotted key."""
    values: dict[str, Any] = {
        "policy": {
            "model_name": f"{tiny}/model",
            "tokenizer": {"name": f"{tiny}/model"},
            "train_global_batch_size": 64,
            "train_micro_batch_size": 16,
            "logprob_batch_size": 32,
            "logprob_chunk_size": None,
            "max_total_sequence_length": 64,
            "precision": "bfloat16",
            "max_grad_norm": 1.0,
            "hf_config_overrides": {},
            "dtensor_cfg": {"enabled": False, "tensor_parallel_size": 4},
            "megatron_cfg": {
                "enabled": True,
                "tensor_model_parallel_size": 1,
                "fp8_cfg": {"enabled": True},
                "env_vars": None,
                "apply_rope_fusion": True,
                "freeze_moe_router": True,
                "optimizer": {"optimizer": "adam", "lr": 1e-4, "weight_decay": 0.01, "clip_grad": 1.0},
                "scheduler": {"lr_decay_style": "cosine", "lr_decay_iters": None, "start_weight_decay": 0.01},
            },
            "generation": {
                "backend": "vllm",
                "max_new_tokens": 5,
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": None,
                "stop_token_ids": [1],
                "stop_strings": None,
                "colocated": {"enabled": True, "resources": {"gpus_per_node": None, "num_nodes": None}},
                "vllm_kwargs": {},
                "vllm_cfg": {
                    "precision": "fp8",
                    "tensor_parallel_size": 1,
                    "max_model_len": 64,
                    "pow2_weight_scaling_factors": True,
                    "pow2_activation_scaling_factors": True,
                },
            },
        },
        "grpo": {"num_prompts_per_step": 16, "num_generations_per_prompt": 4, "max_num_steps": 70, "seed": 3},
        "loss_fn": {"ratio_clip_max": 0.28, "use_importance_sampling_correction": True},
        "cluster": {"num_nodes": 1, "gpus_per_node": 1},
        "logger": {"log_dir": "logs"},
        "checkpointing": {"save_optimizer": True},
        "nemo_fp8rl": {"align": "none"},
    }
    for key, value in changes.items():
        block = values
        *path, last = key.split("__")
        for part in path:
            block = block[part]
        block[last] = copy.deepcopy(value)
    return values


def test_what_it_says_is_what_we_do(tiny):
    cfg = convert_recipe(master(tiny))
    assert (cfg.nemo_fp8rl.flow, cfg.nemo_fp8rl.scale_format, cfg.nemo_fp8rl.align) == ("fp8_e2e", "pow2", "none")
    assert (cfg.policy.train_global_batch_size, cfg.policy.logprob_batch_size, cfg.grpo.seed) == (64, 32, 3)
    assert cfg.policy.logprob_chunk_size == 1024
    assert cfg.policy.megatron_cfg.optimizer.lr == 1e-4
    assert cfg.policy.megatron_cfg.scheduler.lr_decay_iters == 70  # null: the length of the run
    assert cfg.policy.generation.stop_token_ids == (1,)
    assert cfg.loss_fn.ratio_clip_max == 0.28 and cfg.loss_fn.use_importance_sampling_correction
    assert cfg.cluster.backend == "in_process"


def test_what_it_says_is_what_our_own_loop_does(tiny):
    data = {"train": {"data_path": f"{tiny}/data.jsonl", "input_key": "prompt", "output_key": "answer"}}
    data["train"] |= {"env_name": "exact_match", "split_validation_size": 0.05}
    cfg = convert_keys_for_train(
        Path("a recipe"), master(tiny, data=data, grpo__normalize_rewards=False, grpo__adv_estimator={})
    )
    assert (cfg.grpo.max_num_steps, cfg.grpo.seed, cfg.grpo.normalize_rewards) == (70, 3, False)
    assert (cfg.policy.model_name, cfg.data.train.data_path) == (f"{tiny}/model", f"{tiny}/data.jsonl")
    assert (cfg.logger.log_dir, cfg.nemo_fp8rl.flow, cfg.data.default.env_name) == ("logs", "fp8_e2e", "exact_match")


def test_variables_of_workers_reach_ours(tiny):
    cfg = convert_recipe(
        master(
            tiny,
            policy__megatron_cfg__env_vars={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            policy__generation__vllm_cfg__env_vars={"VLLM_USE_FLASHINFER_MOE_FP8": "0"},
        )
    )
    assert cfg.policy.megatron_cfg.env_vars == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert cfg.policy.generation.vllm_cfg.env_vars == {"VLLM_USE_FLASHINFER_MOE_FP8": "0"}


def test_what_vllm_is_told_reaches_our_engines(tiny):
    kwargs = {
        "kv_cache_memory_bytes": 2**29,
        "max_num_seqs": 512,
        "max_num_batched_tokens": 16384,
        "attention_backend": "TRITON_ATTN",
    }
    cfg = convert_recipe(master(tiny, policy__generation__vllm_kwargs=kwargs))
    assert cfg.policy.generation.vllm_cfg.kv_cache_memory_gib == 0.5
    arguments = engine_arguments(cfg, "dummy")
    assert {key: arguments[key] for key in kwargs} == kwargs
    assert convert_recipe(master(tiny)).policy.generation.vllm_cfg.max_num_seqs is None


def test_a_window_of_the_cache_reaches_both_sides_and_allows_one_turn(tiny):
    key = {"policy__generation__vllm_cfg__kv_window": 3}
    cfg = convert_recipe(master(tiny, **key))
    assert cfg.trainer_kv_window == 3
    assert engine_arguments(cfg, "dummy")["hf_overrides"]["rswa_window"] == 3
    refusal = why_policy_unsupported(master(tiny, **key)["policy"], survives_refit=True)
    assert refusal.endswith("own engines keep the whole cache: set it to null, or nemo_fp8rl.workers=ours")
    turns = key | {"grpo__max_rollout_turns": 2}
    with pytest.raises(UserError, match=r"kv_window=3: .* set grpo\.max_rollout_turns=1 .*, or nemo_fp8rl\.kv=rollout"):
        convert_recipe(master(tiny, **turns))
    assert convert_recipe(master(tiny, **turns, nemo_fp8rl={"kv": "rollout"})).trainer_kv_window is None


def test_gpus_are_ranks_and_processes_of_engines(tiny):
    parallel = {"policy__megatron_cfg__tensor_model_parallel_size": 2, "cluster__gpus_per_node": 4}
    cfg = convert_recipe(master(tiny, **parallel, policy__generation__vllm_cfg__tensor_parallel_size=2))
    assert (cfg.cluster.backend, cfg.cluster.train_ranks, cfg.cluster.generation_engines) == ("ray", 4, 2)
    assert cfg.policy.generation.colocated.enabled and cfg.policy.megatron_cfg.offload_between_phases
    apart = {"enabled": False, "resources": {"gpus_per_node": 1, "num_nodes": None}}
    cfg = convert_recipe(master(tiny, cluster__gpus_per_node=3, policy__generation__colocated=apart))
    assert (cfg.cluster.backend, cfg.cluster.train_ranks, cfg.cluster.generation_engines) == ("ray", 2, 1)
    assert not cfg.policy.generation.colocated.enabled and cfg.policy.generation.vllm_cfg.sleep_level == 0


@pytest.mark.parametrize(
    ("key", "value", "instead"),
    [
        ("policy__megatron_cfg__optimizer__optimizer_cpu_offload", True, "the optimizer stays on the GPU"),
        ("policy__generation__vllm_cfg__enable_prefix_caching", False, "engines cache prefixes"),
        ("checkpointing__is_async", True, "a checkpoint is complete"),
        ("checkpointing__model_save_format", "torch_save", "weights are saved as safetensors"),
    ],
)
def test_an_ignored_value_is_reported_and_a_followed_one_is_not(tiny, key, value, instead):
    (sentence,) = describe_ignored_values(master(tiny, **{key: value}))
    name = key.replace("__", ".")
    assert sentence.startswith(f"{name}={value!r} has an effect only on NeMo RL's own workers; {instead}")
    for followed in (None, IGNORED_VALUES[name][0]):
        assert list(describe_ignored_values(master(tiny, **{key: followed}))) == []


def test_null_is_none_of_what_has_to_be_off(tiny):
    off = {"policy__megatron_cfg__mtp_num_layers": None, "policy__draft": {"enabled": None}}
    assert convert_recipe(master(tiny, **off)) == convert_recipe(master(tiny))
    with pytest.raises(UserError, match=r"policy\.megatron_cfg\.enabled=None"):
        convert_recipe(master(tiny, policy__megatron_cfg__enabled=None))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("policy__megatron_cfg__mtp_num_layers", 1, "no multi-token prediction"),
        ("policy__dtensor_cfg__enabled", True, "Megatron Core"),
        ("policy__megatron_cfg__num_layers_in_first_pipeline_stage", 1, "num_layers_in_first_pipeline_stage=1"),
        ("policy__hf_config_overrides", {"rope_theta": 1.0}, "hf_config_overrides.rope_theta"),
        ("policy__megatron_cfg__model_overrides", {"num_layers": 1}, "model_overrides.num_layers"),
        ("policy__generation__bad_words", ["x"], "bad_words"),
        ("policy__generation__vllm_cfg__logprobs_mode", "raw_logprobs", "logprobs_mode"),
        ("policy__megatron_cfg__scheduler__end_weight_decay", 0.5, "end_weight_decay"),
        ("policy__generation__vllm_cfg__expert_parallel_size", 4, "expert_parallel_size=4"),
        ("policy__generation__colocated", {"enabled": False, "resources": {"gpus_per_node": 1}}, "none to train on"),
        ("policy__generation__colocated", {"enabled": False}, r"resources\.gpus_per_node is null"),
        (
            "policy__generation__colocated",
            {"enabled": False, "resources": {"gpus_per_node": 1, "num_nodes": 2}},
            r"resources\.num_nodes=2 .* set it to null",
        ),
        ("checkpointing__save_optimizer", False, "save_optimizer"),
        ("nemo_fp8rl", {"kernle": "cpu"}, "kernle"),
    ],
)
def test_what_we_cannot_do_is_refused_by_its_key(tiny, key, value, message):
    with pytest.raises(UserError, match=message):
        convert_recipe(master(tiny, **{key: value}))


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ({"gpus_per_node": 4, "num_nodes": None}, r"resources\.num_nodes is null, and on 3 nodes"),
        ({"gpus_per_node": 2, "num_nodes": 1}, r"resources\.gpus_per_node=2, .*set it to cluster\.gpus_per_node=4"),
        ({"gpus_per_node": None, "num_nodes": 1}, r"resources\.gpus_per_node is null"),
    ],
)
def test_on_several_nodes_engines_are_said_to_have_whole_ones(tiny, resources, message):
    nodes = {"cluster__num_nodes": 3, "cluster__gpus_per_node": 4, "policy__train_micro_batch_size": 8}
    with pytest.raises(UserError, match=message):
        convert_recipe(master(tiny, **nodes, policy__generation__colocated={"enabled": False, "resources": resources}))
    apart = {"enabled": False, "resources": {"gpus_per_node": 4, "num_nodes": 1}}
    cfg = convert_recipe(master(tiny, **nodes, policy__generation__colocated=apart))
    assert (cfg.cluster.train_ranks, cfg.cluster.generation_engines) == (8, 4)


@pytest.mark.parametrize(
    ("nodes", "apart", "expected"),
    [
        (1, None, (3, 3)),
        (1, {"gpus_per_node": 1, "num_nodes": None}, (2, 1)),
        (3, None, (8, 8)),
        (3, {"gpus_per_node": 4, "num_nodes": 1}, (4, 4)),
        (2, {"gpus_per_node": 1, "num_nodes": None}, (3, 1)),
    ],
)
def test_a_reward_models_gpus_are_neither_the_trainers_nor_the_engines(tiny, nodes, apart, expected):
    changes = {"env": {"reward_model": {"resources": {"gpus_per_node": 1, "num_nodes": 1}}}}
    changes |= {"data": {"train": [{"env_name": "math"}, {"env_name": "reward_model"}], "default": None}}
    changes |= {"cluster__num_nodes": nodes, "cluster__gpus_per_node": 4}
    colocated = {"enabled": apart is None, "resources": apart or {}}
    values = master(tiny, **changes, policy__generation__colocated=colocated)
    check_division(values)
    assert divide_gpus(values) == expected
    values["env"]["reward_model"]["resources"] = {}
    with pytest.raises(UserError, match=r"env\.reward_model\.resources\.(num_nodes|gpus_per_node) is not set"):
        divide_gpus(values)
    values["data"]["train"] = {"env_name": "math"}
    assert divide_gpus(values).trainer == nodes * 4 - (0 if apart is None else expected[1])


ASYNC = {
    "grpo__async_grpo": {"enabled": True},
    "policy__generation__vllm_cfg__async_engine": True,
    "policy__generation__colocated": {"enabled": False, "resources": {"gpus_per_node": 1, "num_nodes": None}},
    "cluster__gpus_per_node": 2,
}
FORCED = {"loss_fn__force_on_policy_ratio": True, "loss_fn__use_importance_sampling_correction": False}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (ASYNC | {"policy__generation__vllm_cfg__async_engine": False}, "needs .*vllm_cfg.async_engine=true"),
        (ASYNC | {"policy__generation__colocated": {"enabled": True}}, "set policy.generation.colocated.enabled=false"),
        (ASYNC | {"loss_fn__use_importance_sampling_correction": False}, "needs loss_fn.use_importance_sampling_corr"),
        (FORCED | {"policy__train_global_batch_size": 32}, "set policy.train_global_batch_size=64"),
        (FORCED | {"nemo_fp8rl__gates": [{"metric": "gen_kl_error", "max": 1, "action": "warn"}]}, "nemo_fp8rl.gates"),
        (FORCED | {"nemo_fp8rl__sharpness": {"period": 2}}, "nemo_fp8rl.sharpness needs the log-probs"),
        (FORCED | {"nemo_fp8rl__correction": {"preset": "tis", "denominator": "kept"}}, "correction.denominator=kept"),
        (FORCED | {"nemo_fp8rl__correction": {"normalize": True}}, "correction.normalize=true needs the log-probs"),
        (FORCED | {"loss_fn__use_kl_in_reward": True}, "use_kl_in_reward needs the log-probs"),
    ],
)
def test_what_nemo_rl_would_assert_later_is_refused_now(tiny, changes, message):
    with pytest.raises(UserError, match=message):
        convert_recipe(master(tiny, **changes))


def test_a_kl_in_the_reward_that_is_hardly_a_penalty_is_refused_as_in_our_own_loop(tiny):
    in_reward = {"grpo__adv_estimator": {"name": "reinforce_plus_plus"}, "loss_fn__use_kl_in_reward": True}
    with pytest.raises(UserError, match=r"loss_fn\.reference_policy_kl_type=k3 is hardly a penalty.* set it to k1"):
        convert_recipe(master(tiny, **in_reward))
    assert convert_recipe(master(tiny, **in_reward, loss_fn__reference_policy_kl_type="k1")).loss_fn.use_kl_in_reward


def test_the_asynchronous_loop_takes_a_correction_of_ours(tiny):
    cfg = convert_recipe(master(tiny, **ASYNC, nemo_fp8rl__correction={"preset": "icepop"}))
    assert cfg.nemo_fp8rl.correction.resolve().reject and not cfg.loss_fn.use_importance_sampling_correction
    assert convert_recipe(master(tiny, **ASYNC)).loss_fn.use_importance_sampling_correction
    with pytest.raises(UserError, match=r"nemo_fp8rl\.correction contradicts"):
        convert_recipe(master(tiny, nemo_fp8rl__correction={"preset": "icepop"}))
    of_theirs = {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 2.0}
    of_theirs["use_importance_sampling_correction"] = True
    with pytest.raises(UserError, match=r"contradicts loss_fn\.truncated_importance_sampling_type: set that"):
        convert_recipe(master(tiny, **ASYNC, loss_fn=of_theirs, nemo_fp8rl__correction={"preset": "icepop"}))


OURS = [
    path for path in sorted((RECIPES / "nemo_rl").rglob("*.yaml")) if not path.stem.startswith(("moonlight", "tiny"))
]


@pytest.mark.nemo_rl
@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_our_own_trainer_and_engine_take_our_recipes(real_checkout, tmp_path, path):
    values = load_recipe(path).values
    config = KNOWN_MODELS[values["policy"]["model_name"]]
    (tmp_path / "config.json").write_text(json.dumps(config))
    values["policy"] |= {"model_name": str(tmp_path)}
    values["policy"]["tokenizer"]["name"] = str(tmp_path)
    cfg = convert_recipe(values)
    assert cfg.nemo_fp8rl.flow == flow_of(path)
    assert cfg.policy.megatron_cfg.peft.enabled == ("-lora" in path.stem)
    assert cfg.policy.generation.colocated.enabled and cfg.policy.generation.vllm_cfg.sleep_level == 1
    assert cfg.policy.generation.vllm_cfg.kv_cache_memory_gib is None, "gpu_memory_utilization says it"


def test_keys_of_speed_and_of_other_backends_have_no_say(tiny):
    changed = master(tiny, policy__megatron_cfg__apply_rope_fusion=False, policy__dtensor_cfg__tensor_parallel_size=1)
    assert convert_recipe(changed) == convert_recipe(master(tiny))


def test_a_key_of_the_loss_that_ours_lacks_is_refused_and_not_ignored(tiny):
    with pytest.raises(UserError, match=r"loss_fn\.of_a_later_version=1: the loss of this package has no such key"):
        convert_recipe(master(tiny, loss_fn__of_a_later_version=1))
    assert convert_recipe(master(tiny, loss_fn__of_a_later_version=None))


def test_a_key_of_the_optimizer_that_is_left_out_has_megatrons_value(tiny):
    from megatron.core.optimizer import OptimizerConfig as MegatronsConfig

    values = master(tiny)
    values["policy"]["megatron_cfg"]["optimizer"] = {"lr": 1e-4}
    ours = vars(convert_recipe(values).policy.megatron_cfg.optimizer)
    theirs = vars(MegatronsConfig(lr=1e-4))
    texts = {torch.float32: "fp32", torch.float16: "fp16"}
    assert ours == {name: texts.get(theirs[name], theirs[name] or 0.0) for name in ours}


SUMS = "policy__megatron_cfg__distributed_data_parallel_config"


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (None, (False, False)),  # Megatron's defaults
        ({"overlap_grad_reduce": True, "data_parallel_sharding_strategy": "optim_grads_params"}, (False, False)),
        ({"grad_reduce_in_fp32": True, "use_custom_fsdp": False}, (True, False)),
        ({"grad_reduce_in_fp32": False, "reduce_scatter_with_fp32_accumulation": True}, (False, True)),
    ],
)
def test_gradients_are_summed_as_the_recipe_says(tiny, block, expected):
    choice = convert_recipe(master(tiny, **{SUMS: block})).policy.megatron_cfg.distributed_data_parallel_config
    assert (choice.grad_reduce_in_fp32, choice.reduce_scatter_with_fp32_accumulation) == expected


def test_a_key_of_gradients_that_nobody_reads_is_refused(tiny):
    with pytest.raises(UserError, match=r"distributed_data_parallel_config\.nccl_ub=True is not a key"):
        convert_recipe(master(tiny, **{SUMS: {"nccl_ub": True}}))


OPTIMIZER = "policy__megatron_cfg__optimizer"


def test_dtypes_of_the_optimizers_states_reach_the_trainer(tiny):
    """NeMo RL's default recipes set use_precision_aware_optimizer=true, which leaves all values as they are."""
    dtypes = {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16", "store_param_remainders": False}
    changes = {f"{OPTIMIZER}__{name}": value for name, value in dtypes.items()}
    with pytest.raises(UserError, match=r"exp_avg_dtype=fp8 has a meaning only with .*precision_aware_optimizer=true"):
        convert_recipe(master(tiny, **changes))
    changes[f"{OPTIMIZER}__use_precision_aware_optimizer"] = True
    keys = convert_recipe(master(tiny, **changes)).policy.megatron_cfg.optimizer
    assert (keys.exp_avg_dtype, keys.exp_avg_sq_dtype, keys.store_param_remainders) == ("fp8", "fp16", False)
    assert keys.use_precision_aware_optimizer


@pytest.mark.parametrize("name", ["exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype"])
def test_nemo_rls_own_workers_take_no_dtype_of_a_state(tiny, name):
    policy = master(tiny, **BF16)["policy"]
    assert why_policy_unsupported(policy, survives_refit=True) == ""
    policy["megatron_cfg"]["optimizer"] |= {"use_precision_aware_optimizer": True, name: "torch.float16"}
    assert why_policy_unsupported(policy, survives_refit=True).startswith(
        f"policy.megatron_cfg.optimizer.{name}=torch.float16: NeMo RL's own trainer takes no dtype from a recipe"
    )


MXFP8 = {"policy__megatron_cfg__fp8_cfg": {"enabled": True, "fp8_recipe": "mxfp8"}}
MXFP8 |= {"policy__generation__vllm_cfg__is_mx": True}
BF16 = {"policy__megatron_cfg__fp8_cfg": {"enabled": False}, "policy__generation__vllm_cfg__precision": "bfloat16"}
LINES = {"NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "1"}
FP4 = {"fp4_cfg": {"enabled": True}, "te_precision_config_file": "attn_bf16_mlp_nvfp4.yaml", "env_vars": LINES}
NVFP4 = BF16 | {f"policy__megatron_cfg__{key}": value for key, value in FP4.items()}
NVFP4 |= {"policy__generation__nvfp4_pertoken_rollout": {"enabled": True}}
A16 = BF16 | {"policy__quant_cfg": "NVFP4_MLP_WEIGHT_ONLY_CFG", "policy__quant_calib_size": 16}
A16 |= {"policy__generation__quant_cfg": "NVFP4_MLP_WEIGHT_ONLY_CFG", "policy__generation__real_quant": True}


@pytest.mark.parametrize(
    ("changes", "flow", "block", "words"),
    [
        (MXFP8, "mxfp8_e2e", (32, 32), ()),
        (MXFP8 | {"nemo_fp8rl__weight_block": "line"}, "mxfp8_e2e", (1, 32), ()),
        (NVFP4, "nvfp4_e2e", (1, 16), ("self_attn",)),
        (A16, "nvfp4_a16_e2e", (16, 16), ("self_attn",)),
    ],
)
def test_the_other_formats_reach_trainer_and_engine(tiny, changes, flow, block, words):
    cfg = convert_recipe(master(tiny, **changes))
    assert (cfg.nemo_fp8rl.flow, cfg.nemo_fp8rl.format.weight_block) == (flow, block)
    assert cfg.policy.generation.vllm_cfg.quantization_ignored_layer_kws == words
    assert convert_recipe(master(tiny)).nemo_fp8rl.flow == "fp8_e2e"
