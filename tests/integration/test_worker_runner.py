"""The runner against a fake engine: what is cancelled before it has begun holds no place in the engine."""

from __future__ import annotations

import asyncio
import time

import pytest

from batch_pipeline.models import Model
from batch_pipeline.settings import Worker
from batch_pipeline.worker.chunk import HeldChunk
from batch_pipeline.worker.runner import Clocks, Runner
from tests.fakes import engine as fake_engine
from tests.fakes.batches import chat_request
from tests.fakes.held import held_chunk
from tests.fakes.workers import MODEL, attached


class Heard:
    """Notes which chunks are complete; anything else but hunger is a fault here."""

    def __init__(self) -> None:
        self.completed: list[int] = []
        self.all_done = asyncio.Event()

    def complete(self, chunk: HeldChunk) -> None:
        self.completed.append(chunk.ref.chunk)
        self.all_done.set()

    def late(self, chunk: HeldChunk) -> None:
        raise AssertionError(f"{chunk} is late")

    def hungry(self) -> None:
        pass

    def engine_state(self, ready: bool, detail: str | None) -> None:
        raise AssertionError(f"{ready} {detail}")

    def failed(self, error: BaseException) -> None:
        raise AssertionError("the runner failed") from error


@pytest.mark.parametrize("way", ["drop", "give way"])
def test_what_is_cancelled_before_it_has_begun_holds_no_place(way: str) -> None:
    """As where a heartbeat says of two chunks that they are lost: the first one's places are given to the second."""

    async def scenario(url: str) -> None:
        heard = Heard()
        model = Model(source="none", context_length=fake_engine.CONTEXT, max_in_flight=4)
        runner = Runner(attached(url), Worker(), model, heard, Clocks(time.monotonic, time.time))
        await runner.open()
        first, second = (
            held_chunk(
                number,
                [chat_request(10 * number + row, "say") for row in range(8)],
                model=MODEL,
                deadline_at=time.time() + 3600.0,
            )
            for number in (0, 1)
        )
        runner.add(first)
        runner.fill()
        assert runner.in_flight == 4  # and not one of them has had its first step
        if way == "drop":
            await runner.drop(first)
            assert runner.in_flight == 0
        else:
            runner.allow(0)
            await runner.give_way(0)
            assert runner.in_flight == 0
            runner.allow(4)
        runner.add(second)
        runner.fill()
        while second.ref.chunk not in heard.completed:
            heard.all_done.clear()
            await asyncio.wait_for(heard.all_done.wait(), 30)
        assert heard.completed == ([1] if way == "drop" else [0, 1])
        assert runner.in_flight == 0
        await runner.close()

    with fake_engine.running() as fake:
        asyncio.run(scenario(fake.url))
