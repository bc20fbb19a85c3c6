"""Bad input fails with exit code 2 and one line on stderr that names the fix, before any model loads."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from nemo_fp8rl.cli import main
from nemo_fp8rl.commands.arguments import _make_parser, parse
from nemo_fp8rl.commands.tiny_model import make_tiny, write_model

CONF = Path(__file__).parent.parent / "conf" / "tiny_cpu.yaml"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@pytest.fixture(scope="session")
def project(tmp_path_factory) -> Path:
    """A folder with model/ and data.jsonl; no test changes it."""
    with warnings.catch_warnings(action="ignore"):  # internal warnings of Megatron
        import nemo_fp8rl.commands.sft  # noqa: F401

    folder = tmp_path_factory.mktemp("x") / "add"
    make_tiny(folder, "add")
    return folder


@pytest.fixture
def folder(tmp_path_factory) -> Path:
    """A folder whose path has no word of a test's name, so that an assertion cannot match the path."""
    return tmp_path_factory.mktemp("x")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Set what `main` would otherwise set for the rest of the process."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def refused_message(capsys) -> Callable[..., str]:
    """refused_message(*arguments) returns the only line on stderr of a command that must fail with exit code 2."""

    def run(*arguments: str | Path) -> str:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert code == 2
        assert err.startswith("nemo-fp8rl: ")
        assert len(err.splitlines()) == 1
        assert err.endswith("\n")
        assert "Traceback" not in out + err
        return err

    return run


@pytest.fixture
def train(refused_message, project, folder) -> Callable[..., str]:
    """train(*arguments) returns the message that refuses a run of the project; every test has a new run directory."""

    def run(*arguments: str) -> str:
        return refused_message(*train_arguments(project, folder), *arguments)

    return run


def train_arguments(project: Path, folder: Path) -> list[str]:
    paths = (f"policy.model_name={project}/model", f"data.train.data_path={project}/data.jsonl")
    short = ("grpo.max_num_steps=1", "grpo.val_at_start=false", "logger.tensorboard_enabled=false")
    return ["train", "--config", str(CONF), *paths, *short, f"logger.log_dir={folder}/run"]


def changed_model(project: Path, folder: Path, **changes: object) -> Path:
    """A copy of the project's model with other values in config.json."""
    shutil.copytree(project / "model", folder / "model")
    config = json.loads((folder / "model/config.json").read_text())
    (folder / "model/config.json").write_text(json.dumps(config | changes))
    return folder / "model"


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(record if isinstance(record, str) else json.dumps(record) + "\n" for record in records))
    return path


# The recipe


def test_a_recipe_of_another_command_is_answered_with_that_command(refused_message, folder):
    right = "is a comparison of flows, which `nemo-fp8rl train` does not take: nemo-fp8rl compare compare/tiny"
    assert right in refused_message("train", "compare/tiny")
    assert "is a comparison of flows, which `nemo-fp8rl nemo`" in refused_message("nemo", "compare/tiny")
    assert "`nemo-fp8rl compare` does not take: nemo-fp8rl train tiny_cpu" in refused_message("compare", "tiny_cpu")
    copy = write(folder / "mine.yaml", CONF.read_text())
    assert f"`nemo-fp8rl compare` does not take: nemo-fp8rl train {copy}" in refused_message("compare", str(copy))
    assert "seeds=[1] is no key of a run: use --seeds" in refused_message("compare", "compare/tiny", "seeds=[1]")


