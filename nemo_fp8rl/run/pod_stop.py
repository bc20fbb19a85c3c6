"""A pod that is about to end makes the run save first, wherever in the cluster the run's driver is.

Driver and pods share two files on a volume that all pods mount. The files are named after the Ray cluster, which
KubeRay creates anew for every attempt:

    NAME.running    written by the driver from its first step to its last checkpoint; its content changes every second
    NAME.stop       written by a pod's preStop hook, `nemo-fp8rl request-stop`: the name of its host. The hook then
                    waits until NAME.running is gone or has not changed for a minute; after that Kubernetes ends the pod

KubeRay leaves this to hooks where it suspends a job (rayjob_controller.go). Where a job is deleted, KubeRay has Ray
stop the driver by SIGTERM.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.run.stop_flag import StopFlag

FOLDER, NAME = "NEMO_FP8RL_STOP_FOLDER", "RAY_CLUSTER_NAME"
"""Variables of every pod: the folder of the files; the cluster of the attempt, which KubeRay sets."""
BEAT, SILENCE = 1.0, 60.0
"""Seconds between signs of life of the driver, and seconds without one after which it counts as dead."""


@dataclass(frozen=True)
class StopFiles:
    """The two files of an attempt.

    running:  the driver's sign of life
    stop:     a pod's request
    """

    running: Path
    stop: Path

    @classmethod
    def from_environment(cls) -> "StopFiles | None":
        """Return None outside a pod, where nobody can ask."""
        folder, name = os.environ.get(FOLDER), os.environ.get(NAME)
        return cls(Path(folder, f"{name}.running"), Path(folder, f"{name}.stop")) if folder and name else None


@contextmanager
def stop_on_pod_request(stop: StopFlag) -> Iterator[StopFlag]:
    """Set the flag when a pod asks within the block: the driver's side. Outside a pod it does nothing.

    Where the folder cannot be written, it prints that and the run goes on.
    """
    files = StopFiles.from_environment()
    if files is None:
        yield stop
        return
    is_over = threading.Event()
    thread = threading.Thread(target=_watch, args=(files, stop, is_over), name="stop request", daemon=True)
    try:
        files.running.parent.mkdir(parents=True, exist_ok=True)
        files.stop.unlink(missing_ok=True)  # left by a driver that was killed in the same cluster
        files.running.write_text("0")
        thread.start()
    except OSError as error:
        print(
            f"nemo-fp8rl: cannot write {files.running} ({error.strerror}), so a pod that is told to end will not "
            f"have this run save: let {FOLDER} name a folder that can be written",
            flush=True,
        )
    try:
        yield stop
    finally:
        is_over.set()
        if thread.ident is not None:
            thread.join()
            for file in (files.running, files.stop):
                with suppress(OSError):
                    file.unlink(missing_ok=True)


def _watch(files: StopFiles, stop: StopFlag, is_over: threading.Event) -> None:
    """Write the driver's sign of life, and set the flag at the first request."""
    count, has_request = 0, False
    while not is_over.wait(BEAT):
        count += 1
        with suppress(OSError):  # the volume may not answer for a while, or be full
            files.running.write_text(str(count))
        if not has_request and (host := _read(files.stop)):
            has_request = True
            stop.set()
            with suppress(OSError):  # the terminal may be gone
                print(f"pod {host.strip()} is to end: stopping after this step", flush=True)


def request_stop(linger: float = 0.0) -> None:
    """Ask the driver to stop, and return when it has saved, is dead, or was never there: the hook's side.

    linger:  seconds to wait afterwards, in the driver's own pod, so that its end is seen
    Raises:  UserError where the request cannot be written
    """
    files = StopFiles.from_environment()
    if files is None or not files.running.exists():
        return
    try:
        files.stop.write_text(socket.gethostname())
    except OSError as error:
        raise UserError(
            f"cannot write {files.stop} ({error.strerror}), so the run does not save before this pod ends: let "
            f"{FOLDER} name a folder that its pods can write"
        ) from None
    last, since = None, time.monotonic()
    while (content := _read(files.running)) is not None and time.monotonic() - since < SILENCE:
        if content != last:
            last, since = content, time.monotonic()
        time.sleep(BEAT)
    time.sleep(linger)


def _read(path: Path) -> str | None:
    """Return the content, None without a file, "" where the volume does not answer."""
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return None
    except OSError:
        return ""
