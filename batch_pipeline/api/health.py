"""`/healthz`: this process answers. `/readyz`: the parts that it needs do as well. Neither asks for a key."""

from __future__ import annotations

import logging

from fastapi import APIRouter, Response
from pydantic import BaseModel
from sqlalchemy.exc import SQLAlchemyError

from batch_pipeline.api.services import Shared
from batch_pipeline.errors import StoreError
from batch_pipeline.store import keys

router = APIRouter(tags=["health"])
_log = logging.getLogger(__name__)


class Health(BaseModel):
    """That there is an answer."""

    status: str = "ok"


class Readiness(BaseModel):
    """Whether requests can be served, and which parts keep it from that."""

    ready: bool
    missing: list[str]


@router.get("/healthz")
async def healthz() -> Health:
    """Say that the process answers."""
    return Health()


@router.get("/readyz", responses={503: {"model": Readiness, "description": "A part cannot be used."}})
def readyz(services: Shared, response: Response) -> Readiness:
    """Say whether the ledger and the object store can be used."""
    missing = []
    try:
        services.ledger.now()
    except SQLAlchemyError:
        _log.warning("the ledger cannot be used", exc_info=True)
        missing.append("ledger")
    try:
        services.store.head(keys.probe("ready"))
    except StoreError:
        _log.warning("the object store cannot be used", exc_info=True)
        missing.append("object store")
    if missing:
        response.status_code = 503
    return Readiness(ready=not missing, missing=missing)
