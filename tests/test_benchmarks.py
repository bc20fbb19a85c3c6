"""Every benchmark runs, at its smallest: what a figure in the docs comes from must not break unseen."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.conftest import ALIGNED

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
ARGUMENTS = {
    "alignment": ["--samples", "8", "--folder", "{}"],
    "async_loop": ["--dry-run", "--json", "{}/figures.json"],
    "bandit": ["--seeds", "1", "--steps", "20", "--json", "{}/figures.json"],
    "checkpoint": ["--layers", "1", "--rounds", "1", "--json", "{}/figures.json"],
    "formats": ["--dry-run", "--folder", "{}/runs", "--json", "{}/figures.json"],
    "grad_reduce": ["--dry-run", "--folder", "{}/runs", "--json", "{}/figures.json"],
    "elastic": ["--dry-run", "--json", "{}/figures.json"],
    "float16": ["--steps", "1", "--seeds", "1", "--folder", "{}"],
    "links": ["--bucket-mib", "1", "--buckets", "3", "--json", "{}/figures.json"],
    "in_flight": ["--dry-run", "--json", "{}/figures.json"],
    "kv_window": ["--dry-run", "--folder", "{}/runs", "--json", "{}/figures.json"],
    "layouts": ["--steps", "1", "--folder", "{}"],
    "logprobs": ["--rows", "2", "--tokens", "2048", "--hidden", "16", "--json", "{}/figures.json"],
    "lora": ["--dry-run", "--folder", "{}/runs", "--json", "{}/figures.json"],
    "loss": ["--rows", "32", "--columns", "256", "--rounds", "1", "--json", "{}/figures.json"],
    "mismatch": ["--steps", "1", "--folder", "{}"],
    "optimizer_states": ["--dry-run", "--folder", "{}/runs", "--json", "{}/figures.json"],
    "quantize": ["--rows", "512", "--columns", "1024", "--rounds", "2", "--json", "{}/figures.json"],
    "refit": ["--small", "--rounds", "1", "--json", "{}/figures.json"],
    "refit_plan": ["--only", "Llama", "--rounds", "1", "--json", "{}/figures.json"],
    "residual": ["--samples", "8", "--folder", "{}"],
    "rollout": ["--batch-sizes", "1", "4", "--rounds", "1", "--layers", "1", "--json", "{}/figures.json"],
    "rollout_choices": ["--dry-run", "--folder", "{}/runs", "--json", "{}/figures.json"],
    "stability": ["--dry-run", "--folder", "{}/runs", "--json", "{}/figures.json"],
    "turns": ["--conversations", "4", "--turns", "2", "--rounds", "1", "--json", "{}/figures.json"],
    "train_step": ["--rounds", "1", "--json", "{}/figures.json"],
    "training": ["--steps", "60", "--seeds", "2", "--folder", "{}"],
}
ON_ONE_GPU = {
    "align": ["--dry-run", "--json", "{}/figures.json"],
    "bits": ["--dry-run", "--json", "{}/figures.json"],
    "float16": ["--dry-run", "--json", "{}/figures.json"],
    "formats": ["--dry-run", "--json", "{}/figures.json"],
    "kv_window": ["--dry-run", "--json", "{}/figures.json"],
    "lora": ["--bases", "fp8_e2e", "--dry-run", "--json", "{}/figures.json"],
    "nemo_rl": ["--dry-run", "--json", "{}/figures.json"],
    "quantize": ["--rows", "512", "--columns", "1024", "--rounds", "2", "--json", "{}/figures.json"],
    "refit": ["--dry-run", "--json", "{}/figures.json"],
    "training_state": ["--dry-run", "--json", "{}/figures.json"],
}
"""Scripts of benchmarks/gpu. A dry run is on a CPU, on Triton's interpreter."""
NAMES = "embedding", "layer 0, qkv", "layer 0, activation", "layer 1, qkv", "final norm"


def test_none_is_left_out():
    def scripts(folder: Path) -> set[str]:
        return {path.stem for path in folder.glob("*.py") if "__main__" in path.read_text()}

    assert scripts(BENCHMARKS) == ARGUMENTS.keys()
    assert scripts(BENCHMARKS / "gpu") == {*ON_ONE_GPU, "interpreted"}


