"""How a pod that is told to end has the run save first, wherever in the cluster its driver is.

Two files on a volume that all pods mount, named after the Ray cluster, which KubeRay makes anew for every attempt:

    NAME.running    the driver's, from its first step to its last checkpoint; its content changes every second
    NAME.stop       of a pod, by its preStop hook, `nemo-fp8rl request-stop`: its host's name. The hook then waits until
                    NAME.running is gone, or says nothing new for a minute, and Kubernetes ends the pod after that

KubeRay leaves this to hooks where it suspends a job (rayjob_controller.go); a job that is deleted it has Ray stop, by
SIGTERM to the driver.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from nemo_fp8rl.common.errors import UserError

FOLDER, NAME = "NEMO_FP8RL_STOP_FOLDER", "RAY_CLUSTER_NAME"
"""Variables of every pod: where the files are; the cluster of the attempt, which KubeRay says."""
BEAT, SILENCE = 1.0, 60.0
"""Seconds between signs of the driver's life, and after which it counts as dead."""


class StopRequest:
    """The driver's side; asked: called once a pod has. Open with `with`; says so where it cannot work."""

    def __init__(self, folder: Path, name: str, asked: Callable[[], None] = lambda: None) -> None:
        self.running, self.stop = folder / f"{name}.running", folder / f"{name}.stop"
        self._asked = asked
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="stop request", daemon=True)

    @classmethod
    def of_environment(cls, asked: Callable[[], None] = lambda: None) -> "StopRequest | None":
        """None where no pod can ask."""
        folder, name = os.environ.get(FOLDER), os.environ.get(NAME)
        return cls(Path(folder), name, asked) if folder and name else None

    def __enter__(self) -> Self:
        try:
            self.running.parent.mkdir(parents=True, exist_ok=True)
            self.stop.unlink(missing_ok=True)  # of a driver that was killed in the same cluster
            self.running.write_text("0")
            self._thread.start()
        except OSError as error:
            print(
                f"nemo-fp8rl: cannot write {self.running} ({error.strerror}), so a pod that is told to end will not "
                f"have this run save: let {FOLDER} name a folder that can be written",
                flush=True,
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
            for file in (self.running, self.stop):
                with suppress(OSError):
                    file.unlink(missing_ok=True)

    def _beat(self) -> None:
        count, heard = 0, False
        while not self._ended.wait(BEAT):
            count += 1
            with suppress(OSError):  # of a volume that does not answer for a while, or is full
                self.running.write_text(str(count))
            if not heard and (who := _read(self.stop)):
                heard = True
                self._asked()
                with suppress(OSError):  # of a terminal that is gone
                    print(f"pod {who.strip()} is to end: stopping after this step", flush=True)


def request_stop(linger: float = 0.0) -> None:
    """The hook's side: ask the driver, and return when it has saved, is dead, or was never there.

    linger: seconds to wait once more, in the pod that the driver runs in: its end is to be seen. Raises UserError where
    it cannot ask.
    """
    request = StopRequest.of_environment()
    if request is None or not request.running.exists():
        return
    try:
        request.stop.write_text(socket.gethostname())
    except OSError as error:
        raise UserError(
            f"cannot write {request.stop} ({error.strerror}), so the run does not save before this pod ends: let "
            f"{FOLDER} name a folder that its pods can write"
        ) from None
    last, since = None, time.monotonic()
    while (now := _read(request.running)) is not None and time.monotonic() - since < SILENCE:
        if now != last:
            last, since = now, time.monotonic()
        time.sleep(BEAT)
    time.sleep(linger)


def _read(path: Path) -> str | None:
    """None where it is not."""
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return None
    except OSError:  # of a volume that does not answer for a while
        return ""
