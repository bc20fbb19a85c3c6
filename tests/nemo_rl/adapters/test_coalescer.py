"""Calls that come together are asked together, and answered as answers come."""

import asyncio
import threading
from collections.abc import Iterator, Sequence

import pytest

from nemo_fp8rl.nemo_rl.adapters.coalescer import Coalescer


def test_calls_that_come_together_are_one_call_in_their_order():
    asked: list[Sequence[int]] = []

    def double(items: Sequence[int]) -> Iterator[tuple[int, int]]:
        asked.append(items)
        return reversed([(i, 2 * item) for i, item in enumerate(items)])

    async def both_rounds() -> list[list[int]]:
        ask = Coalescer(double, 1)
        return [await asyncio.gather(*map(ask, range(start, start + 5))) for start in (0, 10)]

    assert asyncio.run(both_rounds()) == [[0, 2, 4, 6, 8], [20, 22, 24, 26, 28]]
    assert asked == [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14]]


def test_nobody_waits_for_the_answers_of_others():
    """Neither of those asked together with it, nor of those asked before."""
    goes_on = threading.Event()

    def answer(items: Sequence[str]) -> Iterator[tuple[int, str]]:
        for i, item in enumerate(items):
            if item == "slow":
                assert goes_on.wait(timeout=10)
            yield i, item

    async def rounds() -> None:
        ask = Coalescer(answer, 2)
        quick, slow = asyncio.create_task(ask("quick")), asyncio.create_task(ask("slow"))
        assert await quick == "quick"
        assert await ask("later") == "later"
        assert not slow.done()
        goes_on.set()
        assert await slow == "slow"

    asyncio.run(rounds())


def test_a_caller_that_gives_up_takes_no_other_with_it():
    async def rounds() -> None:
        ask = Coalescer(enumerate, 1)
        first, second = asyncio.create_task(ask("first")), asyncio.create_task(ask("second"))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == "second"
        assert first.cancelled()

    asyncio.run(rounds())


def test_an_error_reaches_every_caller_that_has_no_answer():
    def fail(items: Sequence[int]) -> Iterator[tuple[int, int]]:
        yield 1, items[1]
        raise RuntimeError("the engine is gone")

    async def calls() -> list[object]:
        ask = Coalescer(fail, 1)
        return await asyncio.gather(*map(ask, (1, 2, 3)), return_exceptions=True)

    first, second, third = asyncio.run(calls())
    assert second == 2
    for error in (first, third):
        with pytest.raises(RuntimeError, match="the engine is gone"):
            raise error


def test_calls_that_find_no_thread_free_join_those_that_wait():
    goes_on, asked = threading.Event(), list[Sequence[str]]()

    def answer(items: Sequence[str]) -> Iterator[tuple[int, str]]:
        asked.append(items)
        if items == ["first"]:
            assert goes_on.wait(timeout=10)
        return enumerate(items)

    async def rounds() -> None:
        ask = Coalescer(answer, 1)
        tasks = []
        for name in ("first", "second", "third"):
            tasks.append(asyncio.create_task(ask(name)))
            await asyncio.sleep(0.05)
        goes_on.set()
        assert await asyncio.gather(*tasks) == ["first", "second", "third"]

    asyncio.run(rounds())
    assert asked == [["first"], ["second", "third"]]
