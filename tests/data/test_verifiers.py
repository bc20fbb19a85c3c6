"""Verifiers: 1 for the answer, 0 for anything else, whatever text a policy comes up with."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.data.rewards import VERIFIERS, check_verifier, math_process, verifiers

exact_match, math = VERIFIERS["exact_match"], VERIFIERS["math"]

EQUAL = [
    ("7", "7"),
    ("The answer is 95.", "95"),
    ("0.5", "1/2"),
    ("\\boxed{\\frac{1}{2}}", "0.5"),
    ("So we get $\\frac{3}{6}$.", "\\frac{1}{2}"),
    ("\\boxed{0.5}", "$\\frac{1}{2}$"),
    ("\\boxed{\\{2, 1\\}}", "$\\{1, 2\\}$"),
    ("\\boxed{x^2 + 2x + 1}", "$(x+1)^2$"),
    # Datasets such as MATH write the answer as bare LaTeX.
    ("\\boxed{\\sqrt{2}}", "\\sqrt{2}"),
    ("\\boxed{2\\sqrt{3}}", "2\\sqrt{3}"),
    ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
    ("\\boxed{x^2 + 1}", "x^2+1"),
    # An escaped dollar is a sum of money.
    ("\\boxed{\\$32{,}348}", "\\$32,\\!348"),
    ("\\boxed{18.9}", "\\$18.90"),
    ("\\boxed{\\text{\\$}18}", "\\text{\\$}18"),
    ("\\boxed{\\$5 \\text{ per hour}}", "\\$5 \\text{ per hour}"),
]
DIFFERENT = [
    ("8", "7"),
    ("", "7"),
    ("no idea", "7"),
    ("\\boxed{", "7"),
    ("\\boxed{\\frac{1}{3}}", "\\frac{1}{2}"),
    ("\\boxed{\\{1, 2, 3\\}}", "$\\{1, 2\\}$"),
    ("2", "2\\sqrt{3}"),
    ("\\boxed{1}", "1+\\sqrt{2}"),
]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [("95", "95", 1), (" 95\n", "95", 1), ("95", "95 ", 1), ("9 5", "95", 0), ("95.0", "95", 0), ("", "95", 0)],
)
def test_exact_match_ignores_surrounding_white_space_alone(completion, answer, reward):
    assert exact_match(completion, answer) == reward


@settings(deadline=None, max_examples=50)
@given(st.text(), st.text())
def test_exact_match_is_one_for_equal_texts_alone(completion, answer):
    assert exact_match(completion, answer) == (1.0 if completion.strip() == answer.strip() else 0.0)
    assert exact_match(answer, answer) == 1.0


@pytest.mark.parametrize(("completion", "answer"), EQUAL)
def test_math_accepts_the_same_value_in_another_form(completion, answer):
    assert math(completion, answer) == 1.0


@pytest.mark.parametrize(("completion", "answer"), DIFFERENT)
def test_math_refuses_another_value(completion, answer):
    assert math(completion, answer) == 0.0


def test_math_works_outside_the_main_thread():
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(math, "\\boxed{\\frac{1}{2}}", "0.5").result() == 1.0
        assert pool.submit(math, "\\boxed{\\frac{1}{2}}", "0.4").result() == 0.0


def run(completion: str, answer: str) -> tuple[str, str]:
    """What a process of its own prints (stdout, stderr); seconds are given where an unguarded power takes for ever."""
    code = f"from nemo_fp8rl.data.rewards import VERIFIERS; print(VERIFIERS['math']({completion!r}, {answer!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=15, check=True)
    return done.stdout.strip(), done.stderr


@pytest.mark.parametrize("completion", ["$9^{9^{9^9}}$", "\\boxed{10^{10^{10}}}"])
def test_math_gives_up_on_a_number_too_large_to_compute(completion):
    assert run(completion, "3") == ("0.0", "")  # the answer is not shown


def test_math_says_nothing_on_the_screen():
    assert run("\\boxed{7}", "7") == ("1.0", "")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_for_the_whole_group_does_not_reach_the_verifier(name):
    """A terminal's Ctrl-C, or a batch system's; the stop is the parent's to decide, the reward stays right."""
    code = """
import os, signal, sys
from nemo_fp8rl.data.rewards.verifiers import math
number = signal.Signals[sys.argv[1]]
signal.signal(number, lambda *_: None)
assert math("2/2", "1") == 1.0  # the child runs
os.killpg(os.getpgrp(), number)
print(math("\\\\boxed{2/6}", "1/3"))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, name], capture_output=True, check=False, start_new_session=True, timeout=60
    )
    assert (done.stdout, done.stderr) == (b"1.0\n", b"")


def test_a_verifier_that_was_killed_is_started_again_and_asked_again():
    assert math("2/2", "1") == 1.0
    for _ in range(2):
        (child,) = math_process._idle
        child.process.kill()
        child.process.join()
        assert math("\\boxed{2/6}", "1/3") == 1.0
        assert child not in math_process._children


def test_answers_that_take_their_time_take_it_beside_each_other(monkeypatch):
    """Two callers, two children."""
    math_process._kill_all()
    monkeypatch.setattr(math_process, "_slots", threading.BoundedSemaphore(2))
    slow = "\\boxed{2^{3^{4^{5}}}}"
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(math, [slow, slow, "\\boxed{7}"], ["3", "3", "7"])) == [0.0, 0.0, 1.0]
    assert len(math_process._children) == 2


def test_a_verifier_that_is_not_there_is_named_before_a_run(monkeypatch):
    with pytest.raises(UserError, match="'maths' is no verifier; choose one of exact_match, math"):
        check_verifier("maths")
    check_verifier("math")
    monkeypatch.setattr(verifiers, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install math-verify"):
        check_verifier("math")


def test_without_math_verify_the_run_ends_in_a_sentence(tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no such library')")
    code = "from nemo_fp8rl.data.rewards.verifiers import math; math('1', '2')"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env, timeout=60
    )
    assert "UserError: data.default.env_name=math: math-verify does not start (no such library); mend" in done.stderr
