"""Runs one `nemo-fp8rl` command in a process, which gets each signal once, from here, and ends at a step border."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from nemo_fp8rl.common.errors import INTERRUPTED, UserError
from nemo_fp8rl.run.stop_flag import StopFlag

POLL_SECONDS = 0.5
END_SECONDS = 20
LAST_LINES = 5


def run(
    arguments: Sequence[str],
    log: Path,
    stop: StopFlag,
    show_progress: Callable[[], None],
    keep: Sequence[int],
) -> bool:
    """Run `nemo-fp8rl ARGUMENTS`. Return False if it was interrupted.

    log:            the file to which its output is appended
    show_progress:  called while it works
    keep:           file descriptors that the command inherits, such as a lock's
    Raises:         UserError with the last lines of the log if the command failed
    """
    if stop.is_set:
        return False
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "nemo_fp8rl.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": "1", **os.environ},  # more threads slow down so small a model
            process_group=0,  # otherwise a terminal's Ctrl-C would reach it twice
            pass_fds=keep,
        )
    try:
        code = _wait(process, stop, show_progress)
    finally:
        _end(process)
    if code in (0, INTERRUPTED):
        return code == 0
    if stop.is_set and code == -signal.SIGINT:  # the signal came before Python handled signals
        return False
    raise UserError(f"{arguments[0]} ended with code {code}, see {log}: {_last_lines(log)}")


def _wait(process: "subprocess.Popen[bytes]", stop: StopFlag, show_progress: Callable[[], None]) -> int:
    was_signalled = False
    while True:
        if stop.is_set and not was_signalled:
            process.send_signal(signal.SIGINT)
            was_signalled = True
        try:
            return process.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            show_progress()


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process that a second Ctrl-C leaves: SIGINT, END_SECONDS, then SIGKILL. A third Ctrl-C ends it at once."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _last_lines(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-LAST_LINES:]) or "it printed nothing"