def test_a_run_in_the_place_of_a_recipe_is_answered_with_its_recipe(refused_message, folder):
    assert f"{folder} is a folder; give the path of a YAML file" in refused_message("train", str(folder))
    write(folder / "config.yaml", "{}")
    assert f"the recipe of this run is {folder}/config.yaml" in refused_message("train", str(folder))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("tensor_model_parallel_size=3", 3), "num_attention_heads=4 of self_attn.q_proj; sizes that fit: 1, 2"),
        (("pipeline_model_parallel_size=4", 4), "num_hidden_layers=2; sizes that fit: 1, 2"),
        (("expert_model_parallel_size=2", 2), "the model has no experts; set it to 1"),
        (("tensor_model_parallel_size=2", 3), "cluster.train_ranks=3 is not a multiple of"),
    ],
    ids=["heads", "layers", "experts", "ranks"],
)
def test_a_layout_that_the_model_or_the_ranks_do_not_fit(train, keys, message):
    key, ranks = keys
    sizes = ("policy.train_global_batch_size=12", "policy.train_micro_batch_size=1", "grpo.num_prompts_per_step=3")
    refusal = train("cluster.backend=ray", f"cluster.train_ranks={ranks}", f"policy.megatron_cfg.{key}", *sizes)
    assert message in refusal


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("grpo.max_num_step=3", "unknown config key grpo.max_num_step; did you mean grpo.max_num_steps?"),
        ("grpo.max_num_steps=many", "grpo.max_num_steps='many'"),
        ("grpo.max_num_steps", "'grpo.max_num_steps' is not of the form key=value"),
        ("grpo.max_num_steps=[1", "grpo.max_num_steps"),
        ("grpo.num_prompts_per_step=0", "grpo.num_prompts_per_step"),
        ("policy.train_global_batch_size=500", "policy.train_global_batch_size=500 does not divide"),
        ("cluster.train_ranks=2", "divide policy.train_global_batch_size=512; policy.train_micro_batch_size=256 does"),
        ("policy.train_micro_batch_size=500", "policy.train_micro_batch_size=500"),
        ("policy.precision=float32", "policy.precision"),
        ("nemo_fp8rl.kernel=te", "nemo_fp8rl.kernel was removed, as the kernel that quantizes follows the device"),
        ("policy.generation.vllm_cfg.num_last_layers_in_bf16=2", "num_last_layers_in_bf16=2 leave no FP8 layer"),
        ("loss_fn.ratio_clip_min=2", "loss_fn.ratio_clip_min"),
        ("data.default.env_name=guess", "data.default.env_name='guess'"),
        ("policy.max_total_sequence_length=512", "max_position_embeddings=256"),
        ("grpo.num_prompts_per_step=8192", "grpo.num_prompts_per_step=8192"),
        ("data.train.split_validation_size=0", "data.train.split_validation_size"),
        ("policy.max_total_sequence_length=x", "policy.max_total_sequence_length='x': input should be a whole number"),
        (
            "policy.max_total_sequence_length=1.5",
            "policy.max_total_sequence_length=1.5: input should be a whole number",
        ),
        (
            "policy.max_total_sequence_length=.nan",
            "policy.max_total_sequence_length=nan: input should be a whole number",
        ),
        ("policy=null", "policy must be a block of keys, got null; leave it out, or set what it holds: policy."),
        ("logger.log_dir=''", "logger.log_dir='': name a folder"),
    ],
)
def test_a_wrong_key_or_value_is_named(train, override, named):
    assert named in train(override)


def test_a_missing_or_malformed_recipe_is_named(refused_message, folder):
    assert f"{folder}/nowhere.yaml" in refused_message("train", "--config", folder / "nowhere.yaml")
    assert f"{folder}/bad.yaml" in refused_message("train", "--config", write(folder / "bad.yaml", "policy: [1"))
    assert f"{folder}/nowhere.yaml" in refused_message(
        "sft", "--config", folder / "nowhere.yaml", "--output", folder / "out"
    )


# The data


def test_a_recipe_without_a_model_says_which_key_it_lacks(refused_message, folder):
    (folder / "r.yaml").write_text("data: {train: {data_path: x.jsonl}}\n")
    assert "policy.model_name is required; set it in the recipe or as policy." in refused_message(
        "train", "--config", folder / "r.yaml"
    )


