"""What NeMo RL's loop is told of the time that its job has left, and what is done when it ends; no checkout needed."""

import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from nemo_fp8rl.nemo_rl.run.loop_stop import LoopEnd, LoopStop
from nemo_fp8rl.nemo_rl.run.run_loop import STOP_AT, limit_time, parse_seconds, shorten_limit


@pytest.mark.parametrize(
    ("limit", "left", "chosen"),
    [
        (None, 93784.9, "01:02:03:04"),
        ("00:04:00:00", 3600, "00:01:00:00"),
        ("00:00:10:00", 3600, "00:00:10:00"),
        (None, -5, "00:00:00:00"),  # a step, and it is saved
    ],
)
def test_the_shorter_of_the_recipes_limit_and_what_is_left(limit, left, chosen):
    assert shorten_limit(limit, left) == chosen
    assert parse_seconds(chosen) == int(chosen[:2]) * 86400 + int(chosen[3:5]) * 3600 + int(chosen[6:8]) * 60 + int(
        chosen[9:]
    )


def test_the_time_before_the_loop_counts(monkeypatch):
    monkeypatch.setenv(STOP_AT, str(int(time.time()) + 1000))
    checkpointing = {"enabled": True, "checkpoint_must_save_by": None}
    limit_time(checkpointing)
    assert 990 <= parse_seconds(checkpointing["checkpoint_must_save_by"]) <= 1000


def test_without_a_job_the_recipe_says(monkeypatch):
    monkeypatch.delenv(STOP_AT, raising=False)
    checkpointing = {"enabled": True, "checkpoint_must_save_by": "00:03:45:00"}
    limit_time(checkpointing)
    assert checkpointing["checkpoint_must_save_by"] == "00:03:45:00"


def test_where_nothing_is_saved_there_is_no_limit(monkeypatch):
    """NeMo RL's loop would end by it, and its state would not say that it did."""
    monkeypatch.setenv(STOP_AT, str(int(time.time()) + 1000))
    checkpointing = {"enabled": False, "checkpoint_must_save_by": None}
    limit_time(checkpointing)
    assert checkpointing["checkpoint_must_save_by"] is None


@pytest.mark.parametrize(
    ("raised", "finished"), [(ValueError("it fails"), True), (LoopEnd(), False), (KeyboardInterrupt(), False)]
)
def test_what_a_loop_that_fails_has_saved_is_written_and_its_error_is_the_one_that_is_seen(raised, finished):
    """One that fails while it is written, too. A second Ctrl-C waits for nothing."""
    calls = []

    def finish() -> None:
        calls.append(1)
        raise OSError("no room")

    stop = LoopStop(SimpleNamespace(), steps=lambda: 0, finish=finish, asynchronous=False)
    with nullcontext() if isinstance(raised, LoopEnd) else pytest.raises(type(raised)), stop.listen():
        raise raised
    assert bool(calls) == finished
