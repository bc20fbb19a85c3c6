"""Two files between a driver and the pods: who waits for whom, and how long."""

import errno
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from nemo_fp8rl.run import pod_stop
from nemo_fp8rl.run.pod_stop import StopFiles, request_stop, stop_on_pod_request
from nemo_fp8rl.run.signals import stop_on_signals
from nemo_fp8rl.run.stop_flag import StopFlag

AT_ONCE = 3.0


@pytest.fixture(autouse=True)
def pod(monkeypatch, tmp_path):
    """The environment of a pod, in hurry; the folder of the files."""
    monkeypatch.setattr(pod_stop, "BEAT", 0.02)
    monkeypatch.setenv(pod_stop.FOLDER, str(tmp_path / "stop"))
    monkeypatch.setenv(pod_stop.NAME, "attempt")
    return tmp_path / "stop"


@pytest.fixture
def asking():
    """asking() -> a thread that runs the hook."""

    def start():
        thread = threading.Thread(target=request_stop, daemon=True)
        thread.start()
        return thread

    return start


def wait_for(what):
    end = time.monotonic() + AT_ONCE
    while not what() and time.monotonic() < end:
        time.sleep(0.01)
    assert what()


def test_a_pod_waits_until_the_driver_is_done(asking, pod, capsys):
    calls: list[str] = []
    with stop_on_pod_request(StopFlag(on_set=lambda: calls.append("now"))) as stop:
        assert not stop.is_set
        hook = asking()
        wait_for(lambda: stop.is_set)
        time.sleep(0.2)
        assert calls == ["now"]
        assert hook.is_alive()
    hook.join(AT_ONCE)
    assert not hook.is_alive()
    assert not list(pod.iterdir())
    assert "is to end: stopping after this step" in capsys.readouterr().out


def test_where_no_driver_runs_a_pod_ends_at_once(pod):
    start = time.monotonic()
    request_stop()
    pod.mkdir()
    request_stop()
    assert not list(pod.iterdir())
    assert time.monotonic() - start < AT_ONCE


def test_a_driver_that_is_dead_is_not_waited_for(asking, pod, monkeypatch):
    monkeypatch.setattr(pod_stop, "SILENCE", 0.3)
    pod.mkdir()
    (pod / "attempt.running").write_text("17")
    hook = asking()
    hook.join(AT_ONCE)
    assert not hook.is_alive()


def test_a_driver_that_lives_is_waited_for_longer_than_a_silence(asking, monkeypatch):
    monkeypatch.setattr(pod_stop, "SILENCE", 1.0)
    with stop_on_pod_request(StopFlag()):
        hook = asking()
        time.sleep(2.0)
        assert hook.is_alive()
    hook.join(AT_ONCE)
    assert not hook.is_alive()


def test_another_attempts_word_counts_for_nothing(pod, monkeypatch):
    with stop_on_pod_request(StopFlag()) as stop:
        monkeypatch.setenv(pod_stop.NAME, "another")
        request_stop()
        time.sleep(0.2)
        assert not stop.is_set


@pytest.mark.parametrize("variable", [pod_stop.FOLDER, pod_stop.NAME])
def test_outside_a_pod_nobody_can_ask(monkeypatch, variable):
    monkeypatch.delenv(variable)
    assert StopFiles.from_environment() is None
    request_stop()


def test_a_folder_that_cannot_be_written_is_named_and_the_run_goes_on(pod, capsys):
    pod.write_text("a file")
    with stop_on_pod_request(StopFlag()) as stop:
        assert not stop.is_set
    assert re.search(rf"cannot write .*attempt\.running .*let {pod_stop.FOLDER} name a folder", capsys.readouterr().out)


def test_the_word_for_a_driver_that_was_killed_in_the_same_cluster_is_not_for_the_next(pod):
    pod.mkdir()
    (pod / "attempt.stop").write_text("a pod")
    with stop_on_pod_request(StopFlag()) as stop:
        time.sleep(0.2)
        assert not stop.is_set


def test_a_request_is_heard_whatever_is_written_in_it(pod, monkeypatch):
    monkeypatch.setattr("builtins.print", raising_oserror)
    with stop_on_pod_request(StopFlag()) as stop:
        (pod / "attempt.stop").write_bytes(b"\xff\xfe")
        wait_for(lambda: stop.is_set)


def raising_oserror(*args, **kwargs):
    raise OSError("no terminal")


def test_the_heads_pod_stays_for_a_while_where_there_was_a_driver(pod, asking):
    start = time.monotonic()
    request_stop(linger=5.0)
    assert time.monotonic() - start < AT_ONCE
    with stop_on_pod_request(StopFlag()):
        hook = threading.Thread(target=request_stop, args=(0.5,), daemon=True)
        hook.start()
        time.sleep(0.2)
    time.sleep(0.2)
    assert hook.is_alive()
    hook.join(AT_ONCE)
    assert not hook.is_alive()


def test_a_signal_after_a_pods_request_does_not_interrupt_and_a_second_one_does(pod):
    with stop_on_pod_request(StopFlag()) as stop, stop_on_signals(stop):
        (pod / "attempt.stop").write_text("a pod")
        wait_for(lambda: stop.is_set)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_a_volume_that_does_not_answer_is_no_request(pod, monkeypatch):
    real = Path.read_text

    def read_text(path, *arguments, **options):
        if path.suffix == ".stop":
            raise OSError(errno.EIO, "Input/output error")
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    with stop_on_pod_request(StopFlag()) as stop:
        time.sleep(0.2)
        assert not stop.is_set