def test_a_missing_dataset_is_named(train, folder):
    message = train(f"data.train.data_path={folder}/nowhere.jsonl")
    assert f"data.train.data_path: there is no file {folder}/nowhere.jsonl" in message
    message = train(f"data.validation.data_path={folder}/nowhere.jsonl")
    assert f"data.validation.data_path: there is no file {folder}/nowhere.jsonl" in message


@pytest.mark.parametrize("line", ['{"prompt": "1+1="', '{"prompt": "1+1="}', '{"prompt": 1, "answer": "2"}', "[]"])
def test_a_malformed_line_of_the_dataset_is_numbered(train, folder, line):
    good = {"prompt": "10+10=", "answer": "20"}
    path = write(folder / "data.jsonl", good, good, line + "\n", good)
    assert f"{path}, line 3:" in train(f"data.train.data_path={path}")


def test_an_empty_dataset_is_named(train, folder):
    path = write(folder / "data.jsonl", "\n\n")
    assert f"{path} holds no record" in train(f"data.train.data_path={path}")


def test_too_few_prompts_that_fit_the_context_are_an_error(train):
    message = train("policy.max_total_sequence_length=6")
    assert "0 training prompts after 8100 were dropped" in message
    assert "policy.generation.vllm_cfg.max_model_len" in message


ENGINE = "policy.generation.vllm_cfg."


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("tensor_parallel_size=3",),
            "vllm_cfg.tensor_parallel_size=3 does not divide the model's num_attention_heads=4",
        ),
        (("expert_parallel_size=2",), "vllm_cfg.expert_parallel_size=2: the model has no experts; set it to 1"),
        (("kv_cache_memory_gib=0.0001",), "kv_cache_memory_gib=0.0001 cannot hold one sequence of"),
        (("kv_cache_dtype=int4",), "kv_cache_dtype='int4'"),
        (("sleep_level=3",), "sleep_level=3"),
        (("quantization_ignored_layer_kws=[o_prj]",), "'o_prj' is in the name of no FP8 layer of this model"),
        (("quantization_ignored_layer_kws=[_proj]",), "quantization_ignored_layer_kws=['_proj'] leaves no FP8 layer"),
    ],
    ids=["heads", "experts", "memory", "cache", "sleep", "no layer", "all layers"],
)
def test_an_impossible_engine_is_refused(train, overrides, message):
    assert message in train(*(ENGINE + override for override in overrides))


@pytest.mark.parametrize("token", [-1, 64])
def test_a_stop_token_that_the_model_does_not_have_is_refused(train, token):
    message = train(f"policy.generation.stop_token_ids=[{token}]")
    assert f"policy.generation.stop_token_ids: {token} is no token of a model of 64; remove it" in message


def test_validation_prompts_that_are_also_trained_on_are_shown(train, project, folder):
    shared = json.loads((project / "data.jsonl").read_text().splitlines()[0])
    path = write(folder / "validation.jsonl", {"prompt": "1+1=", "answer": "2"}, shared)
    message = train(f"data.validation.data_path={path}")
    assert "data.validation.data_path: 1 prompts" in message
    assert repr(shared["prompt"]) in message


def test_a_text_that_no_tokenizer_takes_is_refused_by_its_line(train, folder):
    records = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(100)]
    path = write(folder / "data.jsonl", *records, '{"prompt": "1\\ud800", "answer": "2"}\n')  # half of a surrogate pair
    assert f"{path}, line 101:" in train(f"data.train.data_path={path}")


def test_a_prompt_without_tokens_is_refused(train, folder):
    records = [{"prompt": f"{i}+1=" if i else "", "answer": str(i + 1)} for i in range(100)]
    path = write(folder / "data.jsonl", *records)
    assert f'{path}, line 1: "prompt" is blank' in train(f"data.train.data_path={path}")
    assert "gives no tokens for prompt 0" in train("policy.tokenizer.chat_template='{{ bos }}'")


