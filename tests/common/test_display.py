"""What a person sees: one line a step where there is no terminal, a bar and figures on one."""

import io
import subprocess
import sys
import time

import pytest
from rich.console import Console

from nemo_fp8rl.common.display import Display
from nemo_fp8rl.train import format_figures

LATEST = {
    "train/reward": 0.3125, "validation/accuracy": 0.4, "train/token_mult_prob_error": 1.0000312,
    "performance/generation_tokens_per_sec": 12345.6, "timing/refit": 0.0193, "refit/bytes": 90_000,
    "timing/total_step_time": 61.0,
}  # fmt: skip
FIGURES = "reward 0.312  accuracy 0.400  mismatch 1.00003  tokens/s 12,346  refit 0.0193 s 0.09 MB  step 61.00 s"


@pytest.fixture
def clock() -> list[float]:
    """The one element is the time."""
    return [1000.0]


@pytest.fixture
def display(clock, monkeypatch):
    """display(terminal) -> a Display of 10 steps, and what it writes to."""

    def make(terminal: bool) -> tuple[Display, io.StringIO]:
        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, width=130, highlight=False)
        monkeypatch.setattr("nemo_fp8rl.common.display.Screen", lambda **_: console)
        shown = Display("fp8_e2e", 10, 4)
        shown.progress.get_time = lambda: clock[0]
        shown.last_line = clock[0]
        return shown, out

    return make


def test_plain_lines_have_the_figures_and_the_time_left_of_slow_steps(display, clock):
    shown, out = display(False)
    with shown:
        for step in (5, 6, 7):
            clock[0] += 61.0
            shown.show_step(step, format_figures(LATEST))
    lines = out.getvalue().splitlines()
    assert lines[0] == f"step 5/10  {FIGURES}"
    assert lines[2] == f"step 7/10  {FIGURES}  eta 0:03:03"


def test_a_log_says_what_is_going_on_though_no_step_ends(display, monkeypatch):
    """A minute is a twentieth of a second here."""
    monkeypatch.setattr("nemo_fp8rl.common.display.SILENCE", 0.05)
    shown, out = display(False)
    shown.progress.get_time = time.monotonic
    shown.step_start = shown.last_line = time.monotonic()

    def next_lines() -> set[str]:
        """Of what is said from now on; the first may have been under way."""
        before = len(out.getvalue().splitlines())
        deadline = time.monotonic() + 10
        while len(said := out.getvalue().splitlines()[before:]) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        return set(said[1:])

    with shown:
        assert next_lines() == {"step 5/10  start  0:00:00"}
        shown.show_phase("generate 12/64")
        assert next_lines() == {"step 5/10  generate 12/64  0:00:00"}
        shown.step_start -= 75
        assert next_lines() == {"step 5/10  generate 12/64  0:01:15"}
        shown.show_step(5, format_figures(LATEST))
        assert next_lines() == {"step 6/10  0:00:00"}
    assert not shown.reminder.is_alive()


def test_a_terminal_shows_what_a_step_is_at(display):
    shown, out = display(True)
    with shown:
        shown.show_phase("generate 12/64")
        shown.live.refresh()
        assert "generate 12/64" in out.getvalue()
        shown.show_step(5, {})
        out.truncate(0)
        shown.live.refresh()
        assert "generate" not in out.getvalue()


def test_a_terminal_has_a_bar_and_the_figures(display, clock):
    shown, out = display(True)
    with shown:
        for step in (5, 6):
            clock[0] += 61.0
            shown.show_step(step, format_figures(LATEST))
        shown.say("a note")
    text = out.getvalue()
    assert "6/10" in text
    assert "0:04:04" in text
    assert FIGURES in text
    assert "a note" in text


def test_there_is_no_accuracy_before_the_first_validation():
    latest = {name: value for name, value in LATEST.items() if name != "validation/accuracy"}
    assert "accuracy" not in format_figures(latest)


READER_LEAVES = """
import sys
from nemo_fp8rl.common.display import Display
with Display("fp8_e2e", 3) as display:
    for step in range(1, 4):
        display.show_step(step, {"reward": "1"})
        sys.stderr.write(f"{step}\\n")
"""


@pytest.mark.parametrize("to", ["a pipe", "/dev/full"])
def test_a_run_goes_on_where_nobody_reads_what_it_says(to):
    out = open(to, "w") if to.startswith("/") else subprocess.PIPE  # noqa: SIM115
    command = [sys.executable, "-c", READER_LEAVES]
    with subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, text=True) as running:
        if running.stdout is not None:
            running.stdout.close()
        assert running.stderr.read().split()[:3] == ["1", "2", "3"]
    assert running.returncode == 0
