"""Lookups that are asked for at the same time, read together: one thread and one transaction serve many polls.

While a read is under way whoever asks waits for the next one, which begins when that one has ended and takes all who
wait. So an answer is never older than its question, nothing is kept, and the busier the service is the less a lookup
costs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

from anyio import to_thread

_MOST_TOGETHER = 100

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class Gathering(Generic[_Key, _Value]):
    """Reads values by their keys with `read`, which is called in a thread and leaves out what it does not find.

    What `read` raises is raised to all whom it was called for: a key must not be able to make it fail. To be used from
    the coroutines of one event loop.
    """

    def __init__(self, read: Callable[[Sequence[_Key]], Mapping[_Key, _Value]]) -> None:
        self._read = read
        self._waiting: list[tuple[_Key, asyncio.Future[_Value | None]]] = []
        self._reading: asyncio.Task[None] | None = None

    async def of(self, key: _Key) -> _Value | None:
        """Return the value of a key as it is now, None where there is none."""
        answer: asyncio.Future[_Value | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((key, answer))
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_all())
        return await answer

    async def _read_all(self) -> None:
        try:
            while self._waiting:
                together = self._waiting[:_MOST_TOGETHER]
                del self._waiting[:_MOST_TOGETHER]
                await self._read_together(together)
        finally:
            self._reading = None

    async def _read_together(self, together: list[tuple[_Key, asyncio.Future[_Value | None]]]) -> None:
        keys = list(dict.fromkeys(key for key, _ in together))
        try:
            found = await to_thread.run_sync(self._read, keys)
        except BaseException as error:
            for _, answer in together:
                if not answer.done():
                    answer.set_exception(error) if isinstance(error, Exception) else answer.cancel()
            if not isinstance(error, Exception):
                raise
        else:
            for key, answer in together:
                # A client that has left waits no more.
                if not answer.done():
                    answer.set_result(found.get(key))
