"""Recipes: inheritance, interpolation, overrides; and anything wrong is one sentence that names the key."""

import dataclasses
import re
from pathlib import Path

import pytest

from nemo_fp8rl.algorithms.correction_config import PRESETS, Rule
from nemo_fp8rl.algorithms.gates import GateConfig
from nemo_fp8rl.commands import arguments
from nemo_fp8rl.commands.launch.settings import read_settings
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.fp8rl_schema import Fp8RlConfig
from nemo_fp8rl.config.recipe import load, to_yaml
from nemo_fp8rl.config.schema import Config
from tests.refusals import refusal_of

CONF = Path(__file__).parents[2] / "conf"
MINIMAL = "policy: {model_name: some/model}\ndata: {train: {data_path: some/data.jsonl}}\n"
SUMS, FLOAT32_SUM = "policy.megatron_cfg.distributed_data_parallel_config", "reduce_scatter_with_fp32_accumulation"

OPTIMIZER = "policy.megatron_cfg.optimizer"


@pytest.fixture
def folder(tmp_path_factory) -> Path:
    """Its path holds no word of a test's name, which a message could be taken for."""
    return tmp_path_factory.mktemp("x")


@pytest.fixture
def recipe(folder):
    """recipe(text, *overrides) -> the Config of a file with this text."""

    def make(text: str = MINIMAL, *overrides: str) -> Config:
        (folder / "recipe.yaml").write_text(text)
        return load(folder / "recipe.yaml", overrides)

    return make


@pytest.fixture
def refusal(recipe):
    """refusal(text, *overrides) -> what the user is told; one line."""

    def make(text: str = MINIMAL, *overrides: str) -> str:
        return refusal_of(recipe, text, *overrides)

    return make


# What is right


