"""Which runs of a comparison are taken, and what is said about their time before they begin."""

import json
import re
from pathlib import Path

import pytest

from nemo_fp8rl.cli import main
from nemo_fp8rl.commands.compare.comparison import Comparison, load_comparison
from nemo_fp8rl.commands.compare.run_choice import Choice, describe_time
from nemo_fp8rl.commands.compare.run_list import PlannedRun, plan
from nemo_fp8rl.common.errors import UserError

FILE = """
recipe: tiny_cpu
overrides: {grpo.max_num_steps: 50}
seeds: [1, 2]
reference: bf16
flows: {bf16: {nemo_fp8rl.flow: bf16}, fp8_e2e: {nemo_fp8rl.flow: fp8_e2e}}
lengths: {terms: {short: 3}, flows: [bf16], warm_up: tiny_sft, overrides: {grpo.max_num_steps: 5}}
seconds: {start: 20, step: 2}
"""


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(FILE)
    return path


@pytest.fixture
def planned(file, tmp_path) -> tuple[Comparison, list[PlannedRun]]:
    comparison = load_comparison(file)
    return comparison, plan(comparison, [], tmp_path / "out")


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (Choice(flows=("fp8_e2e",), seeds=(2,)), ["fp8_e2e seed 2"]),
        (Choice(seeds=(1,)), ["bf16 seed 1", "fp8_e2e seed 1", "short bf16 seed 1"]),
        (Choice(part="lengths"), ["short bf16 seed 1", "short bf16 seed 2"]),
        (Choice(flows=("bf16",), part="flows"), ["bf16 seed 1", "bf16 seed 2"]),
    ],
)
def test_flows_seeds_and_a_part_can_be_chosen(planned, choice, names):
    assert [run.name for run in choice.of(planned[1])] == names


def test_a_choice_of_nothing_is_refused(planned):
    with pytest.raises(UserError, match="leave no run"):
        Choice(flows=("fp8_e2e",), part="lengths").of(planned[1])


def test_the_estimate_follows_the_steps_that_were_taken(planned):
    comparison, runs = planned
    todo = [run for run in runs if run.length is None]
    assert describe_time(comparison, runs, todo).startswith("about 8 min to go, on the machine of the file's figures")
    first = todo[0]
    first.folder.mkdir(parents=True)
    rows = [{"step": step, "timing/total_step_time": 12.0} for step in range(1, 51)]
    (first.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    left = [run for run in todo if not run.is_finished]
    assert len(left) == 3
    assert describe_time(comparison, runs, left) == "about 31 min to go, by the steps that were taken here"


def test_a_dry_run_lists_the_chosen_runs_and_makes_nothing(file, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["compare", str(file), "--seeds", "2", "--dry-run", "--output", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"{out}/{flow}/seed_2  0 of 50 steps" for flow in ("bf16", "fp8_e2e")]
    assert lines[3] == "0 of 3 runs have finished, 3 to go"
    assert re.match(r"about \d+ min to go", lines[4])
    assert not out.exists()
