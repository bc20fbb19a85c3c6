"""Recipes for NeMo RL, read without it: inheritance, Hydra's overrides, and no key that it does not know."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from nemo_fp8rl.cli import main
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.schema import Fp8RlConfig
from nemo_fp8rl.config.yaml_tree import flat, read_with_parents, register_resolvers
from nemo_fp8rl.nemo_rl.recipe.checkout import find_checkout
from nemo_fp8rl.nemo_rl.recipe.keys import at
from nemo_fp8rl.nemo_rl.recipe.known_keys import check_known, read_known_keys
from nemo_fp8rl.nemo_rl.recipe.precision import Precision
from nemo_fp8rl.nemo_rl.recipe.read_recipe import NemoRlRecipe, load_recipe, read_recipe
from tests.nemo_rl.conftest import OF_MAIN, write
from tests.nemo_rl.runs import RECIPE, environment, needs_checkout

CHILD = "defaults: ${oc.env:NEMO_RL_SRC}/examples/configs/grpo.yaml\n"
FP8 = (
    CHILD
    + """
policy:
  megatron_cfg: {fp8_cfg: {enabled: true}, env_vars: {NVTE_FP8_BLOCK_SCALING_FP32_SCALES: '0'}}
  generation:
    vllm_cfg: {precision: fp8, pow2_weight_scaling_factors: true, pow2_activation_scaling_factors: true}
