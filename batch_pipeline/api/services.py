"""What the routes share, handed to them as a dependency."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated
from weakref import WeakValueDictionary

from fastapi import Depends, Request

from batch_pipeline.api.gathering import Gathering
from batch_pipeline.api.openai_objects import BatchObject
from batch_pipeline.api.rates import Rates
from batch_pipeline.api.statuses import OwnedBatch, Statuses
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.customers import Known
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore


class Receiving:
    """Places for the bodies of files that are received: they bound the memory of all of them together.

    One customer has half of them at most, so that slow uploads of one leave places for the others.
    """

    def __init__(self, places: int) -> None:
        self._share = max(1, places // 2)
        self._all = asyncio.Semaphore(places)
        self._own: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def place(self, customer: str) -> AsyncIterator[None]:
        """Hold a place as soon as there is one."""
        own = self._own.get(customer)
        if own is None:
            own = self._own[customer] = asyncio.Semaphore(self._share)
        async with own, self._all:
            yield


@dataclass(frozen=True)
class Services:
    """The parts of one running service."""

    ledger: Ledger
    store: ObjectStore
    settings: Settings
    rates: Rates
    receiving: Receiving
    keys: Gathering[str, Known]
    """Whose the keys are with which requests come."""
    statuses: Statuses
    polled: Gathering[OwnedBatch, BatchObject]
    """The statuses that are polled one by one."""


async def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


Shared = Annotated[Services, Depends(_services)]
"""Annotate a route's parameter with it to be given the services."""