def test_a_leading_tilde_is_the_home_folder(recipe, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    cfg = recipe(MINIMAL, "logger.log_dir=~/runs", "policy.model_name=~/model", "data.train.data_path=~/x~.jsonl")
    assert (cfg.logger.log_dir, cfg.policy.model_name) == ("/home/me/runs", "/home/me/model")
    assert cfg.data.train.data_path == "/home/me/x~.jsonl"
    assert cfg.checkpointing.checkpoint_dir.startswith("/home/me/runs/")
    assert arguments.path("~/foo") == Path("/home/me/foo")
    assert read_settings(None, ["runs_dir=~/launched"]).runs_dir == "/home/me/launched"


def test_an_entry_of_a_list_is_not_advised_as_an_override(refusal):
    assert refusal(MINIMAL, "nemo_fp8rl.gates=[{metric: gen_kl_error, max: 1}]").endswith("set it in the recipe")


def test_a_variable_that_is_not_set_is_named(refusal, monkeypatch):
    monkeypatch.delenv("NOT_HERE", raising=False)
    says = "the environment variable NOT_HERE is not set; set it"
    assert f"data.train.data_path: {says}" in refusal(MINIMAL, "data.train.data_path=${oc.env:NOT_HERE}/x.jsonl")
    assert f"`defaults:`: defaults: {says}" in refusal("defaults: ${oc.env:NOT_HERE}/x.yaml\n")


@pytest.mark.parametrize(
    "path", sorted([*CONF.glob("*.yaml"), *CONF.glob("qerl/*.yaml"), *CONF.glob("infir2/*.yaml")]), ids=lambda p: p.name
)
def test_every_shipped_recipe_loads_and_round_trips(path, folder):
    cfg = load(path)
    (folder / "config.yaml").write_text(to_yaml(cfg))
    assert load(folder / "config.yaml") == cfg


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_on_the_command_line_is_written_out_and_round_trips(preset, folder):
    cfg = load(CONF / "tiny_cpu.yaml", [f"nemo_fp8rl.correction.preset={preset}"])
    assert cfg.nemo_fp8rl.correction == dataclasses.replace(PRESETS[preset], preset=preset)
    (folder / "config.yaml").write_text(to_yaml(cfg))
    assert load(folder / "config.yaml") == cfg


def test_the_minimal_recipe_gets_every_default(recipe):
    cfg = recipe()
    assert cfg.policy.tokenizer.name == "some/model"
    assert cfg.policy.logprob_batch_size == cfg.policy.train_micro_batch_size == 4
    assert cfg.policy.generation.vllm_cfg.max_model_len == cfg.policy.max_total_sequence_length == 512
    assert cfg.checkpointing.checkpoint_dir == "runs/default/checkpoints"
    assert cfg.data.train.seed == cfg.grpo.seed == 42
    assert cfg.data.validation is None
    assert cfg.nemo_fp8rl == Fp8RlConfig(flow="fp8_e2e", align="auto", scale_format="pow2")
    assert cfg.rollout_batch_size == 32 * 16


def test_the_recipe_is_frozen(recipe):
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe().grpo.seed = 3


def test_overrides_win_over_the_file_and_later_ones_over_earlier_ones(recipe):
    text = MINIMAL + "grpo: {max_num_steps: 1, seed: 5}\n"
    cfg = recipe(text, "grpo.max_num_steps=2", "+grpo.max_num_steps=3", "policy.megatron_cfg.optimizer.lr=3e-4")
    assert (cfg.grpo.max_num_steps, cfg.grpo.seed, cfg.policy.megatron_cfg.optimizer.lr) == (3, 5, 3e-4)


def test_an_override_may_hold_equals_signs_mappings_and_null(recipe):
    cfg = recipe(
        MINIMAL,
        "policy.model_name=a=b",
        "policy.tokenizer.chat_template_kwargs={enable_thinking: false}",
        "loss_fn.truncated_importance_sampling_type=null",
        "loss_fn.truncated_importance_sampling_ratio=null",
        "data.validation.data_path=held_out.jsonl",
    )
    assert cfg.policy.model_name == "a=b"
    assert cfg.policy.tokenizer.chat_template_kwargs == {"enable_thinking": False}
    assert cfg.loss_fn.truncated_importance_sampling_ratio is None
    assert cfg.data.validation.data_path == "held_out.jsonl"


def test_interpolations_and_products_are_resolved(recipe):
    text = MINIMAL + (
        "grpo: {num_prompts_per_step: 6, num_generations_per_prompt: 4, seed: '${sft.seed}'}\n"
        "sft: {seed: 9}\nlogger: {log_dir: 'runs/${nemo_fp8rl.flow}-${grpo.seed}'}\n"
    )
    product = "policy.train_global_batch_size=${mul:${grpo.num_prompts_per_step},${grpo.num_generations_per_prompt}}"
    cfg = recipe(text, product)
    assert cfg.policy.train_global_batch_size == 24
    assert cfg.logger.log_dir == "runs/fp8_e2e-9"
    assert cfg.checkpointing.checkpoint_dir == "runs/fp8_e2e-9/checkpoints"


def test_defaults_are_merged_depth_first_in_order_and_the_file_itself_last(folder):
    def write(name: str, text: str) -> Path:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        return folder / name

    every = ["max_num_steps", "val_period", "max_val_samples", "seed"]
    write("base.yaml", MINIMAL + "grpo: {" + ", ".join(f"{key}: 1" for key in every) + "}\n")
    write("sub/left.yaml", "defaults: ../base.yaml\ngrpo: {val_period: 2, max_val_samples: 2, seed: 2}\n")
    write("sub/right.yaml", "grpo: {max_val_samples: 3, seed: 3}\n")
    top = write("top.yaml", "defaults: [sub/left.yaml, sub/right.yaml]\ngrpo: {seed: 4}\n")
    assert [getattr(load(top).grpo, key) for key in every] == [1, 2, 3, 4]

    # A parent's own parents come before its later sisters, and a file named twice is no cycle.
    write("sub/right.yaml", "defaults: ../base.yaml\ngrpo: {max_val_samples: 3, seed: 3}\n")
    assert [getattr(load(top).grpo, key) for key in every] == [1, 1, 3, 4]


@pytest.mark.parametrize(
    "text",
    [
        "yes",
        "null",
        "~",
        "1e3",
        "012",
        "0x10",
        "2020-01-01",
        "a: b",
        "#x",
        " edge ",
        "a\nb",
        "'",
        '"',
        "ü €",
        "{}",
        "%",
    ],
)
def test_any_text_value_round_trips_through_yaml(recipe, folder, text):
    cfg = recipe()
    train = dataclasses.replace(cfg.data.train, data_path=text)
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, train=train))
    (folder / "config.yaml").write_text(to_yaml(cfg))
    assert load(folder / "config.yaml") == cfg


@pytest.mark.parametrize("value", [1e-8, 0.1, 1e300, 123456.789])
def test_numbers_round_trip_to_the_bit(recipe, folder, value):
    cfg = recipe(MINIMAL, f"policy.megatron_cfg.optimizer.adam_eps={value!r}")
    assert cfg.policy.megatron_cfg.optimizer.adam_eps == value
    (folder / "config.yaml").write_text(to_yaml(cfg))
    assert load(folder / "config.yaml") == cfg


# What is wrong