"""
)


@pytest.fixture
def recipe(checkout, tmp_path):
    """recipe(text, *overrides) -> what `load` makes of a file with this text."""

    def make(text: str = CHILD, *overrides: str) -> NemoRlRecipe:
        return load_recipe(write(tmp_path / "recipe.yaml", text), overrides)

    return make


@pytest.fixture
def refusal(recipe):
    """refusal(text, *overrides) -> the one line that the user is told."""

    def make(text: str = CHILD, *overrides: str) -> str:
        with pytest.raises(UserError) as caught:
            recipe(text, *overrides)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return make


# Inheritance and overrides


def test_a_child_differs_from_its_parent_in_what_it_says(recipe):
    values = recipe(CHILD + "policy: {train_micro_batch_size: 2}\n").values
    assert values["policy"]["train_mb_tokens"] == 1024
    assert values["policy"]["generation"]["vllm_cfg"]["precision"] == "bfloat16"
    assert values["grpo"]["num_generations_per_prompt"] == 16


def test_the_override_marker_replaces_a_block_instead_of_merging_it(recipe):
    assert recipe(CHILD + "env: {dapo: {num_workers: 1}}\n").values["env"].keys() == {"math", "dapo"}
    assert recipe(CHILD + "env: {_override_: true, dapo: {num_workers: 1}}\n").values["env"].keys() == {"dapo"}


@pytest.mark.parametrize(
    ("resolver", "value"), [("mul:6,4", 24), ("add:6,4", 10), ("div:6,4", 1.5), ("max:6,4", 6)], ids=str
)
def test_resolvers_of_nemo_rl(recipe, resolver, value):
    assert recipe(CHILD + f"grpo: {{seed: '${{{resolver}}}'}}\n").values["grpo"]["seed"] == value


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("grpo.seed=7", "grpo.seed", 7),
        ("policy.megatron_cfg.env_vars=null", "policy.megatron_cfg.env_vars", None),
        (r"+policy.hf_config_overrides.rope=x\=y", "policy.hf_config_overrides.rope", "x=y"),
        ("+policy.hf_config_overrides.rope={type:yarn,factor: 4.0}", "policy.hf_config_overrides.rope.type", "yarn"),
        ("+policy.hf_config_overrides.rope={a:'b,c:d'}", "policy.hf_config_overrides.rope.a", "b,c:d"),
        ("+policy.hf_config_overrides.x=[1,2]", "policy.hf_config_overrides.x", [1, 2]),
        ("++grpo.seed=1e-6", "grpo.seed", 1e-6),
        ("+grpo.val_at_end=true", "grpo.val_at_end", True),
        ("grpo.seed=${grpo.num_prompts_per_step}", "grpo.seed", 32),
        ("+env.my-env.x=1", "env.my-env.x", 1),
        ("++checkpointing.checkpoint_dir=10:00:00:00", "checkpointing.checkpoint_dir", "10:00:00:00"),
    ],
)
def test_overrides_in_hydras_grammar(recipe, override, key, value):
    assert at(recipe(CHILD, override).values, key, "nothing") == value


def test_a_key_is_removed(recipe):
    assert "seed" not in recipe(CHILD, "~grpo.seed").values["grpo"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grpo.val_at_end=true", "grpo.val_at_end is not in the recipe; add it with +grpo.val_at_end=true"),
        ("+grpo.seed=3", "grpo.seed is already in the recipe; change it with grpo.seed=3"),
        ("~grpo.val_at_end", "grpo.val_at_end is not in the recipe"),
        ("grpo.seed", "is not of the form key=value"),
        ("=3", "is not of the form key=value"),
        ("grpo.seed=1,2", "sweep"),
        ("grpo.seed=[1", "cannot be read: a comma or ] is missing at character 3; quote the value"),
        ("grpo.seed=x=y", "cannot be read: '=' is not expected at character 2"),
        ("grpo.seed=int(3)", "functions and casts"),
        ("grpo.seed=" + "[" * 5000, "too many brackets"),
        ("grpo.seed=${grpo.nowhere}", "nowhere"),
    ],
)
def test_an_override_that_hydra_would_not_take(refusal, override, message):
    assert message in refusal(CHILD, override)


# Keys


@pytest.mark.parametrize(
    "override",
    [
        "+policy.megatron_cfg.env_vars.ANYTHING='1'",
        "+env.my_environment={a: 1}",
        "+policy.megatron_cfg.recompute_modules=[moe]",
        "+policy.generation.top_k=5",
        "+policy.generation.vllm_cfg.is_mx=false",
        "+policy.generation.vllm_cfg.pow2_weight_scaling_factors=false",
        "++policy.generation.vllm_cfg.quantization_ignored_layer_kws=[o_proj]",
    ],
)
def test_keys_of_examples_of_classes_and_of_free_mappings_are_known(recipe, override):
    key = override.lstrip("+").partition("=")[0]
    assert at(recipe(CHILD, override).values, key, "nothing") != "nothing"


@pytest.mark.parametrize(
    "override",
    [
        "+policy.megatron_cfg.env_vars.WANDB_API_KEY=s3cret",
        "++policy.generation.vllm_cfg.env_vars.HF_TOKEN=s3cret",
        "+env.my_environment={env_vars: {PROXY: 'http://u:s3cret@h'}}",
        "++logger.mlflow.tracking_uri=http://u:s3cret@h",
    ],
)
def test_a_secret_is_refused_and_not_shown(refusal, override):
    """A job's script holds its overrides, a manifest the recipe."""
    said = refusal(CHILD, override)
    assert "looks like a secret" in said or "holds a password" in said
    assert "in the environment" in said and "s3cret" not in said


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("policy.megatron_cfg.fp8_cfg.enable", "policy.megatron_cfg.fp8_cfg.enabled"),
        ("policy.generation.vllm_cfg.precison", "policy.generation.vllm_cfg.precision"),
        (
            "policy.generation.vllm_cfg.pow2_weights_scaling_factors",
            "policy.generation.vllm_cfg.pow2_weight_scaling_factors",
        ),
        ("policy.fp8_recipe", "policy.megatron_cfg.fp8_cfg.fp8_recipe"),
        ("nemo_fp8rl.kvs", "nemo_fp8rl.kv"),
        ("nemo_fp8rl.refit.mod", "nemo_fp8rl.refit.mode"),
    ],
)
def test_a_misspelled_key_is_refused_in_the_file_and_with_every_sign(refusal, key, nearest):
    wanted = f"unknown config key {key}; did you mean {nearest}?"
    for sign in ("+", "++"):
        assert refusal(CHILD, f"{sign}{key}=1") == wanted
    if not key.startswith("nemo_fp8rl"):
        assert refusal(CHILD, f"{key}=1") == wanted
    text = "1"
    for part in reversed(key.split(".")):
        text = f"{{{part}: {text}}}"
    assert refusal(CHILD + text[1:-1] + "\n") == wanted