# The checkpoint


def test_a_missing_checkpoint_is_named(train, folder):
    assert f"policy.model_name: {folder}/nowhere has no config.json" in train(f"policy.model_name={folder}/nowhere")


def test_a_run_in_the_place_of_a_checkpoint_is_answered_with_its_latest_checkpoint(train, folder):
    for step in (9, 10):
        (folder / f"a/checkpoints/step_{step}/policy/weights").mkdir(parents=True)
    message = train(f"policy.model_name={folder}/a")
    assert f"of this run it would be {folder}/a/checkpoints/step_10/policy/weights" in message


def test_the_warm_model_that_is_still_to_be_made_is_answered_with_how(folder, refused_message, monkeypatch):
    monkeypatch.chdir(folder)
    message = refused_message("train", "tiny_cpu")
    assert "runs/tiny/warm has no config.json" in message
    assert "`nemo-fp8rl make-tiny` and then `nemo-fp8rl sft` with the recipe tiny_sft make this one" in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("trian", "tiny_cpu"), "there is no command trian; did you mean train?"),
        (("frobnicate",), "there is no command frobnicate; `nemo-fp8rl --help` lists them"),
        (("train", "tiny_cqu"), "there is no file tiny_cqu, and no recipe of that name; did you mean tiny_cpu?"),
        (("train", "conf/tiny_cp.yaml"), "there is no file conf/tiny_cp.yaml; did you mean tiny_cpu?"),
        (("compare", "tiny", "--flows", "bf61"), "--flows bf61: the comparison has no such value; did you mean bf16?"),
        (("compare", "tiny", "--seeds", "9"), "--seeds 9: the comparison has no such value; it has 1, 2, 3, 4, 5"),
    ],
)
def test_a_misspelled_name_is_answered_with_the_nearest(refused_message, folder, monkeypatch, words, message):
    monkeypatch.chdir(folder)
    assert message in refused_message(*words)


@pytest.mark.parametrize("words", [("train", "--resum_e", "tiny_cpu"), ("doctor", "tiny_cpu", "--jsom")])
def test_a_misspelled_option_is_answered_with_the_nearest(capsys, words):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert re.search(r"did you mean --(resume|json)\?$", capsys.readouterr().err)


def test_every_command_has_examples_that_it_takes():
    for name, command in _make_parser()[1].choices.items():
        _, _, examples = command.format_help().partition("examples:\n")
        assert examples, name
        for line in examples.splitlines():
            words = shlex.split(line, comments=True)
            assert words[:2] == ["nemo-fp8rl", name]
            parse(words[1:])


def test_a_recipe_may_stand_between_options_and_overrides():
    for words in (
        "train my.yaml --resume a.b=1",
        "train --resume my.yaml a.b=1",
        "train a.b=1 --resume my.yaml",
        "train --config my.yaml --resume a.b=1",
        "train a.b=1 --config my.yaml --resume",
    ):
        parsed = parse(words.split())
        assert (str(parsed.config), parsed.overrides, parsed.resume) == ("my.yaml", ["a.b=1"], True), words
    assert parse(["nemo", "~a.b", "~/x.yaml"]).overrides == ["~a.b"]


def test_an_unsupported_family_is_named(train, project, folder):
    model = changed_model(project, folder, model_type="gpt2")
    assert f"{model}/config.json: model_type 'gpt2' is not supported" in train(f"policy.model_name={model}")


def test_a_quantized_checkpoint_is_refused(train, project, folder):
    model = changed_model(project, folder, quantization_config={"quant_method": "fp8"})
    assert f"{model} is already quantized" in train(f"policy.model_name={model}")


