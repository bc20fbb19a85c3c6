"""What is run, on how many nodes: from recipes of both loops."""

import pytest

from nemo_fp8rl.cli import main
from nemo_fp8rl.commands.launch.job import plan
from nemo_fp8rl.commands.launch.settings import read_settings
from nemo_fp8rl.common.errors import UserError
from tests.commands.launch.conftest import ON_JSONL
from tests.conftest import COLOCATED, RECIPES
from tests.nemo_rl.runs import needs_checkout

TINY = RECIPES / "tiny_cpu.yaml"


def test_a_recipe_of_our_loop_is_trained_and_continued_by_it():
    job = plan(TINY, ["grpo.seed=3"], read_settings(None, ["nodes=3", "generation_nodes=1"]))
    assert job.command == ("train", "--restartable", "--config", str(TINY), "grpo.seed=3")
    assert (job.name, job.nodes, job.train_nodes, job.generation_nodes) == ("tiny-cpu", 3, 2, 1)
    assert job.run_id.startswith("tiny-cpu-")


@pytest.mark.nemo_rl
@needs_checkout
def test_a_recipe_of_nemo_rls_says_its_nodes():
    recipe = RECIPES / "nemo_rl" / "qwen3-30b-a3b-fp8-e2e-4n8g.yaml"
    job = plan(recipe, [], read_settings(None))
    assert job.command == ("nemo", "--config", str(recipe))
    assert (job.nodes, job.generation_nodes, job.gpus_per_node) == (4, 0, 8)
    apart = ("policy.generation.colocated.enabled=false", "++policy.generation.colocated.resources.num_nodes=3")
    job = plan(recipe, apart, read_settings(None))
    assert (job.train_nodes, job.generation_nodes) == (1, 3)
    with pytest.raises(UserError, match=r"nodes=2, but cluster.num_nodes says 4"):
        plan(recipe, [], read_settings(None, ["nodes=2"]))


@pytest.mark.nemo_rl
@needs_checkout
@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        (
            "qwen3-8b-bf16",
            "env.math.math_verify_impl=dapo_math_verify: in `nemo-fp8rl train` rewards follow math-verify's own rules",
        ),
        ("llama3.1-8b-instruct-bf16", "data.train: `nemo-fp8rl train` reads"),
    ],
)
def test_what_our_loop_would_refuse_is_not_queued(recipe, says, capsys):
    path = RECIPES / "nemo_rl" / f"{recipe}.yaml"
    for place in ("local", "slurm", "k8s"):
        site = ("--set", "kubernetes.image=i", "--set", "kubernetes.volumes=[{claim: c, path: /runs}]")
        gpus = ("--set", "gpus_per_node=8") if place == "local" else ()  # not those of this machine
        assert main(["launch", place, "--loop", "train", "--config", str(path), "--dry-run", *site, *gpus]) == 2
        said = capsys.readouterr()
        assert says in said.err and not said.out
    assert plan(path, [], read_settings(None)).command[0] == "nemo"


@pytest.mark.nemo_rl
@needs_checkout
@pytest.mark.parametrize("recipe", ["qwen3-8b-fp8-e2e-kv", "llama3.1-8b-instruct-fp8-e2e", "qwen3-30b-a3b-bf16-4n8g"])
def test_on_jsonl_data_our_loop_takes_recipes_of_nemo_rls(recipe):
    job = plan(RECIPES / "nemo_rl" / f"{recipe}.yaml", ON_JSONL, read_settings(None), loop="train")
    assert job.command[:2] == ("train", "--restartable")


def test_defaults_come_before_the_overrides_of_the_user():
    job = plan(TINY, ["grpo.seed=3"], read_settings(None))
    assert job.command_with("a=1")[-2:] == ("a=1", "grpo.seed=3")


@pytest.mark.parametrize(
    ("overrides", "changes", "message"),
    [
        (["grpo.sed=3"], [], "grpo.sed"),
        ([], ["nodes=2", "generation_nodes=2"], "leaves none to train on"),
        (COLOCATED, ["nodes=2", "generation_nodes=1"], "generation_nodes=1, but .*colocated.enabled=true puts engines"),
        ([], ["name=My Run"], "lower-case letters"),
        ([], ["name=a;rm -rf"], "lower-case letters"),
        ([], [f"name={'a' * 39}"], "at most 38"),
        (["policy.model_name='a\0b'"], [], "not text|cannot be read"),
        (["policy.model_name=a\udcffb"], [], "not text|cannot be read"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_submitted(overrides, changes, message):
    with pytest.raises(UserError, match=message):
        plan(TINY, overrides, read_settings(None, changes))
