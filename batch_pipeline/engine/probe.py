"""Questions to an engine beside requests: its health, its version, what it serves."""

from __future__ import annotations

import asyncio
from enum import Enum

import aiohttp
import msgspec

from batch_pipeline.errors import EngineError

PROBE_SECONDS = 5.0
"""How long an answer to a question may take."""


class Health(Enum):
    """What an engine says of itself."""

    READY = "ready"
    SLOW = "slow"
    """It accepted the question but did not answer in time: busy, not dead."""
    DOWN = "down"
    """Nobody listens, or it says itself that it is not well."""


class _Version(msgspec.Struct):
    version: str


class _Card(msgspec.Struct):
    id: str


class _Cards(msgspec.Struct):
    data: list[_Card]


async def health(url: str, timeout_seconds: float = PROBE_SECONDS) -> Health:
    """Ask `/health`."""
    try:
        status, _ = await fetch(f"{url}/health", timeout_seconds)
    except TimeoutError:
        return Health.SLOW
    except aiohttp.ClientError:
        return Health.DOWN
    return Health.READY if status == 200 else Health.DOWN


async def version(url: str) -> str:
    """Ask `/version`; `unknown` where the server has none (need not be vLLM). Raises EngineError without an answer."""
    try:
        status, body = await fetch(f"{url}/version", PROBE_SECONDS)
        return msgspec.json.decode(body, type=_Version).version if status == 200 else "unknown"
    except msgspec.DecodeError:
        return "unknown"
    except (TimeoutError, aiohttp.ClientError) as error:
        raise EngineError(f"the engine at {url} does not say its version: {said(error)}") from error


async def check_serves(url: str, name: str) -> None:
    """Raise EngineError where the server does not list the model under the name by which requests call it."""
    try:
        status, body = await fetch(f"{url}/v1/models", PROBE_SECONDS)
        if status != 200:
            raise EngineError(f"the engine at {url} answers {status} to /v1/models")
        served = [card.id for card in msgspec.json.decode(body, type=_Cards).data]
    except (TimeoutError, aiohttp.ClientError, msgspec.DecodeError) as error:
        raise EngineError(f"the engine at {url} does not list its models: {said(error)}") from error
    if name not in served:
        raise EngineError(
            f"the engine at {url} serves {', '.join(served) or 'nothing'} and not {name}: "
            f"start it with --served-model-name {name}, or mend the model's engine_url"
        )


async def fetch(url: str, timeout_seconds: float) -> tuple[int, bytes]:
    """Return status and body of a GET. Raises TimeoutError or aiohttp's ClientError without an answer."""
    timeout = aiohttp.ClientTimeout(total=timeout_seconds)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
        return response.status, await response.read()


def said(error: BaseException) -> str:
    """Return what went wrong, in words."""
    # Time-outs have no text of their own.
    return str(error) or ("no answer in time" if isinstance(error, asyncio.TimeoutError) else type(error).__name__)
