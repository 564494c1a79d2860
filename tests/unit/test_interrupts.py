"""A signal whose error was swallowed somewhere below native code is not forgotten."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from batch_pipeline import interrupts
from batch_pipeline.worker import signals


class Told(BaseException):
    """What Dagster's handler raises is like this."""


@pytest.fixture
def raising() -> Iterator[None]:
    """Raise at SIGTERM, wherever the main thread is."""

    def handler(_number: int, _frame: FrameType | None) -> None:
        raise Told

    before = signal.signal(signal.SIGTERM, handler)
    yield
    signal.signal(signal.SIGTERM, before)


def swallowed() -> None:
    """Be told to end where the error is lost."""
    with pytest.raises(Told):
        os.kill(os.getpid(), signal.SIGTERM)


def wishes() -> int:
    """How often an event loop that takes the signals over is told to end."""

    async def look() -> int:
        wishes: list[None] = []
        with signals.calling(lambda: wishes.append(None), asyncio.get_running_loop()):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return len(wishes)

    return asyncio.run(look())


@pytest.mark.usefixtures("raising")
def test_whoever_takes_the_signals_over_hears_of_one_that_came_before() -> None:
    with interrupts.kept():
        assert wishes() == 0
    with interrupts.kept():
        swallowed()
        assert wishes() == 1
        assert wishes() == 0, "once"
    assert wishes() == 0


@pytest.mark.usefixtures("raising")
def test_it_is_kept_inside_of_another_that_keeps_it_and_what_was_there_before_is_given_back() -> None:
    with interrupts.kept():
        with interrupts.kept():
            swallowed()
            assert interrupts.were_told()
        assert not interrupts.were_told()
        swallowed()
        assert interrupts.were_told()
    assert signal.set_wakeup_fd(-1) == -1


def test_another_thread_can_take_no_signals_and_keeps_none() -> None:
    found: list[bool] = []

    def keep() -> None:
        with interrupts.kept():
            found.append(interrupts.were_told())

    thread = threading.Thread(target=keep)
    thread.start()
    thread.join()
    assert found == [False]
