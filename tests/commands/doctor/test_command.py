"""`nemo-fp8rl doctor` as a user sees it: exit codes, JSON, and one sentence where there is nothing to examine."""

import json
import re
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path

import pytest

from nemo_fp8rl.cli import main
from nemo_fp8rl.commands.doctor.examine import examine
from nemo_fp8rl.commands.doctor.known_models import DEEPSEEK_GUIDE
from nemo_fp8rl.common.errors import UserError
from tests.nemo_rl.conftest import checkout, real_checkout, write  # noqa: F401

CONF = Path(__file__).parents[3] / "conf"
SHIPPED = sorted(path for path in (CONF / "nemo_rl").rglob("*.yaml") if path.stem != "tiny_cpu")
ONE_NODE = [path for path in SHIPPED if path.stem.endswith("-1n8g")]


def doctor(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main(["doctor", *(str(argument) for argument in arguments)])
    return code, *capsys.readouterr()


def test_a_recipe_of_our_own_loop(capsys):
    code, out, err = doctor(capsys, CONF / "tiny_cpu.yaml")
    assert (code, out) == (2, "")
    assert err.endswith("recipes of `nemo-fp8rl train` are checked when that command runs\n")


def test_without_a_checkout(capsys, monkeypatch):
    monkeypatch.delenv("NEMO_RL_SRC", raising=False)
    code, _, err = doctor(capsys, SHIPPED[0])
    assert code == 2
    assert err.startswith("nemo-fp8rl: NEMO_RL_SRC is not set: clone ")


def test_another_trainer(capsys, checkout):  # noqa: F811
    path = checkout / "examples/configs/grpo.yaml"
    code, _, err = doctor(capsys, path, "policy.megatron_cfg.enabled=false")
    assert code == 2
    assert "the doctor knows Megatron trainers" in err


def test_the_sentence_in_the_place_of_deepseeks_name_is_called_that(capsys, checkout):  # noqa: F811
    path = checkout / "examples/configs/grpo.yaml"
    _, out, _ = doctor(capsys, path, f"policy.model_name='{DEEPSEEK_GUIDE}'", "--json")
    report = json.loads(out)
    assert report["parameters"] == 671_026_419_200
    (finding,) = (finding for finding in report["findings"] if finding["topic"] == "model")
    assert finding["level"] == "warn" and "set it to the folder it speaks of" in finding["text"]


def test_the_dtypes_of_states_are_keys_and_their_bytes_stand_under_the_phases(capsys, checkout):  # noqa: F811
    """No example of NeMo RL has these keys, and its own trainer takes none of them."""
    optimizer = "policy.megatron_cfg.optimizer"
    dtypes = f"+{optimizer}.exp_avg_dtype=fp8", f"+{optimizer}.exp_avg_sq_dtype=fp16"
    keys = (f"++{optimizer}.use_precision_aware_optimizer=true", *dtypes)
    known = "grpo: {}\npolicy: {megatron_cfg: {optimizer: {use_precision_aware_optimizer: false}}}\n"
    write(checkout / "examples/configs/known.yaml", known)
    path = checkout / "examples/configs/grpo.yaml"
    _, out, _ = doctor(capsys, path, *keys, "++nemo_fp8rl.workers=ours", "--json")
    parameter = json.loads(out)["memory"]["parameter"]
    assert [parameter[name] for name in ("master", "exp_avg", "exp_avg_sq")] == [2, 1, 2]
    code, out, _ = doctor(capsys, path, *keys, "++nemo_fp8rl.workers=nemo_rl")
    assert code == 2
    assert "\nbytes of a trained parameter: weight 2, gradient " in out
    assert "takes no dtype" in re.sub(r"\W+", " ", out)


def test_torch_is_not_loaded():
    code = "import sys, nemo_fp8rl.cli, nemo_fp8rl.commands.doctor.examine; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("side", ["policy", "policy.generation"])
def test_of_modelopts_formats_nothing_is_said_but_that(capsys, checkout, tmp_path, side):  # noqa: F811
    """NeMo RL runs them, so it is no error; what their ranks share is asked as of any recipe."""
    known = "grpo: {}\npolicy: {quant_cfg: null, generation: {quant_cfg: null}}\n"
    write(checkout / "examples/configs/known.yaml", known)
    path = write(tmp_path / "recipe.yaml", "defaults: ${oc.env:NEMO_RL_SRC}/examples/configs/grpo.yaml\n")
    asked = (path, f"++{side}.quant_cfg=NVFP4_DEFAULT_CFG", "cluster.gpus_per_node=4")
    code, out, _ = doctor(capsys, *asked, "--json")
    report = json.loads(out)
    topics = ("precision", "memory", "hardware")
    (text,) = (finding["text"] for finding in report["findings"] if finding["topic"] in topics)
    assert text.startswith(f"{side}.quant_cfg=NVFP4_DEFAULT_CFG: one of ModelOpt's formats, none that the doctor knows")
    assert (code, report["memory"]["phases"]) == (0, [])
    assert "GiB on the fullest" not in doctor(capsys, *asked)[1]
    assert "GiB on the fullest" in doctor(capsys, path, "cluster.gpus_per_node=4")[1]


@pytest.mark.nemo_rl
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_our_recipes_are_sound_on_the_gpus_that_they_name(capsys, real_checkout, path):  # noqa: F811
    gpu = "b200" if "mxfp8" in path.stem or "nvfp4-e2e" in path.stem else "h200"
    code, out, _ = doctor(capsys, path, "--gpu", gpu, "--json")
    report = json.loads(out)
    assert code == 0, [finding["text"] for finding in report["findings"] if finding["level"] == "error"]
    assert report["memory"]["phases"][0]["name"] == "train"


@pytest.mark.nemo_rl
@pytest.mark.parametrize("path", ONE_NODE, ids=lambda path: path.stem)
def test_recipes_for_one_node_fit_on_eight_h100s_without_a_warning(capsys, real_checkout, path):  # noqa: F811
    code, out, _ = doctor(capsys, path, "--gpu", "h100", "--json")
    report = json.loads(out)
    assert code == 0
    assert {finding["level"] for finding in report["findings"]} == {"ok"}
    assert any(finding["text"].startswith("8 trainer GPUs = ") for finding in report["findings"])


@pytest.mark.nemo_rl
def test_without_the_hosts_memory_the_mixture_does_not_fit_on_one_node(capsys, real_checkout):  # noqa: F811
    path, key = CONF / "nemo_rl/qwen3-30b-a3b-fp8-e2e-1n8g.yaml", "policy.megatron_cfg.optimizer"
    on_gpus = (f"{key}.optimizer_cpu_offload=false", f"{key}.use_precision_aware_optimizer=false")
    code, out, _ = doctor(capsys, path, *on_gpus, "--json")
    errors = [finding["text"] for finding in json.loads(out)["findings"] if finding["level"] == "error"]
    assert code == 2
    assert [error.partition(":")[0] for error in errors] == ["train"]


@pytest.mark.nemo_rl
def test_an_override_that_breaks_a_recipe(capsys, real_checkout):  # noqa: F811
    path = CONF / "nemo_rl/qwen3-30b-a3b-fp8-e2e-2n8g.yaml"
    code, out, _ = doctor(capsys, path, "policy.generation.vllm_cfg.tensor_parallel_size=4")
    assert code == 2
    assert "sizes that fit: 1, 2, 3, 6" in " ".join(out.replace("│", " ").split())


@pytest.mark.nemo_rl
@pytest.mark.parametrize("name", ["llama3.1-8b-instruct-2n8g-megatron-fp8-e2e", "qwen3-30ba3b-8n8g-megatron"])
def test_what_nemo_rl_runs_on_hopper_fits(capsys, real_checkout, monkeypatch, name):  # noqa: F811
    monkeypatch.setenv("NRL_IGNORE_TP_ACCURACY_CHECK", "1")  # as its script for the latter
    code, out, _ = doctor(capsys, real_checkout / f"examples/configs/recipes/llm/grpo-{name}.yaml", "--json")
    assert code == 0, out


NO_DOCTOR = (
    "the doctor knows Megatron trainers",
    "and this package runs its GRPO",
    "unknown config key eval;",  # of examples/configs/evals
)
"""What is said of a recipe that is none for GRPO with a Megatron trainer and vLLM."""
UPSTREAM = (
    "policy.make_sequence_length_divisible_by=1 must be a multiple",  # of unpacked sequences under sequence parallelism
    "holds no sequence of policy.max_total_sequence_length",
    "needs policy.megatron_cfg.defer_fp32_logits=true",
)
"""Errors in recipes of NeMo RL that run as long as no sequence is of full length, or of another length."""


@pytest.mark.nemo_rl
def test_every_recipe_of_nemo_rl_for_its_megatron_trainer_gets_an_answer(real_checkout, monkeypatch, record_property):  # noqa: F811
    """Those whose nodes have 4 GPUs are for GB200s. A model_name that is a placeholder is asked for its config.json."""
    monkeypatch.setenv("NRL_IGNORE_TP_ACCURACY_CHECK", "1")  # as NeMo RL's scripts
    monkeypatch.delenv("HF_HOME", raising=False)
    reports, asked = {}, {}
    for path in sorted((real_checkout / "examples/configs").rglob("*.yaml")):
        try:
            reports[path.stem] = examine(path, [], "gb200" if "n4g" in path.stem else "h100")
        except UserError as error:
            if not any(words in str(error) for words in NO_DOCTOR):
                asked[path.stem] = str(error)
    record_property("reports", len(reports))
    model = re.compile(r"policy.model_name=/path/to/\S+ is no folder with a config.json, .*: --model-config FILE")
    assert all(map(model.fullmatch, asked.values())), asked
    assert len(reports) >= 60 and len(asked) <= len(reports) / 20
    errors = {
        name: text
        for name, report in reports.items()
        for level, _, text in map(astuple, report.findings)
        if level == "error" and not any(words in text for words in UPSTREAM)
    }
    assert errors == {}
