"""Log directories as NeMo RL's `utils/logger.py` writes them: events of the same writer, and its JSON lines.

tests/nemo_rl/run/test_run_loop.py makes the report of a real one.
"""

import json
import math
import sys
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from nemo_fp8rl.cli import main
from nemo_fp8rl.commands.report import nemo_rl_log
from nemo_fp8rl.commands.report.page import report
from nemo_fp8rl.common.errors import UserError
from tests.commands.report.test_exact_values import headline
from tests.commands.report.test_page import Page, chart_titles, make_page

RECIPE = {"grpo.max_num_steps": 6, "policy.model_name": "tiny/<model>", "loss_fn.token_level_loss": True, "lr": 3e-4}
STAGES = {"policy_training": 0.5, "generation": 0.25, "prepare_for_generation/total": 0.125}


def write_events(experiment: Path, steps: int = 6, **changes: float) -> Path:
    writer = SummaryWriter(log_dir=str(experiment / "tensorboard"))
    writer.add_hparams(RECIPE, {})
    for step in range(1, steps + 1):
        train = {"reward": step / 8, "token_mult_prob_error": 1 + step / 1024, "gen_kl_error": step / 1e4, "loss": 0.5}
        for name, value in (train | changes).items():
            writer.add_scalar(f"train/{name}", value, step)
        writer.add_scalar("ray/node.0.mem_gb", 3.0, 17 * step)  # by seconds
        for name, value in STAGES.items():
            writer.add_scalar(f"timing/train/{name}", value, step)
        writer.add_scalar("timing/train/total_step_time", 1.0 + step / 8, step)
    writer.close()
    return experiment


def write_batch(experiment: Path, step: int) -> None:
    """Two samples: of the first, both sides agree but for one token; the second has a token without a log-prob."""
    rows = [
        ("1+1=", "2", 1.0, [[0, 1, 1, 0]], [[0.0, -1.0, -2.0, -9.0]], [[0.0, -1.0, -2.5, 0.0]]),
        ("1+2=", "<img src=x>", 0.0, [[0, 1, 0, 0]], [[0.0, math.nan, 0.0, 0.0]], [[0.0, -1.0, 0.0, 0.0]]),
    ]
    with (experiment / f"train_data_step{step}.jsonl").open("w") as file:
        for i, (prompt, answer, reward, mask, trainer, engine) in enumerate(rows):
            row = {
                "content": [[prompt, answer, ""]],
                "rewards": [reward],
                "token_loss_mask": mask,
                "sample_loss_mask": [1.0],
            }
            row |= {"prev_logprobs": trainer, "generation_logprobs": engine, "input_lengths": [3]}
            file.write(json.dumps(row | {"idx": i}) + "\n")


@pytest.fixture
def experiment(tmp_path) -> Path:
    path = write_events(tmp_path / "logs/exp_001")
    for step in range(1, 7):
        write_batch(path, step)
    return path


def test_a_log_dir_is_read_by_its_own_names(experiment):
    page = make_page(experiment.parent)
    shown = chart_titles(page)
    names = ("train/reward", "train/token_mult_prob_error", "train/gen_kl_error", "timing/train/total_step_time")
    assert {*names, "timing/train/*", "importance weights"} <= {*shown}
    (reward,) = page.charts[0]["series"]
    assert (reward["x"], reward["y"]) == ([1, 2, 3, 4, 5, 6], [step / 8 for step in range(1, 7)])
    assert "Finished, 6 steps. train/reward: 0.125 at step 1, 0.750 at step 6." in headline(page)
    assert "train/loss 0.5" in page.text
    assert "policy.model_name" in page.text and "tiny/<model>" in page.text
    assert "node.0.mem_gb" not in page.source


