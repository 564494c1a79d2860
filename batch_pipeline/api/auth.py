"""Whose request it is: the key in `Authorization: Bearer KEY` or `x-api-key: KEY`, and how often that key may ask."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import Depends
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer

from batch_pipeline.api.problems import RequestRefused
from batch_pipeline.api.services import Shared
from batch_pipeline.settings import Limits

_bearer = HTTPBearer(auto_error=False, description="A key of `batch-pipeline customers keys add`.")
_header = APIKeyHeader(name="x-api-key", auto_error=False, description="The same key, as Anthropic's SDK sends it.")


class Caller(msgspec.Struct, frozen=True):
    """The customer behind a request. Every lookup on its behalf names `customer` (I8)."""

    customer: str
    key_id: str
    limits: Limits


async def _caller(
    services: Shared,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    header: Annotated[str | None, Depends(_header)],
) -> Caller:
    secret = bearer.credentials if bearer is not None else header
    if not secret:
        raise RequestRefused(
            401,
            "missing_api_key",
            "No key was sent: send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`.",
            headers={"WWW-Authenticate": "Bearer"},
        )
    known = await services.keys.of(secret)
    if known is None:
        raise RequestRefused(
            401,
            "invalid_api_key",
            "This key is not known, or was revoked. Ask the operator for a new one.",
            headers={"WWW-Authenticate": "Bearer"},
        )
    limits = known.customer.limits
    wait_seconds = services.rates.take(known.key.key_id, limits.requests_per_minute)
    if wait_seconds:
        raise RequestRefused(
            429,
            "rate_limit_exceeded",
            f"More than {limits.requests_per_minute} requests a minute with this key; "
            f"try again in {wait_seconds} seconds.",
            headers={"Retry-After": str(wait_seconds)},
        )
    return Caller(known.customer.customer, known.key.key_id, limits)


Authenticated = Annotated[Caller, Depends(_caller)]
"""Annotate a route's parameter with it to be given the caller; without a good key the route is never entered."""
