"""Whether the workers that a recipe asks for take it: by what makes them."""

import pytest

from nemo_fp8rl.commands.doctor.model_shapes import shape_of
from nemo_fp8rl.commands.doctor.recipe_plan import Plan
from nemo_fp8rl.commands.doctor.worker_limits import check_workers
from nemo_fp8rl.nemo_rl.refit_transport import settings as refit_settings
from tests.commands.doctor.conftest import A16, ENGINE, MXFP8, NVFP4, TRAINER
from tests.nemo_rl.recipe.test_config_from_recipe import master

REFIT_CLASS = {"policy.generation.refit_transport": refit_settings.ENGINE}
IGNORED = {"policy__generation__vllm_cfg__quantization_ignored_layer_kws": ["a_proj", "b_proj"]}
BF16 = {"policy__generation__vllm_cfg__precision": "bfloat16", "policy__megatron_cfg__fp8_cfg": {"enabled": False}}


def said(model: str, **changes: object) -> list[tuple[str, str]]:
    values = master(None, **{"policy__model_name": model, **changes})
    values["nemo_fp8rl"] = {"workers": "ours", "align": "auto"} | values["nemo_fp8rl"]
    return [(finding.level, finding.text) for finding in check_workers(Plan(values, shape_of(model)), True)]


@pytest.mark.parametrize("model", ["meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"])
def test_ours_take_it(model):
    assert said(model) == [("ok", "our own trainer and engines take this recipe")]


def test_ours_take_context_parallelism_and_unequal_stages():
    split = {"pipeline_model_parallel_size": 2, "num_layers_in_last_pipeline_stage": 16, "context_parallel_size": 2}
    changes = {f"policy__megatron_cfg__{key}": value for key, value in split.items()} | {"cluster__gpus_per_node": 4}
    assert said("Qwen/Qwen3-8B", **changes) == [("ok", "our own trainer and engines take this recipe")]


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (
            "Qwen/Qwen3.5-9B",
            {},
            "; nor does nemo_fp8rl.workers=nemo_rl take it: FP8 on the wire compares layers by name",
        ),
        (
            "moonshotai/Moonlight-16B-A3B",
            IGNORED,
            "have this family, with FP8 on the wire: set nemo_fp8rl.workers=nemo_rl",
        ),
        ("Qwen/Qwen3.5-9B", BF16, "; NeMo RL's own workers have this family: set nemo_fp8rl.workers=nemo_rl"),
    ],
)
def test_of_a_family_that_ours_lack_it_is_said_whether_nemo_rls_own_have_it(model, changes, message):
    (finding,) = said(model, **changes)
    assert finding[0] == "error" and message in finding[1]


def test_memory_of_the_host_that_ours_do_not_take_is_said():
    on_host = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, "lr": 1e-6}
    (warning, _) = said("Qwen/Qwen3-8B", policy__megatron_cfg__optimizer=on_host)
    assert warning == (
        "warn",
        "policy.megatron_cfg.optimizer.optimizer_cpu_offload=True has an effect only on NeMo RL's own "
        "workers; the optimizer stays on the GPU while it trains",
    )


def test_where_they_are_not_asked_for_nothing_is_said():
    assert said("Qwen/Qwen3-8B", nemo_fp8rl={"workers": "auto"}) == []


@pytest.mark.parametrize(("workers", "level"), [("auto", "warn"), ("nemo_rl", "error")])
@pytest.mark.parametrize(
    ("change", "survives_refit", "message"),
    [
        ({}, False, "this NeMo RL processes an engine's weights once more"),
        ({"policy.generation.refit_transport": "nccl"}, True, "refit_transport=nccl"),
        (
            REFIT_CLASS | {ENGINE + "precision": "bfloat16", TRAINER + "fp8_cfg.enabled": False},
            True,
            "Fp8CheckpointEngine needs the block",
        ),
        (REFIT_CLASS, True, "Fp8CheckpointEngine needs the block policy.generation.refit_cfg["),
        (
            REFIT_CLASS | {"policy.generation.refit_cfg": {refit_settings.ENGINE: {}}},
            True,
            "NeMo RL has it for engines with GPUs of their own",
        ),
        (
            {"policy.generation.vllm_kwargs": {"speculative_config": {"method": "mtp"}}},
            True,
            "speculative_config.method=mtp: FP8 on the wire carries no drafter's weights",
        ),
        ({"policy.draft": {"enabled": True}}, True, "carries no drafter's weights; set it to false, or nemo_fp8rl."),
        (
            {"policy.generation.vllm_kwargs": {"kv_cache_dtype": "fp8"}},
            True,
            "say it in policy.generation.vllm_cfg.kv_cache_dtype",
        ),
        (
            {
                "nemo_fp8rl.correction": {"weight": "token", "normalize": True},
                "loss_fn": {"use_importance_sampling_correction": False},
            },
            True,
            "nemo_fp8rl.correction.normalize=true needs the whole batch",
        ),
        ({"nemo_fp8rl.grad_reduce": "fp8"}, True, "nemo_fp8rl.grad_reduce=fp8: NeMo RL's own trainer"),
        (
            {TRAINER + "distributed_data_parallel_config": {"reduce_scatter_with_fp32_accumulation": True}},
            True,
            "reduce_scatter_with_fp32_accumulation=true: NeMo RL does not tell its own trainer",
        ),
        (
            {ENGINE + "num_first_layers_in_bf16": 20, TRAINER + "pipeline_model_parallel_size": 2},
            True,
            "as a pipeline stage has, 16; lower them",
        ),
        (
            {TRAINER + "model_overrides": {"first_last_layers_bf16": True}},
            True,
            "first_last_layers_bf16=True gives the trainer other bfloat16 layers",
        ),
    ],
)
def test_what_nemo_rls_own_do_not_take_is_named(plan, workers, level, change, survives_refit, message):
    (finding,) = check_workers(plan(changes={"nemo_fp8rl.workers": workers} | change), survives_refit)
    assert finding.level == level and message in finding.text


