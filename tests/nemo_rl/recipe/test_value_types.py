"""Values of a recipe for NeMo RL: one of another type is named, in every command that reads the recipe."""

from pathlib import Path

import pytest

from nemo_fp8rl.cli import main
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.nemo_rl.recipe.read_recipe import load_recipe
from nemo_fp8rl.nemo_rl.recipe.value_types import TYPES, normalize
from tests.nemo_rl.conftest import write

CHILD = "defaults: ${oc.env:NEMO_RL_SRC}/examples/configs/grpo.yaml\n"
COMMANDS = (
    ("doctor",),
    ("train", "--config"),
    ("nemo", "--config"),
    ("launch", "slurm", "--dry-run", "--config"),
)


@pytest.fixture
def path(checkout, tmp_path) -> Path:
    return write(tmp_path / "recipe.yaml", CHILD)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("~cluster", "cluster"),
        ("~policy.generation", "policy.generation"),
        ("policy.train_global_batch_size=0", "policy.train_global_batch_size"),
        ("cluster.gpus_per_node='8|/tmp/evil'", "cluster.gpus_per_node"),  # bash ran what stood behind the |
    ],
)
def test_every_command_says_it_in_one_line(path, capsys, command, override, key):
    assert main([*command, str(path), override]) == 2
    said = capsys.readouterr().err
    assert key in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "override",
    [
        "~loss_fn",
        "policy.tokenizer=null",
        "cluster.num_nodes=null",
        "cluster.num_nodes='2\n#SBATCH --wrap=x'",
        "cluster.gpus_per_node=-1",
        "policy.generation.vllm_cfg.num_last_layers_in_bf16=two",
        "policy.generation.vllm_cfg.quantization_ignored_layer_kws=[1]",
        "++policy.generation.colocated.resources.num_nodes='1|x'",
        "policy.generation.vllm_cfg.tensor_parallel_size='2|x'",
        "grpo.num_prompts_per_step=null",
        "++grpo.max_num_steps=null",
        "++grpo.val_num_generations_per_prompt=0",
        "policy.megatron_cfg.tensor_model_parallel_size=0",
        "policy.max_total_sequence_length=0",
        "policy.megatron_cfg.pipeline_model_parallel_size=-1",
        "policy.megatron_cfg.pipeline_model_parallel_size=100000000",
        "policy.train_global_batch_size=abc",
        "policy.train_global_batch_size=true",
        "policy.train_global_batch_size=1.5",
        "policy.megatron_cfg.env_vars=x",
        "policy.megatron_cfg.optimizer=null",
        "policy.generation.colocated=x",
        "policy.generation.colocated.resources=[1]",
        "policy.generation.vllm_cfg.gpu_memory_utilization=high",
        "policy.generation.vllm_cfg.gpu_memory_utilization=.nan",
        "policy.generation.vllm_cfg.gpu_memory_utilization=1.5",
        "policy.model_name=5",
        "cluster=5",
        f"grpo.seed={'9' * 4000}",
        f"grpo.seed={'9' * 5000}",
    ],
)
def test_a_value_of_another_type_is_named(path, override):
    key = override.lstrip("~+").partition("=")[0]
    with pytest.raises(UserError) as caught:
        load_recipe(path, [override])
    assert key in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_whole_number_may_be_text_or_a_quotient(path):
    path.write_text(CHILD + "cluster: {num_nodes: '${div:8,4}'}\npolicy: {train_global_batch_size: '64'}\n")
    values = load_recipe(path).values
    sizes = (values["cluster"]["num_nodes"], values["policy"]["train_global_batch_size"])
    assert sizes == (2, 64) and {type(size) for size in sizes} == {int}


def test_what_a_disabled_block_leaves_out_is_not_asked_for(path):
    off = ("policy.megatron_cfg.enabled=false", "~policy.megatron_cfg.optimizer")
    assert not load_recipe(path, off).values["policy"]["megatron_cfg"]["enabled"]


def test_without_a_megatron_block_there_is_no_megatron_trainer(path, capsys):
    assert main(["train", "--config", str(path), "~policy.megatron_cfg"]) == 2
    assert "policy.megatron_cfg.enabled=False" in capsys.readouterr().err


def test_a_block_stands_before_its_keys():
    """So that it is the block that is named where the block is wrong."""
    keys = list(TYPES)
    for key in keys:
        block = key.rpartition(".")[0]
        assert not block or keys.index(block) < keys.index(key)


@pytest.mark.parametrize(
    ("key", "spelling", "value"),
    [
        ("policy.generation.top_k", -1, None),
        ("policy.generation.val_top_k", -1, None),
        ("policy.generation.top_k", 50, 50),
        ("grpo.val_period", -1, 0),
        ("grpo.val_period", 10, 10),
        ("data.max_input_seq_length", None, 96),
        ("data.max_input_seq_length", 64, 64),
    ],
)
def test_a_value_has_one_spelling(key, spelling, value):
    generation = {"top_k": None, "val_top_k": None, "vllm_cfg": {"max_model_len": 96}}
    policy = {"max_total_sequence_length": 128, "generation": generation}
    values = {"policy": policy, "grpo": {"val_period": 5}, "data": {"max_input_seq_length": 32}}
    with_spelling, expected = (nested_set(values, key, given) for given in (spelling, value))
    before = repr(with_spelling)
    assert normalize(with_spelling) == expected
    assert repr(with_spelling) == before


def nested_set(values: dict, key: str, value: object) -> dict:
    name, _, rest = key.partition(".")
    return {**values, name: nested_set(values[name], rest, value) if rest else value}


def test_without_a_limit_prompts_may_fill_the_trainers_sequence():
    values = {"policy": {"max_total_sequence_length": 128}, "data": {"max_input_seq_length": None}}
    assert normalize(values)["data"] == {"max_input_seq_length": 128}


def test_minus_one_is_all_tokens_in_every_command_that_reads_the_recipe(checkout, tmp_path):
    write(checkout / "examples/configs/known.yaml", "grpo: {}\npolicy: {generation: {top_k: null}}\n")
    path = write(tmp_path / "recipe.yaml", CHILD)
    assert load_recipe(path, ["++policy.generation.top_k=-1"]).values["policy"]["generation"]["top_k"] is None