def test_a_class_that_the_configuration_does_not_lead_to_counts_for_nothing(refusal):
    assert "unknown config key grpo.unreachable" in refusal(CHILD, "+grpo.unreachable=1")


@pytest.mark.parametrize(
    ("key", "unknown"),
    [
        ("sft.max_num_epochs", "sft"),
        ("grpo_like.seed", "grpo_like"),
        ("policy.of_sft", "policy.of_sft"),
        ("loss_fn.of_sft", "loss_fn.of_sft"),
        ("grpo.of_sft", "grpo.of_sft"),
    ],
)
def test_a_key_that_another_algorithm_alone_has_is_refused(refusal, key, unknown):
    assert refusal(CHILD, f"+{key}=1").startswith(f"unknown config key {unknown}; ")


def test_what_an_example_inherits_is_known_and_the_list_of_its_parents_is_no_key(checkout, recipe, refusal):
    write(checkout / "examples/configs/base.yaml", "policy: {of_base: 1}\n")
    write(checkout / "examples/configs/recipes/grpo-small.yaml", "defaults: [../grpo.yaml, ../base.yaml]\n")
    assert recipe(CHILD, "+policy.of_base=2").values["policy"]["of_base"] == 2
    assert "unknown config key defaults" in refusal(CHILD, "+defaults=grpo.yaml")


def test_a_key_of_an_example_that_no_code_reads_is_refused_where_an_override_adds_it(checkout, recipe, refusal):
    """What a recipe of NeMo RL's has of them stays, as its own would not load otherwise."""
    of_example = "{num_val_at_end: true, read: 1}"
    write(checkout / "examples/configs/recipes/grpo-small.yaml", f"defaults: ../grpo.yaml\ngrpo: {of_example}\n")
    write(checkout / "nemo_rl/reads.py", "grpo_config.read\n")
    assert refusal(CHILD, "+grpo.num_val_at_end=true") == (
        "NeMo RL's code never reads the key grpo.num_val_at_end, though an example of NeMo RL has it; "
        "did you mean grpo.val_at_end?"
    )
    assert recipe(CHILD, "+grpo.read=2").values["grpo"]["read"] == 2
    of_recipe = recipe(CHILD + f"grpo: {of_example}\n", "++grpo.num_val_at_end=false")
    assert of_recipe.values["grpo"]["num_val_at_end"] is False


def test_a_marker_below_the_top_which_nemo_rl_ignores_is_refused(refusal):
    assert "policy.generation._override_" in refusal(CHILD + "policy: {generation: {_override_: true}}\n")


@pytest.mark.parametrize(
    "text",
    [
        "cluster: ${nope}",
        "cluster: {gpus_per_node: '${nope}'}",
        "cluster: [1]",
        "policy: {_override_: '${nope}'}",
        "policy: [1]",
        f"policy: {'{a: ' * 3000}1{'}' * 3000}",
        "policy: &policy {generation: *policy}",
    ],
    ids=lambda text: text[:40],
)
def test_a_tree_that_cannot_be_read_or_merged_is_one_line(refusal, text):
    assert "recipe.yaml" in refusal(CHILD + text + "\n")


# Our block


