"""Lookups that are asked for at the same time are read together, and each gets its own answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from batch_pipeline.api.gathering import Gathering


class Reads:
    """A reading that waits until it is let go, and notes what it was asked for."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[list[str]] = []
        self.begun = threading.Event()
        self.may_go_on = threading.Event()
        self._error = error

    def __call__(self, keys: Sequence[str]) -> dict[str, str]:
        self.asked.append(list(keys))
        self.begun.set()
        assert self.may_go_on.wait(30)
        if self._error is not None:
            raise self._error
        return {key: key.upper() for key in keys if key != "none"}


async def _asked_while_a_read_is_under_way(reads: Reads, keys: Sequence[str]) -> list[asyncio.Task[str | None]]:
    gathering = Gathering(reads)
    tasks = [asyncio.create_task(gathering.of(keys[0]))]
    await asyncio.to_thread(reads.begun.wait, 30)
    tasks += [asyncio.create_task(gathering.of(key)) for key in keys[1:]]
    await asyncio.sleep(0)
    reads.may_go_on.set()
    return tasks


def test_who_asks_during_a_read_is_answered_by_the_next_one_together_with_all_others() -> None:
    reads = Reads()

    async def ask() -> list[str | None]:
        return await asyncio.gather(*await _asked_while_a_read_is_under_way(reads, ["a", "b", "none", "a", "b"]))

    assert asyncio.run(ask()) == ["A", "B", None, "A", "B"]
    # The second question for `a` came after the first read had begun: it is read anew.
    assert reads.asked == [["a"], ["b", "none", "a"]]


def test_an_error_is_raised_to_all_who_waited_and_the_next_ones_are_read() -> None:
    reads = Reads(error=ConnectionError("away"))

    async def ask() -> list[str | BaseException | None]:
        tasks = await _asked_while_a_read_is_under_way(reads, ["a", "b", "c"])
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [str(error) for error in asyncio.run(ask())] == ["away"] * 3
    assert reads.asked == [["a"], ["b", "c"]]


def test_who_leaves_while_it_waits_holds_up_nobody() -> None:
    reads = Reads()

    async def ask() -> str | None:
        gathering = Gathering(reads)
        first = asyncio.create_task(gathering.of("a"))
        await asyncio.to_thread(reads.begun.wait, 30)
        second, third = asyncio.create_task(gathering.of("b")), asyncio.create_task(gathering.of("c"))
        await asyncio.sleep(0)
        first.cancel()
        second.cancel()
        reads.may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await second
        return await third

    assert asyncio.run(ask()) == "C"
