"""Known keys of NeMo RL: a misspelled key, or one that only another algorithm has, is refused."""

import pytest
from omegaconf import OmegaConf

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.yaml_tree import read_with_parents, register_resolvers
from nemo_fp8rl.nemo_rl.recipe.checkout import find_checkout
from nemo_fp8rl.nemo_rl.recipe.keys import at
from nemo_fp8rl.nemo_rl.recipe.known_keys import check_known, read_known_keys
from nemo_fp8rl.nemo_rl.recipe.read_recipe import read_recipe
from tests.nemo_rl.conftest import write
from tests.nemo_rl.recipe.conftest import CHILD
from tests.nemo_rl.runs import RECIPE


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
def test_keys_of_examples_classes_and_free_mappings_are_known(recipe, override):
    key = override.lstrip("+").partition("=")[0]
    assert at(recipe(CHILD, override).values, key, "nothing") != "nothing"


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
def test_a_misspelled_key_is_refused_wherever_it_is_set(refusal, key, nearest):
    wanted = f"unknown config key {key}; did you mean {nearest}?"
    for sign in ("+", "++"):
        assert refusal(CHILD, f"{sign}{key}=1") == wanted
    if not key.startswith("nemo_fp8rl"):
        assert refusal(CHILD, f"{key}=1") == wanted
    text = "1"
    for part in reversed(key.split(".")):
        text = f"{{{part}: {text}}}"
    assert refusal(CHILD + text[1:-1] + "\n") == wanted


def test_a_class_outside_the_configuration_makes_no_key_known(refusal):
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


def test_inherited_keys_are_known_and_defaults_is_no_key(checkout, recipe, refusal):
    write(checkout / "examples/configs/base.yaml", "policy: {of_base: 1}\n")
    write(checkout / "examples/configs/recipes/grpo-small.yaml", "defaults: [../grpo.yaml, ../base.yaml]\n")
    assert recipe(CHILD, "+policy.of_base=2").values["policy"]["of_base"] == 2
    assert "unknown config key defaults" in refusal(CHILD, "+defaults=grpo.yaml")


def test_an_override_may_not_add_a_key_that_no_code_reads(checkout, recipe, refusal):
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


def test_a_key_of_our_own_loop_says_where_it_belongs(refusal):
    said = refusal(CHILD, "+grpo.trajectory_sampling.keep_pairs=0.5")
    assert "grpo.trajectory_sampling is for recipes of `nemo-fp8rl train`" in said
    assert said == refusal(CHILD + "grpo: {trajectory_sampling: {keep_pairs: 0.5}}\n")
    assert "cannot put another prompt in the place" in refusal(CHILD, "+grpo.hints.enabled=true")
    assert "it is for grpo.hints" in refusal(CHILD, "+data.train.solution_key=solution")


def test_an_override_marker_below_the_top_is_refused(refusal):
    assert "policy.generation._override_" in refusal(CHILD + "policy: {generation: {_override_: true}}\n")


def test_unreadable_files_of_a_checkout_are_skipped(checkout, recipe):
    package, examples = checkout / "nemo_rl", checkout / "examples/configs"
    (package / ".#config.py").symlink_to(checkout / "nowhere")
    (package / "folder.py").mkdir()
    write(package / "merged.py", "from typing import TypedDict\n<<<<<<< HEAD\n=======\n>>>>>>> other\n")
    (package / "latin.py").write_bytes(b"# TypedDict \xe9")
    (package / "null.py").write_bytes(b"# TypedDict \0")
    write(examples / "date.yaml", "policy: {since: 2025-13-45}\n")
    write(examples / "deep.yaml", "[" * 3000 + "]" * 3000)
    assert recipe(CHILD, "+grpo.val_at_end=true").values["grpo"]["val_at_end"]


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
def test_keys_of_other_algorithms_are_refused_in_a_real_checkout(real_checkout, override):
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
def test_a_key_that_only_examples_have_is_refused(real_checkout, key, meant):
    said = f"NeMo RL's code never reads the key {key}, though an example of NeMo RL has it"
    with pytest.raises(UserError) as caught:
        read_recipe(RECIPE, [f"+{key}=4"])
    if find_checkout().version.startswith("0.7"):  # which has neither the second nor what the first means
        assert str(caught.value).startswith((said, f"unknown config key {key}"))
    else:
        assert str(caught.value).startswith(said) and meant in str(caught.value)


@pytest.mark.nemo_rl
def test_a_misspelled_key_is_refused_in_a_shipped_recipe(real_checkout):
    path = real_checkout / "examples/configs/grpo_math_8B_megatron_fp8.yaml"
    with pytest.raises(UserError, match=r"did you mean policy.generation.vllm_cfg.use_deep_gemm\?"):
        read_recipe(path, ["+policy.generation.vllm_cfg.use_deepgemm=true"])