@pytest.mark.parametrize(("workers", "level"), [("auto", "warn"), ("nemo_rl", "error")])
def test_what_no_loop_does_is_named(plan, workers, level):
    changes = {"nemo_fp8rl.workers": workers, "grpo.async_grpo": {"enabled": True}, "grpo.use_dynamic_sampling": True}
    (finding,) = check_workers(plan(changes=changes), True)
    assert finding.level == level
    assert finding.text.startswith("`nemo-fp8rl nemo` refuses it: grpo.use_dynamic_sampling=true")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"policy.generation.colocated": {"enabled": False}, "cluster.num_nodes": 2},
            "resources.gpus_per_node is null",
        ),
        ({"grpo.async_grpo": {"enabled": True}}, "needs policy.generation.vllm_cfg.async_engine=true"),
        (
            {"loss_fn.force_on_policy_ratio": True, "policy.train_global_batch_size": 128},
            "set policy.train_global_batch_size=512",
        ),
        ({"loss_fn.truncated_importance_sampling_ratio": None}, "needs loss_fn.truncated_importance_sampling_ratio"),
        ({"nemo_fp8rl.correction": {"weight": "token"}}, "nemo_fp8rl.correction contradicts loss_fn.use_importance"),
    ],
)
def test_what_nemo_rls_set_up_would_refuse_is_named(plan, changes, message):
    (finding,) = check_workers(plan(changes={"nemo_fp8rl.workers": "nemo_rl"} | changes), True)
    assert finding.level == "error" and message in finding.text


def test_nemo_rls_own_take_an_fp8_recipe_on_main_and_bf16_on_every_version(plan):
    bf16 = {ENGINE + "precision": "bfloat16", TRAINER + "fp8_cfg.enabled": False}
    assert list(check_workers(plan(changes={"nemo_fp8rl.workers": "nemo_rl"}), True)) == []
    assert list(check_workers(plan(changes={"nemo_fp8rl.workers": "nemo_rl"} | bf16), False)) == []


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (
            "Qwen/Qwen3-8B",
            {"nemo_fp8rl": {"align": "vllm"}, "policy__generation__vllm_kwargs": {"attention_backend": "FLASHINFER"}},
            "attention by a backend of vLLM is not aligned on a GPU",
        ),
        ("Qwen/Qwen3-8B", {"policy__megatron_cfg__mtp_num_layers": 1}, "no multi-token prediction"),
        (
            "Qwen/Qwen3-8B",
            {"cluster__gpus_per_node": 3, "policy__megatron_cfg__context_parallel_size": 3},
            "context_parallel_size=3 does not divide the 32 attention heads",
        ),
        ("Qwen/Qwen3-8B", {"policy__generation__val_temperature": 0.5}, "val_temperature"),
        ("Qwen/Qwen3-8B", {"grpo__batch_multiplier": 2}, "grpo.batch_multiplier"),
        ("moonshotai/Moonlight-16B-A3B", {}, "moonshotai/Moonlight-16B-A3B/config.json: model_type 'deepseek_v3'"),
        ("Qwen/Qwen3-8B", {"cluster__gpus_per_node": 64, "policy__generation__vllm_cfg__tensor_parallel_size": 64}, ""),
        (
            "Qwen/Qwen3-30B-A3B",
            {"cluster__gpus_per_node": 2, "policy__megatron_cfg__tensor_model_parallel_size": 2},
            "sequence_parallel=true",
        ),
    ],
)
def test_what_they_do_not_take_is_named(model, changes, message):
    (finding,) = said(model, **changes)
    assert finding[0] == "error" and message in finding[1]


@pytest.mark.parametrize(("changes", "asked"), [(MXFP8, "is_mx=true"), (NVFP4, "pertoken"), (A16, "quant_cfg")])
def test_nemo_rls_own_are_not_refitted_in_the_other_formats(plan, changes, asked):
    (finding,) = check_workers(plan("Qwen/Qwen3-30B-A3B", changes | {"nemo_fp8rl.workers": "nemo_rl"}), True)
    assert finding.level == "error" and asked in finding.text
    assert "FP8 and bfloat16 alone, by its checkpoint engine as well: set nemo_fp8rl.workers=ours" in finding.text


@pytest.mark.parametrize("workers", ["ours", "auto"])
def test_auto_takes_ours_for_the_other_formats(workers):
    mxfp8 = {"policy__megatron_cfg__fp8_cfg": {"enabled": True, "fp8_recipe": "mxfp8"}}
    mxfp8 |= {"policy__generation__vllm_cfg__is_mx": True, "nemo_fp8rl": {"workers": workers}}
    assert said("Qwen/Qwen3-30B-A3B", **mxfp8) == [("ok", "our own trainer and engines take this recipe")]
    (finding,) = said("Qwen/Qwen3.5-9B", **mxfp8)
    assert finding[0] == ("error" if workers == "ours" else "warn")
