"""Calls for single prompts that come together, asked as one: NeMo RL's asynchronous rollouts ask row by row."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Semaphore
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

SECONDS = 0.005
"""How long the first call waits for others; an engine needs more for a single token."""


Item = TypeVar("Item")
Answer = TypeVar("Answer")
Calls = list[tuple[Item, "asyncio.Future[Answer]"]]


class Coalescer(Generic[Item, Answer]):
    """`answer`: many items in, (position, answer) out as they come. It runs in a thread, up to `threads` of them at
    once; while there are as many, calls wait and join. Calls of one event loop join.
    """

    def __init__(self, answer: Callable[[Sequence[Item]], Iterable[tuple[int, Answer]]], threads: int) -> None:
        self.answer, self.threads, self.free = answer, ThreadPoolExecutor(threads, "coalesced"), Semaphore(threads)
        self.waiting: WeakKeyDictionary[asyncio.AbstractEventLoop, Calls[Item, Answer]] = WeakKeyDictionary()

    async def __call__(self, item: Item) -> Answer:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        calls = self.waiting.setdefault(loop, [])
        calls.append((item, future))
        if len(calls) == 1:
            loop.call_later(SECONDS, self._ask, loop)
        return await future

    def _ask(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.free.acquire(blocking=False):
            self.threads.submit(self._answer_all, loop, self.waiting.pop(loop))
        else:
            loop.call_later(SECONDS, self._ask, loop)

    def _answer_all(self, loop: asyncio.AbstractEventLoop, calls: "Calls[Item, Answer]") -> None:
        left = {position: future for position, (_, future) in enumerate(calls)}
        try:
            for position, answer in self.answer([item for item, _ in calls]):
                loop.call_soon_threadsafe(_settle, left.pop(position).set_result, answer)
        except Exception as error:
            for future in left.values():
                loop.call_soon_threadsafe(_settle, future.set_exception, error)
        finally:
            self.free.release()


def _settle(give: Callable[[Any], None], what: Any) -> None:
    """Give a caller its result, or its exception, unless the call was cancelled."""
    with suppress(asyncio.InvalidStateError):
        give(what)