@pytest.mark.parametrize(
    ("override", "key", "nearest"),
    [
        ("grpo.max_num_step=3", "grpo.max_num_step", "grpo.max_num_steps"),
        ("lr=1e-6", "lr", "policy.megatron_cfg.optimizer.lr"),
        ("grpo.flow=bf16", "grpo.flow", "nemo_fp8rl.flow"),
        ("nemo_fp8.flow=bf16", "nemo_fp8", "nemo_fp8rl"),
        (
            "policy.generation.vllm_cfg.max_len=3",
            "policy.generation.vllm_cfg.max_len",
            "policy.generation.vllm_cfg.max_model_len",
        ),
        ("loss_fn.ratio_clip_maximum=3", "loss_fn.ratio_clip_maximum", "loss_fn.ratio_clip_max"),
        ("data.validation.path=x", "data.validation.path", "data.validation.data_path"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(refusal, override, key, nearest):
    assert refusal(MINIMAL, override) == f"unknown config key {key}; did you mean {nearest}?"


@pytest.mark.parametrize(
    ("override", "key", "known"),
    [
        (
            "policy.megatron_cfg.scheduler.quux=1",
            "policy.megatron_cfg.scheduler.quux",
            "lr_decay_style, lr_wsd_decay_iters",
        ),
        ("quux.seed=1", "quux", "policy, data, grpo"),
        ("__pydantic_config__=1", "__pydantic_config__", "policy, data, grpo"),
    ],
)
def test_a_key_like_no_other_is_named_with_the_keys_known_there(refusal, override, key, known):
    assert refusal(MINIMAL, override).startswith(f"unknown config key {key}; known here: {known}")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("grpo.max_num_steps=abc", "grpo.max_num_steps"),
        ("grpo.max_num_steps=1.5", "grpo.max_num_steps"),
        ("grpo.max_num_steps=true", "grpo.max_num_steps"),
        ("grpo.max_num_steps=[1]", "grpo.max_num_steps"),
        ("grpo.max_num_steps={a: 1}", "grpo.max_num_steps"),
        ("grpo.normalize_rewards=maybe", "grpo.normalize_rewards"),
        ("grpo.normalize_rewards=2", "grpo.normalize_rewards"),
        ("policy.model_name=[a]", "policy.model_name"),
        ("policy.model_name=3", "policy.model_name"),
        ("policy.megatron_cfg.optimizer.lr=fast", "policy.megatron_cfg.optimizer.lr"),
        ("policy.megatron_cfg.optimizer.lr=true", "policy.megatron_cfg.optimizer.lr"),
        ("policy.train_micro_batch_size=null", "policy.train_micro_batch_size"),
        ("policy.max_total_sequence_length=[64]", "policy.max_total_sequence_length"),
        ("policy.megatron_cfg.optimizer.optimizer=sgd", "policy.megatron_cfg.optimizer.optimizer"),
        ("policy.precision=fp16", "policy.precision"),
        ("policy.tokenizer.chat_template_kwargs=3", "policy.tokenizer.chat_template_kwargs"),
        ("policy.megatron_cfg.env_vars.OMP_NUM_THREADS=1", "policy.megatron_cfg.env_vars.OMP_NUM_THREADS"),
        ("nemo_fp8rl.flow=fp8", "nemo_fp8rl.flow"),
        ("nemo_fp8rl.scale_format=e8m0", "nemo_fp8rl.scale_format"),
        ("cluster.backend=slurm", "cluster.backend"),
        ("loss_fn.truncated_importance_sampling_type=icepop", "loss_fn.truncated_importance_sampling_type"),
        ("policy=5", "policy"),
        ("policy.generation=[1]", "policy.generation"),
        ("data.validation=some/file.jsonl", "data.validation"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(refusal, override, key):
    assert f"{key}=" in refusal(MINIMAL, override) or f"{key} must be" in refusal(MINIMAL, override)


@pytest.mark.parametrize(
    "key",
    [
        "policy",
        "policy.model_name",
        "policy.precision",
        "data",
        "data.train",
        "data.train.data_path",
        "grpo.val_period",
    ],
)
def test_null_is_refused_where_a_value_is_required(refusal, key):
    assert key in refusal(MINIMAL, f"{key}=null")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("", "policy.model_name"),
        ("data: {train: {data_path: d}}", "policy.model_name"),
        ("policy: {model_name: m}", "data.train.data_path"),
        ("policy: {model_name: m}\ndata: {train: {}}", "data.train.data_path"),
        (MINIMAL + "grpo: {seed: '???'}", "grpo.seed"),
        ("policy: {model_name: '???'}\ndata: {train: {data_path: d}}", "policy.model_name"),
        ("policy: {model_name: m}\ndata: {train: {data_path: d}, validation: {}}", "data.validation.data_path"),
    ],
)
def test_a_missing_value_is_named(refusal, text, key):
    assert key in refusal(text)


@pytest.mark.parametrize("override", ["grpo.seed", "3", "=3", "+=3", "", "--seed"])
def test_an_override_that_is_not_key_value_is_quoted(refusal, override):
    assert repr(override) in refusal(MINIMAL, override)


@pytest.mark.parametrize(
    "override", ["grpo.seed=[1", "grpo.seed={", "grpo.seed=: :", "grpo.seed=${", "grpo.seed=${mul:", "grpo.seed='"]
)
def test_an_override_that_is_not_yaml_is_quoted(refusal, override):
    assert "grpo.seed" in refusal(MINIMAL, override)


@pytest.mark.parametrize(
    "override",
    ["grpo.seed=${nowhere}", "grpo.seed=${nowhere:1}", "grpo.seed=${grpo.nowhere}", "grpo.seed=${mul:nowhere,2}"],
)
def test_an_interpolation_that_leads_nowhere_is_named(refusal, override):
    assert "nowhere" in refusal(MINIMAL, override)


@pytest.mark.parametrize("override", ["grpo.seed=${grpo.seed}", "grpo.seed=${mul:2}"])
def test_an_interpolation_that_cannot_be_computed_is_refused(refusal, override):
    assert "seed" in refusal(MINIMAL, override)


@pytest.mark.parametrize(
    "text",
    [
        "policy: [1",
        "\tpolicy: 3",
        MINIMAL + MINIMAL,
        "policy: !!python/object:os.system x",
        "grpo: {seed: !!int ''}",
        "grpo: {val_at_start: !!bool maybe}",
        MINIMAL + "grpo: {seed: '${'}",
        "- policy\n- data\n",
        "5",
        "a\0b",
    ],
)
def test_malformed_yaml_names_the_file(refusal, text):
    assert "recipe.yaml" in refusal(text)


@pytest.mark.parametrize("key", ["3", "null", "2020-01-01", "true", "text"])
def test_a_key_that_is_no_block_is_refused(refusal, key):
    assert re.search("unknown config key|cannot be read as YAML|recipe.yaml: ", refusal(f"{key}: 3\n{MINIMAL}"))


def test_files_that_cannot_be_read_are_named(folder):
    (folder / "latin.yaml").write_bytes("policy: ü".encode("latin-1"))
    for path in (folder / "nowhere.yaml", folder, folder / "latin.yaml"):
        with pytest.raises(UserError) as caught:
            load(path)
        assert str(path) in str(caught.value)


def test_a_missing_parent_is_named(refusal):
    assert "nowhere.yaml" in refusal(f"defaults: nowhere.yaml\n{MINIMAL}")
    assert "nowhere.yaml" in refusal(f"defaults: [nowhere.yaml]\n{MINIMAL}")


@pytest.mark.parametrize("value", ["5", "[5]", "{a: b}", "[[a]]", "[null]"])
def test_defaults_that_name_no_file_are_refused(refusal, value):
    assert "defaults" in refusal(f"defaults: {value}\n{MINIMAL}")


def test_an_empty_defaults_key_names_no_parent(recipe):
    assert recipe(f"defaults:\n{MINIMAL}") == recipe()


def test_a_cycle_of_defaults_is_refused(folder):
    (folder / "self.yaml").write_text(f"defaults: self.yaml\n{MINIMAL}")
    (folder / "one.yaml").write_text(f"defaults: two.yaml\n{MINIMAL}")
    (folder / "two.yaml").write_text("defaults: [../" + folder.name + "/one.yaml]\n")
    for name in ("self", "one", "two"):
        with pytest.raises(UserError, match="cycle"):
            load(folder / f"{name}.yaml")


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["policy.train_global_batch_size=7"], ["policy.train_global_batch_size", "grpo.num_prompts_per_step"]),
        (["policy.train_global_batch_size=1024"], ["policy.train_global_batch_size", "512"]),
        (["policy.train_micro_batch_size=3"], ["policy.train_micro_batch_size", "policy.train_global_batch_size"]),
        (
            ["cluster.backend=ray", "cluster.train_ranks=3", "policy.train_micro_batch_size=512"],
            ["cluster.train_ranks=3", "policy.train_global_batch_size=512"],
        ),
        (["policy.precision=float32"], ["nemo_fp8rl.flow=fp8_e2e", "policy.precision"]),
        (["policy.precision=float32", "nemo_fp8rl.flow=fp8_rollout"], ["nemo_fp8rl.flow=fp8_rollout"]),
        (
            ["policy.precision=float16", "nemo_fp8rl.flow=nvfp4_e2e"],
            ["nemo_fp8rl.flow=nvfp4_e2e", "policy.precision=bfloat16", "float16"],
        ),
        (["policy.precision=float16", "nemo_fp8rl.fp8_param=true"], ["nemo_fp8rl.fp8_param=true", "float16"]),
        (
            ["policy.precision=float16", "policy.generation.vllm_cfg.kv_cache_dtype=fp8"],
            ["policy.generation.vllm_cfg.kv_cache_dtype=fp8", "float16", "kv_cache_dtype=auto"],
        ),
        ([f"{OPTIMIZER}.loss_scale=8"], [f"{OPTIMIZER}.loss_scale=8", "policy.precision=float16"]),
        (
            ["policy.precision=float16", f"{OPTIMIZER}.initial_loss_scale=8", f"{OPTIMIZER}.min_loss_scale=16"],
            [f"{OPTIMIZER}.initial_loss_scale=8", f"{OPTIMIZER}.min_loss_scale=16"],
        ),
        (
            [
                "policy.precision=float16",
                f"{OPTIMIZER}.use_precision_aware_optimizer=true",
                "policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32=false",
            ],
            ["grad_reduce_in_fp32=false", "policy.precision=float16", "use_precision_aware_optimizer"],
        ),
        (["cluster.train_ranks=2"], ["cluster.train_ranks", "cluster.backend=ray"]),
        (["cluster.generation_engines=2"], ["cluster.generation_engines", "cluster.backend=ray"]),
        (
            ["cluster.backend=ray", "cluster.min_generation_engines=2"],
            ["cluster.generation_engines=1 is not between cluster.min_generation_engines=2 and", "=1: change one"],
        ),
        (
            ["cluster.backend=ray", "cluster.generation_engines=3", "cluster.max_generation_engines=2"],
            ["cluster.generation_engines=3", "cluster.max_generation_engines=2"],
        ),
        (
            ["cluster.max_generation_engines=2"],
            ["cluster.max_generation_engines=2: engines that join and leave", "set cluster.backend=ray, or leave"],
        ),
        (
            [
                *("cluster.backend=ray", "cluster.max_generation_engines=2"),
                *("policy.generation.colocated.enabled=true",),
                *("policy.generation.vllm_cfg.sleep_level=1", "policy.megatron_cfg.offload_between_phases=true"),
            ],
            ["colocated.enabled=false and policy.generation.vllm_cfg.sleep_level=0, or leave both keys out"],
        ),
        (
            ["policy.generation.colocated.enabled=true", "cluster.backend=ray", "cluster.generation_engines=2"],
            ["policy.generation.colocated.enabled=true", "have 2 processes", "cluster.train_ranks=1"],
        ),
        (["nemo_fp8rl.gates=[{metric: gen_kl_error, max: 1}]"], ["nemo_fp8rl.gates[0].action is required; set it in"]),
        (["nemo_fp8rl.workers=nemo_rl"], ["nemo_fp8rl.workers=nemo_rl", "nemo-fp8rl nemo"]),
        (
            ["policy.generation.vllm_cfg.env_vars.CUDA_VISIBLE_DEVICES='1'"],
            ["policy.generation.vllm_cfg.env_vars.CUDA_VISIBLE_DEVICES", "environment of the whole run"],
        ),
        (
            ["policy.megatron_cfg.env_vars.HF_TOKEN=hf_abc"],
            ["policy.megatron_cfg.env_vars.HF_TOKEN looks like a secret", "set HF_TOKEN in the environment"],
        ),
        (
            ["policy.megatron_cfg.env_vars={A: x, B: x}", "policy.generation.vllm_cfg.env_vars={A: x, B: y}"],
            ["megatron_cfg.env_vars.B=x", "vllm_cfg.env_vars.B=y", "cluster.backend=ray"],
        ),
        (
            ["policy.generation.colocated.enabled=true", "policy.generation.vllm_cfg.sleep_level=1"],
            ["policy.generation.vllm_cfg.sleep_level", "policy.megatron_cfg.offload_between_phases=true"],
        ),
        (["policy.generation.vllm_cfg.max_model_len=513"], ["policy.generation.vllm_cfg.max_model_len=513", "512"]),
        (["grpo.num_generations_per_prompt=1"], ["grpo.num_generations_per_prompt"]),
        (["loss_fn.truncated_importance_sampling_type=tis"], ["loss_fn.use_importance_sampling_correction=true"]),
        (
            ["loss_fn.use_importance_sampling_correction=true", "loss_fn.truncated_importance_sampling_type=tis"],
            ["loss_fn.truncated_importance_sampling_ratio"],
        ),
        (
            ["loss_fn.use_importance_sampling_correction=true", "nemo_fp8rl.correction.preset=tis"],
            ["nemo_fp8rl.correction", "loss_fn.use_importance_sampling_correction"],
        ),
        (["nemo_fp8rl.correction.preset=best"], ["nemo_fp8rl.correction.preset", "seq-mask-tis"]),
        (["nemo_fp8rl.correction={preset: icepop, weight: none}"], ["nemo_fp8rl.correction.weight", "preset=icepop"]),
        (["nemo_fp8rl.correction={preset: icepop, weight_max: 2.0}"], ["correction.weight_max", "preset=icepop"]),
        (["nemo_fp8rl.correction.reject=[{statistic: token_k3}]"], ["nemo_fp8rl.correction.reject[0]", "max"]),
        (["nemo_fp8rl.gates=[{metric: reward, max: 1, action: warn}]"], ["nemo_fp8rl.gates[0].metric", "gen_kl_error"]),
        (
            [
                "loss_fn.use_kl_in_reward=true",
                "grpo.adv_estimator.name=reinforce_plus_plus",
                "loss_fn.reference_policy_kl_penalty=0",
            ],
            ["loss_fn.use_kl_in_reward", "loss_fn.reference_policy_kl_penalty"],
        ),
        (["loss_fn.use_kl_in_reward=true"], ["loss_fn.use_kl_in_reward", "grpo.adv_estimator.name"]),
        (
            [
                "loss_fn.use_kl_in_reward=true",
                "grpo.adv_estimator.name=reinforce_plus_plus",
                "loss_fn.reference_policy_kl_penalty=0.01",
                "loss_fn.reference_policy_kl_type=k1",
                "policy.generation.top_k=5",
            ],
            ["loss_fn.use_kl_in_reward=true", "top_k=null"],
        ),
        (
            [
                "loss_fn.use_kl_in_reward=true",
                "grpo.adv_estimator.name=reinforce_plus_plus",
                "loss_fn.reference_policy_kl_penalty=0.01",
            ],
            ["loss_fn.use_kl_in_reward=true", "loss_fn.reference_policy_kl_type=k3", "set it to k1"],
        ),
        (["cluster.engine_timeout_seconds=1e7"], ["cluster.engine_timeout_seconds", "1000000"]),
        (
            ["loss_fn.force_on_policy_ratio=true", "policy.train_global_batch_size=256"],
            ["loss_fn.force_on_policy_ratio=true", "policy.train_global_batch_size=512"],
        ),
        (
            ["grpo.reward_shaping={enabled: true, overlong_buffer_length: 0}"],
            ["grpo.reward_shaping.overlong_buffer_length"],
        ),
        (
            ["grpo.reward_shaping={enabled: true, overlong_buffer_penalty: .inf}"],
            ["grpo.reward_shaping.overlong_buffer_penalty must be a finite number above 0, got inf"],
        ),
        (
            ["grpo.reward_shaping={enabled: true, overlong_buffer_length: 9, max_response_length: 8}"],
            ["grpo.reward_shaping.overlong_buffer_length=9", "grpo.reward_shaping.max_response_length=8"],
        ),
        (["grpo.reward_shaping.stop_properly_penalty_coef=2"], ["grpo.reward_shaping.stop_properly_penalty_coef=2"]),
        # Megatron asserts these three when the optimizer is built.
        (
            ["policy.megatron_cfg.scheduler.lr_warmup_iters=1000"],
            ["policy.megatron_cfg.scheduler.lr_warmup_iters", "policy.megatron_cfg.scheduler.lr_decay_iters"],
        ),
        (["policy.megatron_cfg.optimizer.min_lr=1"], ["policy.megatron_cfg.optimizer.min_lr"]),
        (["nemo_fp8rl.fp8_param=true", "nemo_fp8rl.flow=bf16"], ["nemo_fp8rl.fp8_param", "nemo_fp8rl.flow=bf16"]),
        (["nemo_fp8rl.weight_block=line"], ["nemo_fp8rl.weight_block=line", "nemo_fp8rl.flow=fp8_e2e"]),
        (
            ["nemo_fp8rl.scale_format=fp32", "nemo_fp8rl.flow=mxfp8_e2e"],
            ["nemo_fp8rl.scale_format=fp32", "nemo_fp8rl.flow=mxfp8_e2e"],
        ),
        (["policy.megatron_cfg.scheduler.lr_warmup_init=1"], ["policy.megatron_cfg.scheduler.lr_warmup_init"]),
        (["nemo_fp8rl.fp8_param=true", "nemo_fp8rl.flow=mxfp8_e2e"], ["nemo_fp8rl.fp8_param", "flow=mxfp8_e2e"]),
        (["nemo_fp8rl.backward=native", "nemo_fp8rl.flow=nvfp4_rollout"], ["nemo_fp8rl.backward=native", "_e2e"]),
        (
            ["nemo_fp8rl.backward=native", "nemo_fp8rl.flow=nvfp4_a16_e2e"],
            ["nemo_fp8rl.backward=native", "flow=nvfp4_a16_e2e", "set it to auto, dequantized or high_precision"],
        ),
        (
            ["nemo_fp8rl.fp4.estimator=differentiable", "nemo_fp8rl.flow=mxfp8_e2e"],
            ["nemo_fp8rl.fp4.estimator", "straight_through, or flow=nvfp4_e2e"],
        ),
        (
            ["nemo_fp8rl.fp4.clamp_quantile=0.99", "nemo_fp8rl.flow=nvfp4_a16_e2e"],
            ["nemo_fp8rl.fp4.clamp_quantile=0.99", "null, or flow=nvfp4_e2e"],
        ),
        (
            [
                "nemo_fp8rl.fp4.clamp_quantile=0.99",
                "nemo_fp8rl.flow=nvfp4_e2e",
                "cluster.backend=ray",
                "policy.generation.vllm_cfg.tensor_parallel_size=2",
            ],
            ["nemo_fp8rl.fp4.clamp_quantile=0.99", "policy.megatron_cfg.tensor_model_parallel_size=1", "one size"],
        ),
        (["nemo_fp8rl.fp4.clamp_quantile=0.3"], ["nemo_fp8rl.fp4.clamp_quantile=0.3"]),
        (
            ["nemo_fp8rl.noise.enabled=true", "nemo_fp8rl.noise.sigma_end=0.1"],
            ["nemo_fp8rl.noise.sigma_end=0.1", "nemo_fp8rl.noise.sigma_start=0.01"],
        ),
        (
            ["nemo_fp8rl.noise.enabled=true", "nemo_fp8rl.noise.where=both", "grpo.async_grpo.enabled=true"],
            ["nemo_fp8rl.noise.where=both", "grpo.async_grpo.enabled", "set where=engine"],
        ),
        (
            ["nemo_fp8rl.grad_reduce=fp8", f"{SUMS}.grad_reduce_in_fp32=false", f"{SUMS}.{FLOAT32_SUM}=true"],
            ["nemo_fp8rl.grad_reduce=fp8", f"{SUMS}.{FLOAT32_SUM}=true", "nemo_fp8rl.grad_reduce=auto"],
        ),
        ([f"{SUMS}.{FLOAT32_SUM}=true"], [f"{SUMS}.{FLOAT32_SUM}=true", "grad_reduce_in_fp32=true", "to false"]),
        (
            ["grpo.trajectory_sampling.keep_pairs=0.5", "grpo.num_generations_per_prompt=15"],
            ["grpo.trajectory_sampling", "grpo.num_generations_per_prompt=15 must be even"],
        ),
        (
            ["grpo.trajectory_sampling.keep_pairs=0.3", "grpo.num_generations_per_prompt=16"],
            ["grpo.trajectory_sampling.keep_pairs=0.3 of the 8 pairs", "set it to 0.25"],
        ),
        (
            ["grpo.trajectory_sampling={keep_pairs: 0.5, shuffle_rounds: 3}"],
            ["grpo.trajectory_sampling.shuffle_rounds=3", "grpo.num_prompts_per_step=32 times 4"],
        ),
        (
            ["grpo.trajectory_sampling.keep_pairs=0.5"],
            ["policy.train_global_batch_size=512", "the 256 samples", "grpo.trajectory_sampling.keep_pairs)"],
        ),
        (
            [
                "grpo.trajectory_sampling.shuffle_rounds=8",
                "grpo.adv_estimator.name=reinforce_plus_plus",
                "loss_fn.use_kl_in_reward=true",
                "loss_fn.reference_policy_kl_type=k1",
            ],
            ["grpo.trajectory_sampling", "loss_fn.use_kl_in_reward=true", "set it to false"],
        ),
        (["grpo.hints.shares=[]"], ["grpo.hints.shares=[]", "between 0 and 1"]),
        (["grpo.hints.shares=[0.5, 0.5]"], ["grpo.hints.shares=[0.5, 0.5] must grow strictly"]),
        (["grpo.hints.shares=[0.0, 0.5]"], ["grpo.hints.shares=[0.0, 0.5]"]),
        (["grpo.hints.shares=[0.5, 1.0]"], ["grpo.hints.shares=[0.5, 1.0]", "the whole solution"]),
        (["grpo.hints.shares=[.nan]"], ["grpo.hints.shares=[nan]"]),
        (["grpo.hints.template='{hint}'"], ["grpo.hints.template='{hint}'", "has not so {prompt}"]),
        (["grpo.hints.template='{prompt}{hint}{hint}'"], ["grpo.hints.template", "has not so {hint}"]),
    ],
)
def test_values_that_contradict_each_other_are_named(refusal, overrides, keys):
    said = refusal(MINIMAL, *overrides)
    assert [key for key in keys if key not in said] == []