def test_our_block_is_typed_and_takes_flow_and_scales_from_nemo_rls_keys(recipe):
    ours = recipe(FP8 + "nemo_fp8rl: {kv: rollout, gates: [{metric: kl, max: 1, action: warn}]}\n").fp8rl
    assert (ours.flow, ours.scale_format, ours.kv, ours.gates[0].metric) == ("fp8_e2e", "pow2", "rollout", "kl")
    assert recipe(CHILD).fp8rl == Fp8RlConfig(flow="bf16")


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("{flow: fp8_e2e}", "nemo_fp8rl.flow follows from policy.megatron_cfg.fp8_cfg.enabled"),
        ("{scale_format: pow2}", "nemo_fp8rl.scale_format follows from"),
        ("{kv: both}", "nemo_fp8rl.kv='both'"),
        ("{refit: {bucket_bytes: many}}", "nemo_fp8rl.refit.bucket_bytes='many'"),
        ("{gates: [{metric: ess, max: 1, action: warn}]}", "nemo_fp8rl.gates[0].metric=ess"),
        ("{correction: {preset: best}}", "nemo_fp8rl.correction.preset='best'"),
        ("3", "nemo_fp8rl must be a block"),
    ],
)
def test_a_wrong_value_in_our_block_is_named(refusal, block, message):
    assert message in refusal(FP8 + f"nemo_fp8rl: {block}\n")


def test_a_disagreement_of_precisions_is_refused_by_load_alone(checkout, tmp_path):
    path = write(tmp_path / "recipe.yaml", CHILD + "policy: {megatron_cfg: {fp8_cfg: {enabled: true}}}\n")
    assert read_recipe(path).values["policy"]["megatron_cfg"]["fp8_cfg"]["enabled"]
    with pytest.raises(UserError, match=r"policy.megatron_cfg.fp8_cfg.enabled=true"):
        load_recipe(path)


def test_a_null_of_which_a_number_is_made_is_named(refusal):
    assert (
        "policy.train_mb_tokens: policy.train_micro_batch_size is null, and a number is made of it; set it"
    ) in refusal(CHILD, "policy.train_micro_batch_size=null")


# The checkout


def test_a_relative_path_is_the_working_directorys(checkout, recipe, tmp_path, monkeypatch):
    """Not of the folder of the recipe that inherits from it."""
    monkeypatch.chdir(checkout.parent)
    monkeypatch.setenv("NEMO_RL_SRC", checkout.name)
    elsewhere = write(tmp_path / "elsewhere/recipe.yaml", CHILD)
    assert load_recipe(elsewhere).values["grpo"]["seed"] == 42


def test_the_warm_up_takes_no_recipe_for_nemo_rl(checkout, tmp_path, monkeypatch, capsys):
    """Nor where its parent's checkout is not there."""
    arguments = ["sft", "--config", str(write(tmp_path / "r.yaml", CHILD)), "--output", str(tmp_path / "out")]
    assert main(arguments) == 2
    monkeypatch.delenv("NEMO_RL_SRC")
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("r.yaml is a recipe for NeMo RL, and sft takes those of") == 2


def test_without_a_checkout_one_sentence_says_how_to_get_one(refusal, monkeypatch, tmp_path):
    monkeypatch.delenv("NEMO_RL_SRC")
    assert refusal().startswith("NEMO_RL_SRC is not set: clone https://github.com/NVIDIA-NeMo/RL")
    monkeypatch.setenv("NEMO_RL_SRC", str(tmp_path / "nowhere"))
    assert "nowhere is no checkout of NeMo RL" in refusal()


@pytest.mark.parametrize(("version", "fits"), [((0, 7, 3), True), ((0, 6, 0), False), ((0, 8, 0), False)])
def test_versions(checkout, recipe, refusal, version, fits):
    parts = zip(("MAJOR", "MINOR", "PATCH"), version, strict=True)
    write(checkout / "nemo_rl/package_info.py", "\n".join(f"{name} = {part}" for name, part in parts))
    if fits:
        assert recipe().checkout.version == "0.7.3"
    else:
        assert f"is NeMo RL {'.'.join(map(str, version))}; supported are 0.7.x and main" in refusal()


def test_main_calls_itself_0_6_0(main_checkout, recipe):
    assert recipe().checkout.version == "0.6.0"


def test_a_main_whose_engines_process_fp8_weights_after_a_refit_is_refused(main_checkout, refusal):
    write(main_checkout / "nemo_rl/weight_sync/__init__.py", "")
    write(main_checkout / "nemo_rl/models/generation/vllm/vllm_backend.py", OF_MAIN.replace("_lifecycle", ""))
    assert "is NeMo RL 0.6.0; supported are 0.7.x and main of August 2026" in refusal()