@pytest.mark.parametrize("damage", ["missing", "extra", "misshaped"])
def test_a_tensor_that_does_not_fit_the_config_is_named(train, project, folder, damage):
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(project / "model/model.safetensors")
    whole = tensors.pop(name)
    if damage == "extra":
        tensors |= {name: whole, "model.layers.2.mlp.up_proj.weight": whole.clone()}
        name = "model.layers.2.mlp.up_proj.weight"
    if damage == "misshaped":
        tensors[name] = whole[:-1].contiguous()
    model = changed_model(project, folder)
    save_file(tensors, model / "model.safetensors")
    assert name in train(f"policy.model_name={model}")


def test_a_checkpoint_without_tokenizer_is_named(train, project, folder):
    model = changed_model(project, folder)
    for path in model.glob("tokenizer*"):
        path.unlink()
    assert f"policy.tokenizer.name: {model}" in train(f"policy.model_name={model}")


def test_projections_that_end_within_a_block_are_refused(train, project, folder):
    write_model(folder / "model", head_dim=96)
    assert "num_key_value_heads * head_dim=192" in train(f"policy.model_name={folder}/model")


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(train, project, folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(project / "model")
    tokenizer.add_tokens([chr(ord("A") + i) for i in range(50)])  # the model knows 64, 18 of them used
    tokenizer.save_pretrained(folder / "tokenizer")
    records = [{"prompt": f"{i}r=", "answer": str(i + 1)} for i in range(100)]
    path = write(folder / "data.jsonl", *records)
    message = train(f"data.train.data_path={path}", f"policy.tokenizer.name={folder}/tokenizer")
    assert "policy.tokenizer.name" in message
    assert "64" in message


# The run directory


def test_resume_of_no_run_is_refused(train, folder):
    assert "holds no run; give the logger.log_dir of one, or --restartable" in train("--resume")
    assert not (folder / "run").exists()


def test_a_run_directory_that_holds_a_run_needs_resume(train, folder):
    (folder / "run").mkdir()
    (folder / "run/metrics.jsonl").write_text('{"step": 1}\n')
    message = train()
    assert f"{folder}/run holds a run" in message
    assert "--resume" in message
    assert (folder / "run/metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_run_directory_that_is_a_file_is_named(train, folder):
    (folder / "run").write_text("")
    assert f"{folder}/run" in train()


def test_a_start_that_was_refused_leaves_the_run_directory_free(train, project, folder):
    write_model(folder / "model", head_dim=96)
    first = train(f"policy.model_name={folder}/model")
    assert train(f"policy.model_name={folder}/model") == first


# make-tiny and sft


def test_make_tiny_overwrites_nothing(refused_message, folder):
    (folder / "precious").write_text("text")
    assert f"{folder} is not empty" in refused_message("make-tiny", folder)
    assert [path.name for path in folder.iterdir()] == ["precious"]
    assert f"{folder}/precious" in refused_message("make-tiny", folder / "precious")
    assert (folder / "precious").read_text() == "text"


def test_make_tiny_knows_its_families_and_tasks(refused_message, folder):
    assert "choose one of llama, qwen2, qwen3, qwen3_moe" in refused_message(
        "make-tiny", folder / "new", "--family", "gpt"
    )
    message = refused_message("make-tiny", folder / "new", "--task", "divide")
    assert "divide" in message
    assert "add, chain" in message
    assert not (folder / "new").exists()


def test_sft_overwrites_nothing(refused_message, project, folder):
    (folder / "out").mkdir()
    (folder / "out/precious").touch()
    recipe = ["--config", CONF, f"policy.model_name={project}/model", f"data.train.data_path={project}/data.jsonl"]
    assert f"--output {folder}/out exists already" in refused_message("sft", *recipe, "--output", folder / "out")
    inside_a_file = folder / "out/precious/new"  # refused before the training
    assert f"--output {inside_a_file} cannot be made" in refused_message("sft", *recipe, "--output", inside_a_file)


def test_sft_names_a_sequence_longer_than_the_trainer_takes(refused_message, project, folder):
    recipe = ["--config", CONF, f"policy.model_name={project}/model", f"data.train.data_path={project}/data.jsonl"]
    limit = ["policy.max_total_sequence_length=5", "policy.generation.vllm_cfg.max_model_len=5"]
    message = refused_message("sft", *recipe, *limit, "--output", folder / "out")
    assert "0 training examples" in message
    assert "more have above policy.max_total_sequence_length=5 tokens" in message
    assert not (folder / "out").exists()


# The command as the shell sees it


def test_a_process_says_one_line_and_exits_with_2(project, folder):
    command = [sys.executable, "-m", "nemo_fp8rl.cli", *train_arguments(project, folder)]
    process = subprocess.run(
        [*command, f"data.train.data_path={folder}/nowhere.jsonl"],
        check=False,
        capture_output=True,
        text=True,
        cwd=CONF.parent.parent,
        timeout=120,
    )
    assert process.returncode == 2
    assert process.stderr == f"nemo-fp8rl: data.train.data_path: there is no file {folder}/nowhere.jsonl; " + (
        "give the path of a JSONL dataset\n"
    )
    assert process.stdout == ""


def test_a_closed_pipe_ends_the_output_silently():
    command = [sys.executable, "-m", "nemo_fp8rl.cli", "launch", "slurm", "--config", str(CONF), "--dry-run"]
    assert subprocess.run(command, check=True, capture_output=True).stdout
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        running.stdout.close()
        message = running.stderr.read()
    assert (running.returncode, message) == (0, "")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["report", "{folder}/" + "x" * 300], "x" * 300 + ": File name too long"),
        (["make-tiny", "/proc/version/model"], "/proc/version/model"),
        (["request-stop", "--linger", "nan"], "--linger: invalid seconds value: 'nan'"),
        (["request-stop", "--linger", "1e300"], "--linger"),
    ],
)
def test_impossible_paths_and_times_are_one_sentence(folder, words, named):
    command = [sys.executable, "-m", "nemo_fp8rl.cli", *(word.format(folder=folder) for word in words)]
    process = subprocess.run(command, check=False, capture_output=True, text=True, cwd=CONF.parent.parent, timeout=120)
    assert process.returncode == 2
    assert named in process.stderr.splitlines()[-1]
    assert "Traceback" not in process.stderr