@pytest.mark.parametrize(
    ("overrides", "backward"),
    [
        (["flow=fp8_e2e"], "native"),
        (["flow=mxfp8_e2e"], "native"),
        (["flow=nvfp4_e2e"], "dequantized"),
        (["flow=nvfp4_a16_e2e", "fp4.estimator=differentiable"], "dequantized, differentiable estimator"),
        (["flow=nvfp4_e2e", "backward=native"], "native, Hadamard transform, stochastic rounding"),
        (["flow=nvfp4_e2e", "backward=native", "fp4.hadamard=false"], "native, stochastic rounding"),
        (
            ["flow=nvfp4_e2e", "backward=high_precision", "fp4.clamp_quantile=0.99"],
            "high precision, activations clamped at quantile 0.99",
        ),
    ],
)
def test_the_backward_that_a_run_records_is_the_resolved_one(recipe, overrides, backward):
    assert recipe(MINIMAL, *(f"nemo_fp8rl.{key}" for key in overrides)).nemo_fp8rl.describe_backward() == backward


@pytest.mark.parametrize("flow", ["bf16", "fp8_rollout", "fp8_e2e"])
def test_float16_is_allowed_beside_fp8(recipe, flow):
    assert recipe(MINIMAL, "policy.precision=float16", f"nemo_fp8rl.flow={flow}").policy.precision == "float16"


