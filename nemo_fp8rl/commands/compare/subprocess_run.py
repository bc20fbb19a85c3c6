"""One command of ours in a process of its own. Signals reach it through us, once each: it ends at a step border."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from nemo_fp8rl.common.errors import INTERRUPTED, UserError
from nemo_fp8rl.run.signals import GracefulStop

SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_TO_END = 20
LAST_LINES = 5


def run(arguments: Sequence[str], log: Path, stop: GracefulStop, look: Callable[[], None], keep: Sequence[int]) -> bool:
    """`nemo-fp8rl ARGUMENTS`, output appended to `log`; `look` is called while it works. False: it was interrupted.
    keep: descriptors that it has open, too, such as a lock's.

    Raises UserError, with its last lines, when it failed.
    """
    if stop.requested:
        return False
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "nemo_fp8rl.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": "1", **os.environ},  # so small a model loses by more threads
            process_group=0,  # a terminal's Ctrl-C would reach it twice
            pass_fds=keep,
        )
    try:
        code = _wait(process, stop, look)
    finally:
        _end(process)
    if code in (0, INTERRUPTED):
        return code == 0
    if stop.requested and code == -signal.SIGINT:  # before Python could hear it
        return False
    raise UserError(f"{arguments[0]} ended with code {code}, see {log}: {_last_lines(log)}")


def _wait(process: "subprocess.Popen[bytes]", stop: GracefulStop, look: Callable[[], None]) -> int:
    told = False
    while True:
        if stop.requested and not told:
            process.send_signal(signal.SIGINT)
            told = True
        try:
            return process.wait(SECONDS_BETWEEN_LOOKS)
        except subprocess.TimeoutExpired:
            look()


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process that a second Ctrl-C leaves: a SIGINT and SECONDS_TO_END, then SIGKILL; a third ends it at once."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _last_lines(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-LAST_LINES:]) or "it said nothing"