def test_an_output_that_is_full_is_one_sentence(project):
    command = [sys.executable, "-m", "nemo_fp8rl.cli", "launch", "slurm", "--config", str(CONF), "--dry-run"]
    with open("/dev/full", "w") as full:
        process = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (process.returncode, "No space left on device" in process.stderr, "Traceback" in process.stderr) == (
        2,
        True,
        False,
    )


@pytest.mark.parametrize("address", ["bogus", "auto", "127.0.0.1:1"])
def test_a_ray_cluster_that_is_not_there_is_named(address, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    code = "from nemo_fp8rl.common.errors import UserError\nfrom nemo_fp8rl.workers import connect\ntry: connect(1)\n"
    code += "except UserError as error: print(error)"
    process = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert f"RAY_ADDRESS={address}: that Ray cluster cannot be joined" in process.stdout, process.stderr[-2000:]


INTERRUPTED_RUN = """
import atexit, sys, threading, time
from nemo_fp8rl import cli
def interrupt(arguments):
    atexit.register(print, "cleaned up")
    threading.Thread(target=time.sleep, args=(100,)).start()  # Python's own end would wait for it
    raise KeyboardInterrupt
cli.HANDLERS["recipes"] = interrupt
sys.argv[1:] = ["recipes"]
sys.exit(cli.main())
"""


def test_an_interrupt_ends_the_process_at_once_after_what_is_registered_for_its_end():
    """As Python ends, Ray's threads crash now and then where an interrupt came in the middle of a call."""
    words = [sys.executable, "-c", INTERRUPTED_RUN]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "cleaned up\n", "nemo-fp8rl: interrupted\n")
