"""What NeMo RL's loop is told of the time that its job has left; it needs no checkout."""

import time

import pytest

from nemo_fp8rl.nemo_rl.run import STOP_AT, save_in_time, seconds_of, shorter


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
    assert shorter(limit, left) == chosen
    assert seconds_of(chosen) == int(chosen[:2]) * 86400 + int(chosen[3:5]) * 3600 + int(chosen[6:8]) * 60 + int(
        chosen[9:]
    )


def test_the_time_before_the_loop_counts(monkeypatch):
    monkeypatch.setenv(STOP_AT, str(int(time.time()) + 1000))
    checkpointing = {"enabled": True, "checkpoint_must_save_by": None}
    save_in_time(checkpointing)
    assert 990 <= seconds_of(checkpointing["checkpoint_must_save_by"]) <= 1000


def test_without_a_job_the_recipe_says(monkeypatch):
    monkeypatch.delenv(STOP_AT, raising=False)
    checkpointing = {"enabled": True, "checkpoint_must_save_by": "00:03:45:00"}
    save_in_time(checkpointing)
    assert checkpointing["checkpoint_must_save_by"] == "00:03:45:00"
