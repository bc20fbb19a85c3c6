"""Processes that run math-verify, and that can be killed when an answer would keep one busy for ever.

math-verify's own time limits are alarms. Alarms need a main thread, which the caller's thread may not be, and they
cannot interrupt the arithmetic of a huge integer. So the alarms run in the main thread of a child process, and the
child is killed when they fail.
"""

import atexit
import logging
import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any

from nemo_fp8rl.common.errors import UserError, single_line

SECONDS = 5
"""Time for reading an answer, and again for comparing it; the child is killed after three times as long."""
SECONDS_TO_START = 300
"""Time for the start, which does not count as an answer's time: sympy loads slowly, above all on a busy machine."""
ATTEMPTS = 2
"""Attempts to start a child, and to verify an answer when its child is killed, which may not be the answer's fault."""
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that a terminal or a batch system sends to all processes of a run; the parent decides when to stop."""

MAX_PROCESSES = min(8, len(os.sched_getaffinity(0)))
"""Children that run at the same time, one per caller: the answers of a collapsed policy may each take all their time.
With more children than processors, alarms would ring for answers that had no processor.
"""

logger = logging.getLogger(__name__)
_slots = threading.BoundedSemaphore(MAX_PROCESSES)
_children: "set[_Child]" = set()
_idle: "list[_Child]" = []


def is_equal(gold: str, completion: str, as_nemo_rl: bool = False) -> bool:
    """Return True when the two texts have the same value, False when the comparison takes too long.

    as_nemo_rl: extract values as NeMo RL's environment `math` does: of the gold LaTeX alone

    A child is started when none is idle. Raises UserError where math-verify does not start.
    """
    with _slots:
        for _ in range(ATTEMPTS):
            child = _take_child()
            try:
                return child.is_equal(gold, completion, as_nemo_rl)
            except TimeoutError:
                reason = f"within {3 * SECONDS} s"
                break
            except (EOFError, OSError):
                reason = "its process was killed"
            finally:
                if child.is_idle:
                    _idle.append(child)
                else:
                    child.kill()
        logger.warning("math-verify did not decide (%s), scored 0: %.80r", reason, completion)
        return False


def _take_child() -> "_Child":
    try:
        return _idle.pop()
    except IndexError:
        return _start_child()


def _start_child() -> "_Child":
    for _ in range(ATTEMPTS):
        child = _Child()
        try:
            refusal = child.receive(SECONDS_TO_START)
        except (TimeoutError, EOFError, OSError) as error:
            refusal = str(error) or "its process was killed"
        else:
            if not refusal:
                atexit.unregister(_kill_all)
                atexit.register(_kill_all)  # runs before multiprocessing's own exit, whose SIGTERM a child ignores
                return child
        child.kill()
    raise UserError(f"data.default.env_name=math: math-verify does not start ({refusal}); mend `import math_verify`")


class _Child:
    """A process that compares pairs of texts.

    is_idle:  True when the child has answered its last request
    """

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, child_pipe = spawn.Pipe()
        self.process = spawn.Process(target=_serve, args=(child_pipe,), name="math-verify", daemon=True)
        self.process.start()
        child_pipe.close()
        self.is_idle = False
        _children.add(self)

    def is_equal(self, gold: str, completion: str, as_nemo_rl: bool) -> bool:
        self.is_idle = False
        self.pipe.send((gold, completion, as_nemo_rl))
        result: bool = self.receive(3 * SECONDS)
        return result

    def receive(self, seconds: float) -> Any:
        """Return the child's next message. Raises TimeoutError; EOFError or OSError where the child is gone."""
        if not self.pipe.poll(seconds):
            raise TimeoutError(f"it says nothing for {seconds} s")
        reply = self.pipe.recv()
        self.is_idle = True
        return reply

    def kill(self) -> None:
        _children.discard(self)
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _kill_all() -> None:
    _idle.clear()
    for child in list(_children):
        child.kill()


def _serve(pipe: "Connection[Any, Any]") -> None:
    """Run in the child: send "" or the reason why it cannot start, then a result for each pair of texts.

    It ends when the parent is gone.
    """
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # its warnings would print whole answers
    try:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    except ImportError as error:
        pipe.send(single_line(error))
        return
    pipe.send("")
    latex, both = (LatexExtractionConfig(),), (LatexExtractionConfig(), ExprExtractionConfig())
    while True:
        try:
            gold, completion, as_nemo_rl = pipe.recv()
        except EOFError:
            return
        expected = parse(gold, latex if as_nemo_rl else both, parsing_timeout=SECONDS)
        pipe.send(bool(verify(expected, parse(completion, both, parsing_timeout=SECONDS), timeout_seconds=SECONDS)))
