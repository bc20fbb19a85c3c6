"""Calls that come together are answered together."""

import asyncio

import pytest

from nemo_fp8rl.nemo_rl.coalesce import Coalescer


def test_calls_that_come_together_are_one_call_in_their_order():
    asked: list[list[int]] = []

    def double(items: list[int]) -> list[int]:
        asked.append(items)
        return [2 * item for item in items]

    async def both_rounds() -> list[list[int]]:
        ask = Coalescer(double)
        return [await asyncio.gather(*map(ask, range(start, start + 5))) for start in (0, 10)]

    assert asyncio.run(both_rounds()) == [[0, 2, 4, 6, 8], [20, 22, 24, 26, 28]]
    assert asked == [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14]]


def test_a_call_that_comes_while_others_are_answered_is_answered_next():
    asked: list[list[str]] = []
    answering, goes_on = asyncio.Event(), asyncio.Event()

    async def rounds() -> None:
        loop = asyncio.get_running_loop()

        def answer(items: list[str]) -> list[str]:
            asked.append(items)
            loop.call_soon_threadsafe(answering.set)
            if items == ["first"]:
                asyncio.run_coroutine_threadsafe(goes_on.wait(), loop).result(timeout=10)
            return items

        ask = Coalescer(answer)
        first = asyncio.create_task(ask("first"))
        await answering.wait()
        second = asyncio.create_task(ask("second"))
        assert await second == "second"
        goes_on.set()
        assert await first == "first"

    asyncio.run(rounds())
    assert asked == [["first"], ["second"]]


def test_an_error_reaches_every_caller():
    def fail(items: list[int]) -> list[int]:
        raise RuntimeError("the engine is gone")

    async def calls() -> list[object]:
        ask = Coalescer(fail)
        return await asyncio.gather(ask(1), ask(2), return_exceptions=True)

    results = asyncio.run(calls())
    assert [str(result) for result in results] == ["the engine is gone"] * 2
    with pytest.raises(RuntimeError):
        raise results[0]
