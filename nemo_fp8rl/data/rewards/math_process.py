"""math-verify in processes of its own, which can be ended when an answer would keep one busy for ever.

Its own time limits are alarms: they need a main thread, which a caller's thread may not be, and cannot interrupt the
arithmetic of a huge integer. So they run in the child's main thread, and the child itself is killed when they fail.
"""

import atexit
import logging
import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any

from nemo_fp8rl.common.errors import UserError, one_line

SECONDS = 5
"""Time for reading an answer, and again for comparing it; the child is ended after three times as long."""
SECONDS_TO_START = 300
"""Seconds for the start: sympy takes some to load, on a busy machine more: not on an answer's time."""
ATTEMPTS = 2
"""Attempts to start the child, and with an answer where it is killed meanwhile, which may not be the answer's fault."""
OF_A_GROUP = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that a terminal or a batch system sends to all processes of a run: to stop is the parent's to decide."""

AT_ONCE = min(8, len(os.sched_getaffinity(0)))
"""Children at once, of as many callers: a policy that collapses writes answers that each take all their time. No more
than there are processors for, or their alarms would ring for answers that had none.
"""

logger = logging.getLogger(__name__)
_places = threading.BoundedSemaphore(AT_ONCE)
_children: "set[_Child]" = set()
_idle: "list[_Child]" = []


def agree(gold: str, completion: str) -> bool:
    """Whether the two texts hold the same value; False when that takes too long. Starts a child where none is idle.

    Raises UserError where math-verify does not start.
    """
    with _places:
        for _ in range(ATTEMPTS):
            child = _taken()
            try:
                return child.agree(gold, completion)
            except TimeoutError:
                why = f"within {3 * SECONDS} s"
                break
            except (EOFError, OSError):
                why = "its process was killed"
            finally:
                if child.answered:
                    _idle.append(child)
                else:
                    child.end()
        logger.warning("math-verify did not decide (%s), scored 0: %.80r", why, completion)
        return False


def _taken() -> "_Child":
    try:
        return _idle.pop()
    except IndexError:
        return _started()


def _started() -> "_Child":
    for _ in range(ATTEMPTS):
        child = _Child()
        try:
            refusal = child.answer(SECONDS_TO_START)
        except (TimeoutError, EOFError, OSError) as error:
            refusal = str(error) or "its process was killed"
        else:
            if not refusal:
                atexit.unregister(_end_all)
                atexit.register(_end_all)  # before what multiprocessing does at exit: it asks, and a child ignores that
                return child
        child.end()
    raise UserError(f"data.default.env_name=math: math-verify does not start ({refusal}); mend `import math_verify`")


class _Child:
    """answered: the last thing that it was asked."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_serve, args=(theirs,), name="math-verify", daemon=True)
        self.process.start()
        theirs.close()
        self.answered = False
        _children.add(self)

    def agree(self, gold: str, completion: str) -> bool:
        self.answered = False
        self.pipe.send((gold, completion))
        same: bool = self.answer(3 * SECONDS)
        return same

    def answer(self, seconds: float) -> Any:
        """What it says next. Raises TimeoutError, and EOFError or OSError where it is gone."""
        if not self.pipe.poll(seconds):
            raise TimeoutError(f"it says nothing for {seconds} s")
        reply = self.pipe.recv()
        self.answered = True
        return reply

    def end(self) -> None:
        _children.discard(self)
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _end_all() -> None:
    _idle.clear()
    for child in list(_children):
        child.end()


def _serve(pipe: "Connection[Any, Any]") -> None:
    """Work in the child: "" or why it cannot, then an answer for each pair of texts until the parent is gone."""
    for number in OF_A_GROUP:
        signal.signal(number, signal.SIG_IGN)
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it would show whole answers, as they are
    try:
        from math_verify import parse, verify
    except ImportError as error:
        pipe.send(one_line(error))
        return
    pipe.send("")
    while True:
        try:
            gold, completion = pipe.recv()
        except EOFError:
            return
        read = [parse(text, parsing_timeout=SECONDS) for text in (gold, completion)]
        pipe.send(bool(verify(*read, timeout_seconds=SECONDS)))
