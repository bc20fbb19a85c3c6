"""Rewards of the user's own: called by the names of their parameters, and every error names the sample."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.data.rewards import Answered, load_scorer, scoring
from tests.refusals import refusal_of

SAMPLES = [
    Answered("46", ("46",), {"prompt": "12+34=", "answer": 46, "level": 1}, "data.jsonl, line 3"),
    Answered("9", ("10",), {"prompt": "7+3=", "answer": 10, "level": 2}, "data.jsonl, line 8"),
]


@pytest.fixture
def module(tmp_path, monkeypatch) -> Callable[[str], str]:
    """module(text) -> the name of a module with this text in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    scoring.load_scorer.cache_clear()

    def make(text: str) -> str:
        name = f"my_rewards_{re.sub(r'[^a-z0-9]', '_', tmp_path.name)}_{len(list(tmp_path.iterdir()))}"
        Path(f"{name}.py").write_text(text)
        return name

    return make


def score(module, text: str, samples=SAMPLES) -> list[float]:
    scorer = load_scorer(f"{module(text)}:score")
    scorer.check_fields([(sample.place, sample.fields) for sample in samples])
    return scorer.score(samples)


@pytest.mark.parametrize(
    "text",
    [
        "def score(completion, answer): return completion == str(answer)",
        "def score(answer, completion, level, prompt): return float(completion == str(answer)) if level else prompt",
        "def score(completion, **fields): return int(completion == str(fields['answer']))",
        "def score(completion, answer, weight=1.0, missing=None): return weight * (completion == str(answer))",
        "class C:\n  def __call__(self, completion, answer): return completion == str(answer)\nscore = C()",
        "import numpy as np\ndef score(completion, answer): return np.float32(completion == str(answer))",
        "def score(completions, answer, **fields): return [c == str(a) for c, a in zip(completions, answer)]",
        "def score(completions, answers): return tuple(float(c == str(a)) for c, a in zip(completions, answers))",
        "import torch\ndef score(prompts, completions, answers, level): return torch.tensor([2.0 - n for n in level])",
    ],
    ids=["two", "order", "rest", "defaults", "callable", "numpy", "TRL", "batch", "tensor"],
)
def test_a_function_is_called_by_the_names_of_its_parameters(module, text):
    assert score(module, text) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ("None", "returned None for"),
        ("'1'", "returned '1' for"),
        ("float('nan')", "returned nan for"),
        ("float('inf')", "returned inf for"),
        ("10**300", "for"),
        ("[1.0]", "returned [1.0] for"),
        ("{'score': 1}", "returned {'score': 1} for"),
        ("1 / 0", "raised ZeroDivisionError: division by zero (my_rewards"),
        ("exit(3)", "raised SystemExit: 3"),
        ("answer.strip()", "raised AttributeError: 'int' object has no attribute 'strip'"),
    ],
)
def test_what_is_no_reward_is_one_sentence_with_the_sample(module, result, shown):
    text = f"def score(completion, answer):\n    return 0 if completion == '46' else {result}"
    message = refusal_of(score, module, text)
    assert shown in message
    assert "data.jsonl, line 8 (prompt '7+3=', completion '9')" in message
    assert message.startswith("data.default.env_name=my_rewards")


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ("[1.0]", "returned 1 rewards for 2 samples, the first of which is data.jsonl, line 3"),
        ("[1.0, 2.0, 3.0]", "returned 3 rewards"),
        ("1.0", "returned a float"),
        ("'ab'", "returned a str"),
        ("None", "returned a NoneType"),
        ("{1: 2, 3: 4}", "returned a dict"),
        ("[1.0, None]", "returned None for data.jsonl, line 8"),
        ("[1.0, float('nan')]", "returned nan for data.jsonl, line 8"),
        ("[][0]", "raised IndexError: list index out of range"),
    ],
)
def test_what_is_no_list_of_rewards_is_one_sentence(module, result, shown):
    assert shown in refusal_of(score, module, f"def score(completions): return {result}")


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("def score(completion): return 1", "M:other", "has no function other; it has score"),
        ("score = 3", "M:score", "has no function score"),
        ("def score(text): return 1", "M:score", "has no parameter `completion`, nor `completions`"),
        ("def score(completion, gold): return 1", "M:score", "the parameter gold, and data.jsonl, line 3 has no gold"),
        ("def score(completion, /): return 1", "M:score", "completion has no name to call it by"),
        ("async def score(completion): return 1", "M:score", "is a coroutine"),
        ("import no_such_library", "M:score", "it needs no_such_library; install it"),
        ("1 / 0", "M:score", "raises ZeroDivisionError: division by zero; mend the module"),
        ("def score(completion:", "M:score", "raises SyntaxError"),
        ("", "no_such_module:score", "there is no module no_such_module in"),
        ("", "no.such.module:score", "there is no module no in"),
        ("", "my_rewards.py:score", "nor where Python looks; leave out .py"),
        ("", "M.score", "write the module's dotted name, a colon and the function's"),
        ("", "folder/M.py:score", "write the module's dotted name"),
        ("score = print", "M:score", "args has no name to call it by"),
    ],
)
def test_a_function_that_cannot_be_called_is_named_before_a_run(module, text, name, message):
    made = module(text)

    def check() -> None:
        load_scorer(name.replace("M", made)).check_fields([(sample.place, sample.fields) for sample in SAMPLES])

    assert message in refusal_of(check)


def test_verifiers_take_the_best_of_several_accepted_answers():
    samples = [Answered("four", ("4", "four")), Answered("5", ("4", "four")), Answered("4", ("4", "four"))]
    assert load_scorer("exact_match").score(samples) == [1.0, 0.0, 1.0]
    assert load_scorer("exact_match").score([]) == []
    with pytest.raises(UserError, match="'maths' is no verifier; choose one of exact_match, math"):
        load_scorer("maths")


def test_numbers_of_other_libraries_are_rewards():
    from decimal import Decimal
    from fractions import Fraction

    from nemo_fp8rl.data.rewards.reward_function import to_reward

    for half in (0.5, np.float64(0.5), torch.tensor(0.5), torch.tensor([0.5]), Decimal("0.5"), Fraction(1, 2)):
        assert to_reward(half) == 0.5
    for wrong in (torch.zeros(2), np.zeros(2), 1j, object(), torch.tensor(float("nan")), b"1"):
        assert to_reward(wrong) is None
