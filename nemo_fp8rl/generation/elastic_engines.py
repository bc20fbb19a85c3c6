"""Engines that join and leave a run: the number of engines follows the number that is wanted, in the background.

wanted        cluster.generation_engines at the start of a run, then what `nemo-fp8rl engines` writes
an engine dies, and enough others have prompts
              its place is empty at once (`EnginePool.replace`), and another engine starts there
one joins     it starts beside the others, which goes on for minutes and stops neither generation nor training; then
              it gets the committed version (`RefitBridge.admit`), and prompts from its commit on
one leaves    it gets no new prompts, answers what it has, and is ended
one cannot start
              its place stays empty, and the start is tried again every `RETRY_SECONDS`
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread

from nemo_fp8rl.common.atomic_files import write_atomically
from nemo_fp8rl.common.errors import UserError, single_line
from nemo_fp8rl.config.run_schema import ClusterConfig
from nemo_fp8rl.generation.engine_pool import EnginePool
from nemo_fp8rl.refit.bridge import RefitBridge

logger = logging.getLogger(__name__)

Work = Callable[[int], None]
FILE = "wanted_engines"
"""File in a run's folder with the number of engines that its operator wants."""
RETRY_SECONDS = 30.0
"""Pause before another attempt to start an engine that could not start."""
LOOK_SECONDS = 1.0
"""Pause between two looks at what has become possible meanwhile."""


class ElasticEngines:
    """Starts and ends engines until as many are present as are wanted; a context manager.

    One thread decides (`_supervise`); every engine that joins or leaves has a thread of its own.

    wanted:             engines that there should be
    joining, ending:    places at which a thread starts, or ends, an engine
    joined, left, lost: how often an engine did so
    """

    def __init__(self, pool: EnginePool, bridge: RefitBridge) -> None:
        self.pool, self.bridge, self.cluster = pool, bridge, pool.cfg.cluster
        self.wanted = self.cluster.generation_engines
        self.joining, self.ending, self.next_attempts = set[int](), set[int](), dict[int, float]()
        self.joined = self.left = self.lost = 0
        self._notes = SimpleQueue[str]()
        self._failures = dict[int, str]()
        self._last_request = ""
        self._changed, self._is_over = Event(), False
        self._thread = Thread(target=self._supervise, name="engines", daemon=True)

    def __enter__(self) -> "ElasticEngines":
        if self.cluster.least_engines < self.cluster.most_engines:
            self.pool.report_losses_to(self._note_loss)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Start and end no more engines; one that starts just now is ended with the pool."""
        self._is_over = True
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join()

    def want(self, count: int) -> None:
        """Have so many engines, as soon as they have started or answered what they have."""
        check_count(self.cluster, count)
        self.wanted = count
        self._changed.set()

    def follow(self, run: Path) -> list[str]:
        """Take the number in the folder of the run, where there is a new one; return what happened as sentences."""
        try:
            request = (run / FILE).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            request = ""
        if request and request != self._last_request:
            self._last_request = request
            try:
                self.want(parse_count(request))
                self._notes.put(f"engines: {self.wanted} wanted")
            except UserError as error:
                self._notes.put(f"{run / FILE} is not followed: {error}")
        return [self._notes.get() for _ in range(self._notes.qsize())]

    def metrics(self) -> dict[str, float]:
        """Return the number of engines that get prompts, where it can change."""
        return {"generation/engines": len(self.pool.serving_engines())} if self._thread.is_alive() else {}

    def _note_loss(self, engine: int, death: Exception, returns: bool) -> None:
        self.lost += 1
        fate = "another one starts in its place"
        if not returns:
            self.wanted -= 1
            fate = f"its place stays empty after {self.pool.engine_restarts} restarts (cluster.max_engine_restarts)"
        self._notes.put(f"engine {engine} died ({single_line(death)[:200]}); {fate}")
        self._changed.set()

    def _supervise(self) -> None:
        while not self._is_over:
            self._adjust()
            self._changed.wait(LOOK_SECONDS)
            self._changed.clear()

    def _adjust(self) -> None:
        """Begin what lacks to the wanted number."""
        joining, ending, now = set(self.joining), set(self.ending), time.monotonic()
        present = set(self.pool.present_engines())  # read last, or an engine that joins just now would be in neither
        lacking = self.wanted - len(present - ending | joining)
        used = present | joining | ending
        places = range(self.cluster.most_engines)
        empty = [i for i in places if i not in used and now >= self.next_attempts.get(i, 0.0)]
        for engine in empty[: max(lacking, 0)]:
            self._begin(self._join, engine, self.joining)
        for engine in sorted(present - joining - ending, reverse=True)[: max(-lacking, 0)]:
            if self.pool.begin_to_leave(engine):
                self._begin(self._leave, engine, self.ending)

    def _begin(self, work: Work, engine: int, at_work: set[int]) -> None:
        at_work.add(engine)
        Thread(target=self._do, args=(work, engine, at_work), name=f"engine {engine}", daemon=True).start()

    def _do(self, work: Work, engine: int, at_work: set[int]) -> None:
        try:
            work(engine)
        finally:
            at_work.discard(engine)
            self._changed.set()

    def _join(self, engine: int) -> None:
        start = time.monotonic()
        try:
            self.pool.start(engine)
            self.bridge.admit(engine)
        except Exception as error:
            self.next_attempts[engine] = time.monotonic() + RETRY_SECONDS
            with suppress(Exception):
                self.bridge.release(engine)
            with suppress(Exception):
                self.pool.retire(engine)
            if self._failures.get(engine) != str(error) and not self._is_over:
                self._failures[engine] = str(error)
                why = single_line(error)[:300] or type(error).__name__
                self._notes.put(f"engine {engine} did not join ({why}); it is tried again every {RETRY_SECONDS:g} s")
            return
        self._failures.pop(engine, None)
        if engine not in self.pool.present:  # it died, which is noted
            return
        self.joined += 1
        state = f"with version {self.bridge.version}"
        if engine in self.pool.missing:
            state = "and waits for the weights of the next refit"
        self._notes.put(f"engine {engine} joined after {time.monotonic() - start:.1f} s {state}")

    def _leave(self, engine: int) -> None:
        self.pool.wait_for_answers(engine)
        if engine in self.pool.leaving:  # else it died meanwhile
            try:
                self.bridge.release(engine)
            except Exception as error:  # of the trainer, whose end of the links is then gone
                logger.warning("engine %d left: %s", engine, error)
            with suppress(Exception):
                self.pool.retire(engine)
        elif engine in self.pool.present:  # it was needed again
            return
        self.left += 1
        self._notes.put(f"engine {engine} left")


def parse_count(text: str) -> int:
    """Return a number of engines. Raises UserError."""
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UserError(f"{text[:40]!r} is no number of engines: give a whole number")
    return int(text)


def check_count(cluster: ClusterConfig, count: int) -> None:
    """Raise UserError for a number of engines that a run cannot have."""
    least, most = cluster.least_engines, cluster.most_engines
    if not least <= count <= most:
        raise UserError(
            f"{count} engines: this run has {least} to {most} (cluster.min_generation_engines, "
            "cluster.max_generation_engines); give such a number, or continue the run with --resume and other keys"
        )


def write_wanted(run: Path, cluster: ClusterConfig, count: int) -> None:
    """Tell the run in the folder how many engines it is to have. Raises UserError, OSError."""
    check_count(cluster, count)
    write_atomically(run / FILE, f"{count}\n")
