"""Join concurrent calls for single prompts into one call: NeMo RL's asynchronous rollouts ask row by row."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Semaphore
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

WAIT_SECONDS = 0.005
"""Time that the first call waits for others; an engine needs longer for a single token."""


Item = TypeVar("Item")
Answer = TypeVar("Answer")
Calls = list[tuple[Item, "asyncio.Future[Answer]"]]


class Coalescer(Generic[Item, Answer]):
    """Collect the calls of an event loop and answer them together in a thread.

    While all threads are busy, new calls wait and join one batch.

    answer:   takes the items of a batch and yields (position, answer) as answers arrive
    threads:  number of batches that may be answered at the same time
    """

    def __init__(self, answer: Callable[[Sequence[Item]], Iterable[tuple[int, Answer]]], threads: int) -> None:
        self.answer, self.threads = answer, ThreadPoolExecutor(threads, "coalescer")
        self.free_threads = Semaphore(threads)
        self.pending_calls: WeakKeyDictionary[asyncio.AbstractEventLoop, Calls[Item, Answer]] = WeakKeyDictionary()

    async def __call__(self, item: Item) -> Answer:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        calls = self.pending_calls.setdefault(loop, [])
        calls.append((item, future))
        if len(calls) == 1:
            loop.call_later(WAIT_SECONDS, self._submit, loop)
        return await future

    def _submit(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.free_threads.acquire(blocking=False):
            self.threads.submit(self._answer_all, loop, self.pending_calls.pop(loop))
        else:
            loop.call_later(WAIT_SECONDS, self._submit, loop)

    def _answer_all(self, loop: asyncio.AbstractEventLoop, calls: "Calls[Item, Answer]") -> None:
        futures = {position: future for position, (_, future) in enumerate(calls)}
        try:
            for position, answer in self.answer([item for item, _ in calls]):
                loop.call_soon_threadsafe(_settle, futures.pop(position).set_result, answer)
        except Exception as error:
            for future in futures.values():
                loop.call_soon_threadsafe(_settle, future.set_exception, error)
        finally:
            self.free_threads.release()


def _settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
    """Pass a result or an exception to a caller, unless the call was cancelled."""
    with suppress(asyncio.InvalidStateError):
        set_outcome(outcome)