def test_float32_is_allowed_in_the_bf16_flow(recipe):
    assert recipe(MINIMAL, "policy.precision=float32", "nemo_fp8rl.flow=bf16").policy.precision == "float32"


@pytest.mark.parametrize(
    "override",
    [
        "grpo.num_prompts_per_step=0",
        "grpo.max_num_steps=-1",
        "grpo.trajectory_sampling.keep_pairs=0",
        "grpo.trajectory_sampling.shuffle_rounds=1",
        "grpo.max_val_samples=0",
        "sft.max_num_steps=0",
        "checkpointing.save_period=0",
        "checkpointing.keep_top_k=0",
        "policy.train_global_batch_size=0",
        "policy.train_micro_batch_size=0",
        "policy.logprob_batch_size=-4",
        "policy.logprob_chunk_size=0",
        "policy.max_total_sequence_length=0",
        "policy.generation.max_new_tokens=0",
        "policy.generation.temperature=0",
        "policy.generation.temperature=.nan",
        "policy.generation.temperature=.inf",
        "policy.generation.temperature=2.5",
        "policy.generation.temperature=0.001",
        "policy.generation.val_temperature=-1",
        "policy.generation.val_temperature=.nan",
        "policy.generation.val_temperature=2.5",
        "policy.generation.val_temperature=0.001",
        "policy.generation.stop_strings=[a,'']",
        "policy.generation.vllm_cfg.kv_cache_memory_gib=.nan",
        "policy.generation.vllm_cfg.gpu_memory_utilization=7",
        "policy.megatron_cfg.optimizer.lr=-1.0e-6",
        "policy.megatron_cfg.optimizer.lr=.nan",
        "policy.megatron_cfg.optimizer.weight_decay=-1",
        "policy.megatron_cfg.optimizer.adam_beta1=1.5",
        "policy.megatron_cfg.scheduler.lr_decay_iters=0",
        "cluster.train_ranks=0",
        "cluster.generation_engines=-1",
    ],
)
def test_a_value_out_of_its_range_is_named(refusal, override):
    assert override.partition("=")[0] in refusal(MINIMAL, override)