def test_a_recipe_of_our_own_loop_is_told_apart():
    with pytest.raises(UserError, match="recipes of `nemo-fp8rl train` are checked when they run"):
        read_recipe(Path(__file__).parents[3] / "conf/tiny_cpu.yaml")


def test_reading_needs_neither_torch_nor_nemo_rl():
    code = "import sys, nemo_fp8rl.nemo_rl.recipe.read_recipe; print(sorted({'torch', 'nemo_rl'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"


def test_what_cannot_be_read_in_a_checkout_is_passed_over(checkout, recipe):
    package, examples = checkout / "nemo_rl", checkout / "examples/configs"
    (package / ".#config.py").symlink_to(checkout / "nowhere")
    (package / "folder.py").mkdir()
    write(package / "merged.py", "from typing import TypedDict\n<<<<<<< HEAD\n=======\n>>>>>>> other\n")
    (package / "latin.py").write_bytes(b"# TypedDict \xe9")
    (package / "null.py").write_bytes(b"# TypedDict \0")
    write(examples / "date.yaml", "policy: {since: 2025-13-45}\n")
    write(examples / "deep.yaml", "[" * 3000 + "]" * 3000)
    assert recipe(CHILD, "+grpo.val_at_end=true").values["grpo"]["val_at_end"]


# The real thing


@pytest.mark.nemo_rl
def test_no_key_of_a_shipped_recipe_is_refused(real_checkout):
    register_resolvers()
    known = read_known_keys(find_checkout())
    recipes = sorted(real_checkout.glob("examples/configs/**/grpo*.yaml"))
    assert len(recipes) > 50
    for path in recipes:
        tree = read_with_parents(path)
        check_known(OmegaConf.to_container(tree), known, "of the test")
        OmegaConf.to_container(tree, resolve=True)


@pytest.mark.nemo_rl
@pytest.mark.parametrize(
    "override",
    [
        "generation.vllm_cfg.precision=bfloat16",  # policy. was forgotten
        "loss_fn.kl_type=k1",
        "tokenizer.name=x",
        "sft.max_num_steps=2",
        "teacher.model_name=x",
        "eval.seed=1",
    ],
)
def test_keys_of_other_algorithms_are_refused_in_a_recipe_for_grpo(real_checkout, override):
    with pytest.raises(UserError, match="unknown config key"):
        read_recipe(RECIPE, [f"+{override}"])


@pytest.mark.nemo_rl
@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("grpo.num_val_generations_per_prompt", "did you mean grpo.val_num_generations_per_prompt?"),
        ("policy.megatron_cfg.first_last_layers_bf16", "remove it"),
    ],
)
def test_a_key_that_its_own_recipes_have_in_vain_is_refused(real_checkout, key, meant):
    said = f"NeMo RL's code never reads the key {key}, though an example of NeMo RL has it"
    with pytest.raises(UserError) as caught:
        read_recipe(RECIPE, [f"+{key}=4"])
    if find_checkout().version == "0.7.0":  # which has neither the second nor what the first means
        assert str(caught.value).startswith((said, f"unknown config key {key}"))
    else:
        assert str(caught.value).startswith(said) and meant in str(caught.value)


@pytest.mark.nemo_rl
def test_a_misspelled_key_is_refused_in_a_shipped_recipe(real_checkout):
    path = real_checkout / "examples/configs/grpo_math_8B_megatron_fp8.yaml"
    with pytest.raises(UserError, match=r"did you mean policy.generation.vllm_cfg.use_deep_gemm\?"):
        read_recipe(path, ["+policy.generation.vllm_cfg.use_deepgemm=true"])


SHIPPED = sorted((Path(__file__).parents[3] / "conf/nemo_rl").glob("*.yaml"))
OF_FP8 = re.compile(r"\s*\w*(fp8|precision|deep_gemm|pow2|kv_cache_dtype|FP32_SCALES)\w*: *[^#\s]", re.IGNORECASE)


