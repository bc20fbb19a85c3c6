"""The report's sentences about spikes, and its charts of sharpness."""

import json
from pathlib import Path

from nemo_fp8rl.commands.report.run_folders import read_runs
from nemo_fp8rl.commands.report.stability import describe_spikes
from nemo_fp8rl.run.spikes import DEFINITION
from tests.commands.report.test_page import chart_titles, make_page


def change(run: Path, *steps: int, **values: float) -> Path:
    """Give these metrics under train/ these values at the steps."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row["step"] in steps:
            row |= {f"train/{name}": value for name, value in values.items()}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def reseed(run: Path, seed: int) -> Path:
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("grpo:", f"grpo:\n  seed: {seed}"))
    return run


def test_a_spike_of_one_run_is_a_sentence(make_run):
    run = change(make_run(steps=30), 20, 21, loss=50.0)
    sentence = "fp8_e2e: spikes: 1 of train/loss and 0 of train/grad_norm, the longest of 2 steps."
    assert describe_spikes(read_runs([run])) == [DEFINITION, sentence]
    assert sentence in make_page(run).text


def test_runs_that_differ_in_their_seed_have_an_interval(make_run):
    runs = [reseed(make_run(f"seed_{seed}", steps=30), seed) for seed in (1, 2)]
    other = make_run("bf16", steps=30)
    (other / "config.yaml").write_text((other / "config.yaml").read_text().replace("fp8_e2e", "bf16"))
    change(runs[1], 20, grad_norm=50.0)
    assert describe_spikes(read_runs([*runs, other])) == [
        DEFINITION,
        "fp8_e2e: spikes a run, mean and 95 % interval of 2 runs: 0.0 ± 0.0 of train/loss and 0.5 ± 6.4 of "
        "train/grad_norm, the longest of 1 step.",  # 12.706 x 0.7071 / sqrt(2)
        "bf16: spikes: 0 of train/loss and 0 of train/grad_norm.",
    ]


def test_recipes_of_one_flow_are_told_apart_by_the_runs(make_run):
    first, second = make_run("one", steps=30), make_run("two", steps=31)  # max_num_steps differs
    said = describe_spikes(read_runs([first, second]))
    assert [sentence.partition(":")[0] for sentence in said[1:]] == ["fp8_e2e (one)", "fp8_e2e (two)"]


def test_a_run_of_few_steps_says_nothing_of_spikes(make_run):
    assert describe_spikes(read_runs([make_run(steps=5)])) == []


def test_sharpness_is_drawn_where_a_run_measures_it(make_run):
    names = ["train/sharpness", "train/sharpness_last_token"]
    run = make_run("one", steps=6)
    assert not {*names} & {*chart_titles(make_page(run))}
    for step in (2, 4, 6):
        change(run, step, sharpness=0.1 * step, sharpness_last_token=0.2 * step)
    page = make_page(run, make_run("two", steps=6))
    assert [title for title in chart_titles(page) if title in names] == names
    assert "Not in two: train/sharpness, train/sharpness_last_token." in page.text
