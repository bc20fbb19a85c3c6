"""Calls for single prompts that come together, answered as one: NeMo RL's asynchronous rollouts ask row by row."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

SECONDS = 0.005
"""How long the first call waits for others; an engine needs more for a single token."""


Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Coalescer(Generic[Item, Answer]):
    """`answer`: many items in, as many answers out, in order; it runs in a thread. Calls of one event loop join."""

    def __init__(self, answer: Callable[[list[Item]], Sequence[Answer]]) -> None:
        self.answer = answer
        self.waiting: WeakKeyDictionary[asyncio.AbstractEventLoop, list[tuple[Item, asyncio.Future[Answer]]]]
        self.waiting = WeakKeyDictionary()

    async def __call__(self, item: Item) -> Answer:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        calls = self.waiting.setdefault(loop, [])
        calls.append((item, future))
        if len(calls) == 1:
            await asyncio.sleep(SECONDS)
            await self._answer_all(self.waiting.pop(loop))
        return await future

    async def _answer_all(self, calls: list[tuple[Item, "asyncio.Future[Answer]"]]) -> None:
        try:
            answers = await asyncio.to_thread(self.answer, [item for item, _ in calls])
        except Exception as error:
            for _, future in calls:
                future.set_exception(error)
        else:
            for (_, future), answer in zip(calls, answers, strict=True):
                future.set_result(answer)