def test_batches_have_answers_and_importance_weights(experiment):
    page = make_page(experiment)
    assert page.text.count("highest reward, largest difference, reward 1") == 4  # steps 1, 3, 4 and 6
    assert "answers and importance weights are those of steps 1, 3, 4, 6" in page.text
    assert "<img src=x>" in page.text and "img" not in page.tags
    assert '<span class="prompt">1+1=</span><span class="token up"' in page.source
    (weights,) = [chart for chart in page.charts if any("weight about" in label for label in chart["labels"].values())]
    assert sorted(weights["series"][0]["y"]) == [0.5, 0.5]
    trainer, engine = math.exp(-3), math.exp(-3.5)
    assert f"trainer {trainer:.5f}, engine {engine:.5f}" in page.source


def test_every_start_of_a_run_is_shown(experiment):
    write_events(experiment.parent / "exp_002", steps=3)
    (experiment.parent / "exp_003").mkdir()
    page = make_page(experiment.parent)
    assert [line["name"] for line in page.charts[0]["series"]] == ["exp_001", "exp_002"]
    assert "exp_002: Ended or going on, after step 3 of 6." in headline(page).replace("</b>", "")


def test_a_run_that_cannot_learn_says_so(tmp_path):
    zero = {"reward": 0.0, "baseline_reward/pct_0": 100.0, "baseline_reward/pct_1": 0.0}
    page = make_page(write_events(tmp_path / "exp_001", **zero))
    assert "In the last 3 steps every reward was 0" in headline(page)


def test_events_alone_make_a_report_that_says_what_is_missing(tmp_path):
    page = make_page(write_events(tmp_path / "exp_001"))
    assert "exp_001 has no train_data_step*.jsonl (answers and importance weights)" in page.text
    assert "train/reward" in chart_titles(page)


@pytest.mark.parametrize("logger", ["wandb", "mlflow", "swanlab"])
def test_a_directory_of_another_logger_says_in_one_sentence_what_is_missing(tmp_path, capsys, logger):
    experiment = tmp_path / "logs/exp_001"
    (experiment / logger).mkdir(parents=True)
    write_batch(experiment, 1)
    assert main(["report", str(experiment.parent)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"exp_001 has no TensorBoard events (its metrics are with {logger})" in line
    assert "logger.tensorboard_enabled=true" in line


def test_without_tensorboard_its_events_are_refused_in_a_sentence(experiment, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_accumulator", None)
    with pytest.raises(UserError, match="tensorboard is not installed: pip install"):
        make_page(experiment)


def test_events_of_our_own_loop_are_read_as_well(make_run, tmp_path):
    run = make_run(steps=3)
    writer = SummaryWriter(log_dir=str(run / "tensorboard"))
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for name, value in row.items():
            writer.add_scalar(name, value, row["step"])
    writer.close()
    page = Page(report([run / "tensorboard"], tmp_path / "out.html"))
    assert {"train/reward", "timing/*", "timing/refit_*"} <= {*chart_titles(page)}


def test_odd_values_in_a_log_are_left_out_and_odd_lines_refused(experiment, monkeypatch):
    writer = SummaryWriter(log_dir=str(experiment / "tensorboard"))
    writer.add_scalar("train/reward", math.nan, 7)
    writer.add_scalar("train/reward", 0.5, -1)
    writer.close()
    assert (
        "exp_001: values of TensorBoard that are no finite numbers are left out, 2 of them"
        in make_page(experiment).text
    )
    batch = experiment / "train_data_step1.jsonl"
    for text in (
        "{\n",
        "[1]\n",
        "{}\n",
        '{"token_loss_mask": [[1]], "prev_logprobs": [[]], "generation_logprobs": [[1]]}\n',
    ):
        batch.write_text(text)
        with pytest.raises(UserError, match=r"train_data_step1.jsonl is no batch as NeMo RL logs it"):
            make_page(experiment)
    monkeypatch.setattr(nemo_rl_log, "MAX_BYTES", 10)
    page = make_page(experiment)
    assert "highest reward" not in page.text
    assert "exp_001: no train_data_step*.jsonl is small enough to be read" in page.text


def test_a_last_line_that_a_kill_cut_short_is_left_out(experiment):
    with (experiment / "train_data_step1.jsonl").open("a") as file:
        file.write('{"content": [["1+1')
    assert "highest reward" in make_page(experiment).text
