"""The examples of docs/api.md run as they stand, one after another."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/api.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def names(tmp_path, monkeypatch) -> dict[str, object]:
    """The names that examples share."""
    monkeypatch.chdir(tmp_path)
    return {}


def run(examples: list[str], names: dict[str, object]) -> None:
    for example in examples:
        exec(compile(example, "docs/api.md", "exec"), names)


def test_examples_without_an_engine_run(names):
    run(EXAMPLES[:-1], names)
    assert len(EXAMPLES) == 5 and "judgement" in names


def test_the_example_of_a_refit_runs(names):
    """The last example takes one name of an earlier example."""
    from nemo_fp8rl.algorithms.mismatch import mismatch_metrics

    names["mismatch_metrics"] = mismatch_metrics
    run(EXAMPLES[-1:], names)
    assert names["error"] < 1.001