@pytest.mark.parametrize("name", ON_ONE_GPU)
def test_a_script_for_one_gpu_describes_itself(name, tmp_path):
    command = [sys.executable, str(BENCHMARKS / "gpu" / f"{name}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout


def test_what_they_take_from_the_package_is_there(monkeypatch):
    """Also what `alignment` replaces in it."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    before = set(sys.modules)
    try:
        with mock.patch.dict(os.environ):  # some set variables
            modules = {name: importlib.import_module(name) for name in ARGUMENTS}
            for path in (BENCHMARKS / "gpu").glob("*.py"):
                importlib.import_module(f"benchmarks.gpu.{path.stem}")
        for piece, _ in modules["alignment"].PIECES.values():
            with piece():
                pass
    finally:
        for path in BENCHMARKS.glob("*.py"):
            if path.stem not in before:
                sys.modules.pop(path.stem, None)


@pytest.fixture
def scripts(monkeypatch):
    """Scripts import each other by name alone."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before & {path.stem for path in BENCHMARKS.glob("*.py")}:
        del sys.modules[name]


def rounded(x: Tensor, bits: int, nearest: bool) -> Tensor:
    """Return the values with so many mantissa bits, by arithmetic."""
    mantissa, exponent = torch.frexp(x.double())
    scaled = mantissa * 2 ** (bits + 1)
    return torch.ldexp(scaled.round() if nearest else scaled.trunc(), exponent - bits - 1)


@pytest.mark.parametrize("nearest", [False, True], ids=["cut", "nearest"])
def test_operands_have_as_many_mantissa_bits_as_asked_for(scripts, nearest):
    reduce_mantissa = scripts("stability").reduce_mantissa
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    x = patterns.view(torch.bfloat16)
    normal = x.isfinite() & (x.abs() >= torch.finfo(torch.bfloat16).tiny)
    for bits in range(1, 8):
        found = reduce_mantissa(x, bits, nearest)
        expected = rounded(x[normal], bits, nearest)
        expected[expected.abs() > torch.finfo(torch.bfloat16).max] *= torch.inf
        assert torch.equal(found[normal].double(), expected)
        assert torch.equal(found[~x.isfinite()].view(torch.int16), patterns[~x.isfinite()])


def test_a_run_diverges_where_its_loss_rises_or_is_not_finite(scripts):
    divergence = scripts("stability").divergence

    def run(*losses: float, is_finite: bool = True) -> dict[str, object]:
        return {"losses": losses, "is_finite": is_finite}

    falling = [5.5 - 0.05 * step for step in range(40)]
    assert divergence(run(*falling)) is None
    assert divergence(run(*falling, is_finite=False)) == 40
    assert divergence(run(*falling[:30], 9.0, *falling[30:])) is None  # one high loss
    assert divergence(run(*falling, *[6.0] * 10)) == 42  # three of ten
    assert divergence(run(5.5, *[6.2] * 20)) == 9  # never below its start


def test_choices_are_compared_at_equal_generated_tokens(scripts):
    """Of lines through their validations, up to the fewest tokens of a run."""
    names = ("frac_reward_zero_std", "hinted_ratio", "unhinted_reward", "reward", "generated_tokens")

    def run(tokens: list[int], accuracy: list[float]) -> dict[str, object]:
        return {"tokens": tokens, "accuracy": accuracy, **dict.fromkeys(names)}

    slow, fast = ([0, 800], [0.0, 0.4]), ([0, 400, 1600], [0.0, 0.4, 0.4])
    runs = {("GRPO", 0): run(*slow), ("GRPO", 1): run(*slow), ("hints", 0): run(*fast), ("hints", 1): run(*slow)}
    points, (grpo, hints) = scripts("rollout_choices").summarize(runs)
    assert points == [0, 100, 200, 300, 400, 500, 600, 700, 800]
    assert [mean for mean, _ in grpo["accuracy"]] == pytest.approx([point / 2000 for point in points])
    assert hints["accuracy"][4] == pytest.approx([0.3, 12.706 * 0.1], abs=1e-3), "0.4 and 0.2"
    assert hints["less_grpo"][4] == pytest.approx([0.1, 12.706 * 0.1], abs=1e-3)
    assert hints["less_grpo"][8] == [0, 0]


def test_a_sum_is_right_with_the_hint_before_it(scripts):
    whole_sum = scripts("rollout_choices").whole_sum
    assert whole_sum("95", "37+58=", "37+58=", "95") == 1
    assert whole_sum("5", "37+58=9", "37+58=", "95") == 1
    assert whole_sum("95", "37+58=9", "37+58=", "95") == 0


def test_a_stored_run_is_computed_once_for_the_same_arguments(scripts, tmp_path):
    run_all = scripts("stored_runs").run_all

    def results(value: int) -> dict[tuple[str, int], dict[str, int]]:
        return run_all(tmp_path, dict, {("a", 0): ([("x", value)],), ("b", 1): ([("y", 2)],)}, 1)

    assert results(1) == {("a", 0): {"x": 1}, ("b", 1): {"y": 2}}
    file = tmp_path / "a_0.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps(record | {"result": {"x": 7}}))
    assert results(1)["a", 0] == {"x": 7}
    assert results(3)["a", 0] == {"x": 3}


@pytest.mark.long
@pytest.mark.parametrize("name", ARGUMENTS)
def test_it_runs(name, tmp_path):
    """In a copy: some write their results beside themselves."""
    copy = tmp_path / "benchmarks"
    shutil.copytree(BENCHMARKS, copy, ignore=shutil.ignore_patterns("results", "__pycache__"))
    (copy / "results").mkdir()
    shutil.copy(BENCHMARKS / "results/refit_h200.json", copy / "results")  # whose rates refit_plan reads
    (tmp_path / "docs").mkdir()
    (tmp_path / "conf").symlink_to(BENCHMARKS.parent / "conf")
    arguments = [argument.format(tmp_path) for argument in ARGUMENTS[name]]
    command = [sys.executable, str(copy / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    written = [*tmp_path.glob("*.json"), *(file for file in copy.glob("results/*.json") if "h200" not in file.name)]
    assert written
    if name == "logprobs":  # of a released vocabulary
        for case in json.loads(written[0].read_text())["cases"]:
            if case["chunk"] == 1024:
                assert case["peak_bytes"] < 2 * 1024 * 151_936 * 4
    if name == "refit":  # what is on the wire depends on no clock
        ratios = json.loads(written[0].read_text())
        assert ratios["wire_full"] < 0.505
        assert ratios["wire_delta"] < 0.005
        assert ratios["wire_delta_whole_model"] < 0.012
    if name == "optimizer_states":  # what tensors have depends on no clock, and neither does rounding
        record = json.loads(written[0].read_text())
        found = {row["choice"]: row["bytes"] for row in record["rows"] if row["family"] == "qwen3"}
        expected = {"fp32": 18, "bf16 gradients": 16, "bf16, bf16": 12, "fp8, fp16": 11, "fp8, fp16, bf16 gradients": 9}
        assert found == pytest.approx(expected, rel=0.01)
        least, *_, most = record["movement_of_float16_masters"].values()
        assert least < 0.4
        assert most > 0.9
    if name == "grad_reduce":
        record = json.loads(written[0].read_text())
        assert all(row["decibels"] > 30 for row in record["sums"] if row["way"] == "ours")
        sent = {run["choice"]: run["grad_bytes"] for run in record["training"]["results"]}
        assert 0.25 < sent["FP8"] / sent["float32"] <= 0.26
    if name == "kv_window":
        record = json.loads(written[0].read_text())
        assert len(record["rows"]) == len(record["long"]) == 2
        assert all(row["token_mult_prob_error"] < ALIGNED for row in (*record["rows"], *record["long"]))
    if name == "stability":  # the same weights and rows before the first step
        rows = json.loads(written[0].read_text())["rows"]
        assert len({row["losses"][0][0] for row in rows}) == len(rows) == 3


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nemo_rl] * (name == "nemo_rl")) for name in ON_ONE_GPU]
)
def test_a_script_for_one_gpu_runs(name, tmp_path):
    """On a CPU as its dry run."""
    if name == "nemo_rl" and "NEMO_RL_SRC" not in os.environ:
        pytest.skip("NEMO_RL_SRC names no checkout of NeMo RL's main")
    if name == "quantize" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    arguments = [argument.format(tmp_path) for argument in ON_ONE_GPU[name]]
    command = [sys.executable, str(BENCHMARKS / "gpu" / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    record = json.loads((tmp_path / "figures.json").read_text())
    rows = {(row["section"], row["case"]): row for row in record.get("rows", ())}
    if name == "bits":
        formulas = [row for (section, _), row in rows.items() if section == "operations" and "formula" in row]
        assert len(formulas) > 10
        assert all(row["formula"] == row["row_alone"] == 1 for row in formulas)
    if name == "formats":
        assert {section for section, _ in rows} == {"linear", "refit", "rollout"}
        assert all(row["equal"] > 0.99 for (section, _), row in rows.items() if section == "linear")
    if name == "nemo_rl":
        carriers = {case: row["carrier"].partition(":")[0].partition(" (")[0] for (_, case), row in rows.items()}
        assert carriers == {
            "NeMo RL alone, command": "refits go by NeMo RL's broadcast in BF16",
            "FP8 over its transport, command": "refits go by NeMo RL's own transport",
            "checkpoint engine, command": "refits go by our checkpoint engine",
        }
    if name == "refit":
        assert rows["digests", "equal"]["equal"]
        assert rows["delta", "the new bytes"]["equal"]
        assert {"classic", "whole", "whole without digests", "delta", "wire"} <= {case for _, case in rows}
        assert rows["refit", "delta"]["nbytes"] < rows["refit", "whole"]["nbytes"]
    if name == "training_state":
        assert rows["memory", "the same two, bf16 gradients"]["bytes_of_a_parameter"] == pytest.approx(9, rel=0.01)
    if name == "align":
        for flow in ("fp8_e2e", "bf16"):
            assert rows[f"the loop: {flow}", f"{flow}, align=vllm"]["exact_logprob_fraction"] == 1
            assert rows[f"the loop: {flow}", f"{flow}, align=none"]["exact_logprob_fraction"] < 1
            assert rows[f"the loop: {flow}", f"{flow}, align=vllm, first difference"]["first"] == "no difference"
        assert "layer 0" in rows["a flow that differs", "bf16, align=none, first difference"]["first"]
        assert rows["the loop: FP8 KV cache", "fp8_e2e, FP8 KV cache, align=vllm"]["refused"]


def test_a_run_of_nemo_rl_is_read_from_its_latest_attempt_without_the_first_steps(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    from benchmarks.gpu.nemo_rl import METRICS, describe, read_metrics

    for attempt, seconds in (("exp_001", [50.0]), ("exp_002", [90.0, 80.0, 3.0, 4.0, 5.0, 6.0])):
        with SummaryWriter(str(tmp_path / attempt / "tensorboard")) as writer:
            for step, value in enumerate(seconds, 1):
                writer.add_scalar(METRICS["step_seconds"], value, step)
                writer.add_scalar(METRICS["token_mult_prob_error"], 1.25, step)
    assert read_metrics(tmp_path) == {"steps": 6, "step_seconds": 4.5, "token_mult_prob_error": 1.25}
    assert describe(read_metrics(tmp_path)) == "token_mult_prob_error 1.2500, step 4.5 s"


def test_the_first_difference_is_the_first_in_order_of_computation():
    from benchmarks.gpu.first_difference import compare

    def outputs(**changed: float) -> dict[tuple[str, str], torch.Tensor]:
        keys = [
            ("embedding", ""),
            ("layer 0", "qkv"),
            ("layer 0", "activation"),
            ("layer 1", "qkv"),
            ("final norm", ""),
        ]
        return {key: torch.ones(3, 4) + changed.get("_".join(filter(None, key)).replace(" ", "_"), 0.0) for key in keys}

    assert compare(outputs(), outputs()) == {"first": "no difference", "equal_rows": dict.fromkeys(NAMES, 1.0)}
    found = compare(outputs(layer_1_qkv=0.5, layer_0_activation=0.25), outputs())
    assert found["first"].startswith("layer 0, activation: token 0")
    assert [name for name, share in found["equal_rows"].items() if share < 1] == ["layer 0, activation", "layer 1, qkv"]


def test_kernels_are_grouped_by_their_bits():
    from benchmarks.gpu.report import describe_agreement

    ones, other = torch.ones(4, 8).bfloat16(), torch.ones(4, 8).bfloat16()
    other[0, 0] = 2
    text, shares = describe_agreement({"a": ones, "b": other, "c": ones.clone(), "d": other.clone()})
    assert text == "a = c | b = d 96.8750 %"
    assert shares["a = b"] == 31 / 32
    assert shares["b = d"] == 1
