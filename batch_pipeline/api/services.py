"""What the routes share, handed to them as a dependency."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from batch_pipeline.api.rates import Rates
from batch_pipeline.ledger import Ledger
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore


@dataclass(frozen=True)
class Services:
    """The parts of one running service."""

    ledger: Ledger
    store: ObjectStore
    settings: Settings
    rates: Rates
    receiving: asyncio.Semaphore
    """Held while the body of a file is received: it bounds the memory of all of them together."""


def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


Shared = Annotated[Services, Depends(_services)]
"""Annotate a route's parameter with it to be given the services."""