def test_every_fp8_key_of_our_recipes_has_a_comment():
    lines = [(path.name, line) for path in SHIPPED for line in path.read_text().splitlines() if OF_FP8.match(line)]
    assert len(lines) > 20
    assert [line for line in lines if " # " not in line[1]] == []


@pytest.mark.nemo_rl
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_recipe_holds_what_differs_from_its_parent_alone(real_checkout, path):
    own = yaml.safe_load(path.read_text())
    parent = path.parent / own.pop("defaults").replace("${oc.env:NEMO_RL_SRC}", str(real_checkout))
    inherited = flat(OmegaConf.to_container(read_with_parents(parent)))
    assert [key for key, value in flat(own).items() if inherited.get(key, ...) == value] == []


@pytest.mark.nemo_rl
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_our_recipes_load(real_checkout, path):
    recipe = load_recipe(path)
    fp8, loss_fn = "-fp8-" in path.name, recipe.values["loss_fn"]
    assert recipe.precision == Precision("fp8_e2e" if fp8 else "bf16", "pow2", "kv" in path.stem)
    assert loss_fn["use_importance_sampling_correction"]
    assert (loss_fn["truncated_importance_sampling_type"], loss_fn["truncated_importance_sampling_ratio"]) == ("tis", 2)
    assert recipe.values["checkpointing"]["checkpoint_dir"] == f"results/{path.stem}"
    assert recipe.values["checkpointing"]["save_period"] <= 100


@pytest.mark.nemo_rl
@needs_checkout
def test_nemo_rls_own_config_classes_take_our_recipes(tmp_path):
    """By its own loader, all in one process, as the import takes a while; and they do refuse something.

    From a folder without the prompt files, which the recipes name as from the root of its checkout.
    """
    command = [sys.executable, "-c", VALIDATE, *map(str, SHIPPED)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment(tmp_path) | {"HF_HOME": "/nowhere"},
        check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    *taken, refused, missing = (line for line in done.stdout.splitlines() if line.startswith("RECIPE "))
    assert taken == [f"RECIPE {path.stem} True True" for path in SHIPPED]
    assert "data.default.prompt_file=none.txt: no such file" in missing
    assert "policy.train_global_batch_size: input should be a valid integer" in refused


VALIDATE = """
import sys
from pathlib import Path
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.nemo_rl.compat import prepare
from nemo_fp8rl.nemo_rl.run.master_config import load_master_config

grpo = prepare()
for path in map(Path, sys.argv[1:]):
    config = load_master_config(grpo, path, [])
    files = [name for key, name in config.data["default"].items() if key.endswith("prompt_file") and name]
    print("RECIPE", path.stem, isinstance(config, grpo.MasterConfig), all(Path(name).is_file() for name in files))
for wrong in ("policy.train_global_batch_size=many", "data.default.prompt_file=none.txt"):
    try:
        load_master_config(grpo, path, [wrong])
    except UserError as error:
        print("RECIPE", error)
"""


@pytest.mark.nemo_rl
def test_a_twin_differs_in_precision_alone(real_checkout):
    names = ("precision", "kv_cache_dtype", "enabled", "checkpoint_dir", "log_dir", "name")
    for path in SHIPPED:
        if "-bf16" not in path.name:
            continue
        stem = path.stem.replace("-bf16", "-fp8-e2e")
        fp8 = next(other for other in SHIPPED if other.stem in (stem, f"{stem}-kv"))
        changed = {key.rpartition(".")[2] for key in differences(load_recipe(path).values, load_recipe(fp8).values)}
        assert {"precision", "enabled"} <= changed <= set(names)


def differences(left: dict, right: dict, prefix: str = "") -> list[str]:
    """Dotted keys at which two trees differ."""
    found = []
    for key in left.keys() | right.keys():
        one, other = left.get(key), right.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            found += differences(one, other, f"{prefix}{key}.")
        elif one != other:
            found.append(prefix + key)
    return found
