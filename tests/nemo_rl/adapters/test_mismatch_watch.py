"""The alarm on what NeMo RL's own workers report to its logger."""

from dataclasses import replace
from typing import Any

import pytest

from nemo_fp8rl.algorithms.gates import GateStop
from nemo_fp8rl.config.fp8rl_schema import Fp8RlConfig
from nemo_fp8rl.nemo_rl.adapters.mismatch_watch import watch_logger

RECIPE = {"policy": {"generation": {"temperature": 1.0, "vllm_cfg": {"kv_cache_dtype": "auto"}}}}


class Logger:
    """NeMo RL's `Logger.log_metrics`, which keeps what it is given."""

    def __init__(self) -> None:
        self.logged: list[Any] = []

    def log_metrics(self, metrics, step, prefix="", step_metric=None, step_finished=False) -> None:
        self.logged.append((metrics, step, prefix, step_finished))


def log(action: str, value: float, prefix: str = "train", recipe: dict[str, Any] = RECIPE) -> Logger:
    logger = Logger()
    choice = replace(Fp8RlConfig(), mismatch_alarm=action)
    watch_logger(logger, recipe, choice, "fp8_e2e", asynchronous=False, experts=False)
    logger.log_metrics({"token_mult_prob_error": value}, 3, prefix=prefix, step_finished=True)
    assert logger.logged == [({"token_mult_prob_error": value}, 3, prefix, True)]
    return logger


def test_a_step_whose_mismatch_nothing_explains_is_said_twice(capsys):
    log("warn", 1.3)
    assert all(text.startswith("nemo-fp8rl: step 3: MISMATCH: ") for text in capsys.readouterr())


@pytest.mark.parametrize(
    ("action", "value", "prefix"), [("warn", 1.05, "train"), ("none", 99.0, "train"), ("warn", 99.0, "validation")]
)
def test_nothing_is_said_of_others(capsys, action, value, prefix):
    log(action, value, prefix)
    assert capsys.readouterr() == ("", "")


def test_an_fp8_cache_explains_more(capsys):
    recipe = {"policy": {"generation": {"temperature": 1.0, "vllm_cfg": {"kv_cache_dtype": "fp8"}}}}
    log("warn", 1.1, recipe=recipe)
    assert capsys.readouterr() == ("", "")
    log("warn", 1.1)
    assert "MISMATCH" in capsys.readouterr().err


def test_the_run_ends_where_the_recipe_says_so():
    with pytest.raises(GateStop, match="step 3: MISMATCH"):
        log("stop", 1.3)