def test_lists_of_blocks_are_typed_and_their_keys_checked(recipe):
    cfg = recipe(
        MINIMAL,
        "nemo_fp8rl.correction={weight: sequence, reject: [{statistic: seq_max_k1, min: 1e-4}]}",
        "nemo_fp8rl.gates=[{metric: gen_kl_error, max: 0.015, action: stop}]",
    )
    assert cfg.nemo_fp8rl.correction.reject == (Rule("seq_max_k1", None, 1e-4),)
    assert cfg.nemo_fp8rl.gates == (GateConfig("gen_kl_error", 0.015, "stop"),)
    with pytest.raises(UserError, match=r"nemo_fp8rl\.gates\[0\]\.maximum; did you mean nemo_fp8rl\.gates\[0\]\.max\?"):
        recipe(MINIMAL, "nemo_fp8rl.gates=[{metric: gen_kl_error, maximum: 1}]")
    with pytest.raises(UserError, match=r"nemo_fp8rl\.gates must be a list of blocks"):
        recipe(MINIMAL, "nemo_fp8rl.gates={metric: gen_kl_error}")


@pytest.mark.parametrize("override", ["data=[1]", "policy=[1]", f"grpo.seed=0x{'f' * 5000}", f"policy={'[' * 3000}"])
def test_an_override_that_does_not_fit_is_named_and_cut_off(refusal, override):
    said = refusal(MINIMAL, override)
    assert override.partition("=")[0] in said
    assert len(said) < 500


@pytest.mark.parametrize(
    "text", ["policy: {_override_: '${nope}'}", f"policy: {'{a: ' * 3000}1{'}' * 3000}", "a: &a {b: *a}"]
)
def test_a_file_that_cannot_be_resolved_is_named(refusal, text):
    assert "recipe.yaml" in refusal(text)
