"""Calls to the store and the ledger that outlast an outage of either."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from sqlalchemy.exc import InterfaceError, OperationalError

from batch_pipeline.errors import StoreError
from batch_pipeline.plain import one_line
from batch_pipeline.store import ObjectMissing, PreconditionFailed
from batch_pipeline.worker.pauses import pause_seconds

log = logging.getLogger(__name__)

_FIRST_SECONDS = 0.5
_P = ParamSpec("_P")
_T = TypeVar("_T")

OUTAGES = (OperationalError, InterfaceError, StoreError)
"""What a store or a database raises that is away, restarting or too busy (and see `is_outage`)."""


class GivenUp(Exception):
    """The wait for the end of an outage was given up, because what was to be written is not wanted any more."""


def is_outage(error: BaseException) -> bool:
    """Return whether the same call may well succeed later: the other side is away, and has not said no."""
    return isinstance(error, OUTAGES) and not isinstance(error, ObjectMissing | PreconditionFailed)


class Outages:
    """Makes calls in threads, and makes them again, with growing pauses, while the other side is away."""

    def __init__(self, source: random.Random, told: Callable[[str | None], None] = lambda _trouble: None) -> None:
        """`told` hears in the event loop what is away, in words, and None once every call has come through again."""
        self._random = source
        self._told = told
        self._troubles: dict[object, str] = {}

    async def outlast(
        self, give_up: asyncio.Event | None, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Return what the call returns; every call made here must be one that may be repeated.

        Raises GivenUp once `give_up` is set and the call has failed, and whatever the call raises that is no outage.
        """
        tries = 0
        me = object()
        try:
            while True:
                try:
                    return await asyncio.to_thread(call, *args, **kwargs)
                except OUTAGES as error:
                    if not is_outage(error):
                        raise
                    tries += 1
                    self._trouble(me, said(error))
                    pause = pause_seconds(tries, self._random, first_seconds=_FIRST_SECONDS)
                    log.warning("%s; next try in %.1f s", said(error), pause)
                    if await was_set(give_up, pause):
                        raise GivenUp from error
        finally:
            self._trouble(me, None)

    def _trouble(self, caller: object, text: str | None) -> None:
        before = next(iter(self._troubles.values()), None)
        if text is None:
            self._troubles.pop(caller, None)
        else:
            self._troubles[caller] = text
        now = next(iter(self._troubles.values()), None)
        if now != before:
            self._told(now)


def said(error: BaseException) -> str:
    """Return an outage in words, on one line: which part is away, and what it or its client says."""
    part = "the object store" if isinstance(error, StoreError) else "the ledger"
    return f"{part} cannot be used: {one_line(str(error))}"


async def was_set(event: asyncio.Event | None, timeout_seconds: float) -> bool:
    """Wait so long, or until the event; return whether it is set."""
    if event is None:
        await asyncio.sleep(timeout_seconds)
        return False
    try:
        await asyncio.wait_for(event.wait(), timeout_seconds)
    except TimeoutError:
        return False
    return True
