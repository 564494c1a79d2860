"""Sending webhooks: one loop in each process that serves the API, on the ledger's queue.

What is sent, and to whom, is the ledger's word (`ledger.webhooks`): several processes never send the same at once. An
event is sent until its receiver answers with a 2xx, with growing pauses, some ten times within two days; so a receiver
may get it twice, under the same id.

A receiver's address is whatever a customer wants, so nothing inside may be reached through it. Its name is looked up
when the connection is made, the addresses found are checked, and these very addresses are connected to: a name that
changes its mind in between (DNS rebinding) gains nothing. Redirects are not followed, proxies of the environment are
not used, and of the answer nothing but its status is read.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult
from anyio import to_thread
from sqlalchemy.exc import SQLAlchemyError

from batch_pipeline.ledger.ledger import Ledger
from batch_pipeline.ledger.webhooks import MOST_AT_ONCE, Delivery
from batch_pipeline.settings import Webhooks
from batch_pipeline.wire.webhooks import EventData, WebhookEvent, headers, is_public, url_problem

_GROWTH = 6.0
_MOST_GROWN = 20
_LEASE_MARGIN_SECONDS = 60.0
_FORGET_SECONDS = 3600.0
_GONE = 410
_log = logging.getLogger(__name__)


class AddressRefused(OSError):
    """A receiver's name stands for an address that must not be reached."""


class CheckedResolver(AbstractResolver):
    """Looks names up, and gives out addresses of the public internet only."""

    def __init__(self, inner: AbstractResolver, *, allow_private: bool) -> None:
        self._inner = inner
        self._allow_private = allow_private

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses of a name. Raises AddressRefused where one of them is not public, OSError."""
        found = await self._inner.resolve(host, port, family)
        if not self._allow_private:
            for result in found:
                if not is_public(result["host"]):
                    raise AddressRefused(f"{host} is at {result['host']}, which is no public address")
        return found

    async def close(self) -> None:
        """Close what looks names up."""
        await self._inner.close()


class Deliverer:
    """Sends what is due. `clock` tells receivers the time, in Unix seconds."""

    def __init__(
        self,
        ledger: Ledger,
        settings: Webhooks,
        *,
        resolver: AbstractResolver | None = None,
        clock: Callable[[], float] = time.time,
        chance: random.Random | None = None,
    ) -> None:
        self._ledger = ledger
        self._settings = settings
        self._resolver = resolver
        self._clock = clock
        self._chance = chance or random.SystemRandom()
        self._sending: dict[asyncio.Task[None], str] = {}
        self._forgotten_at = -_FORGET_SECONDS

    async def run(self) -> None:
        """Send until this is cancelled. What was on its way then is sent again once its lease is over."""
        async with self._session() as session:
            try:
                while True:
                    await self._look(session)
                    await self._wait()
            finally:
                for task in self._sending:
                    task.cancel()
                await asyncio.gather(*self._sending, return_exceptions=True)

    async def deliver_due(self) -> int:
        """Send what is due now, and what becomes due meanwhile; returns how many tries were made."""
        tries = 0
        async with self._session() as session:
            while taken := await self._take():
                await asyncio.gather(*(self._send(delivery, session) for delivery in taken))
                tries += len(taken)
        return tries

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[aiohttp.ClientSession]:
        inner = self._resolver or aiohttp.ThreadedResolver()
        resolver = CheckedResolver(inner, allow_private=self._settings.allow_private_addresses)
        # Each connection is a new one, so each is looked up and checked.
        connector = aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, force_close=True, limit=0)
        timeout = aiohttp.ClientTimeout(total=self._settings.timeout_seconds)
        agent = {"User-Agent": "batch-pipeline"}
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=agent, trust_env=False, cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            yield session

    async def _look(self, session: aiohttp.ClientSession) -> None:
        """Begin to send what is due, as far as there is room."""
        try:
            if time.monotonic() - self._forgotten_at >= _FORGET_SECONDS:
                await to_thread.run_sync(self._ledger.webhooks.forget, self._settings.kept_days * 86_400)
                self._forgotten_at = time.monotonic()
            for delivery in await self._take():
                task = asyncio.create_task(self._send(delivery, session))
                self._sending[task] = delivery.webhook_id
                task.add_done_callback(self._sending.pop)
        except SQLAlchemyError as error:
            _log.warning("webhooks: the ledger cannot be used, trying again: %s", error)

    async def _wait(self) -> None:
        """Wait until there may be something to do."""
        if len(self._sending) >= self._settings.concurrent:
            await asyncio.wait(self._sending, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(self._settings.poll_seconds)

    async def _take(self) -> list[Delivery]:
        room = self._settings.concurrent - len(self._sending)
        of_each = Counter(self._sending.values())
        busy = [webhook_id for webhook_id, count in of_each.items() if count >= MOST_AT_ONCE]
        lease_seconds = self._settings.timeout_seconds + _LEASE_MARGIN_SECONDS
        return await to_thread.run_sync(self._ledger.webhooks.take, room, lease_seconds, busy)

    async def _send(self, delivery: Delivery, session: aiohttp.ClientSession) -> None:
        """Try once, and tell the ledger what came of it. Killed before it is told: tried again after the lease."""
        status, trouble = await self._post(delivery, session)
        try:
            await to_thread.run_sync(self._tell, delivery, status, trouble)
        except SQLAlchemyError as error:
            _log.warning("webhooks: what became of %s could not be noted: %s", delivery.event_id, error)

    async def _post(self, delivery: Delivery, session: aiohttp.ClientSession) -> tuple[int, str]:
        """Return the status that was answered, or 0 and what is in the way."""
        problem = url_problem(delivery.url, allow_private=self._settings.allow_private_addresses)
        if problem is not None:
            return 0, problem
        body = event_body(delivery)
        signed = headers(delivery.event_id, body, secret=delivery.secret, timestamp=int(self._clock()))
        try:
            async with session.post(delivery.url, data=body, headers=signed, allow_redirects=False) as response:
                return response.status, f"answered {response.status}"
        except TimeoutError:
            return 0, f"no answer within {self._settings.timeout_seconds:g} seconds"
        except aiohttp.ClientConnectorError as error:
            return 0, f"{type(error.os_error).__name__}: {error.os_error}"
        except aiohttp.ClientResponseError:
            # Its words may hold bytes of the answer, of which nothing is kept.
            return 0, "the answer is no HTTP"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return 0, f"{type(error).__name__}: {error}"

    def _tell(self, delivery: Delivery, status: int, trouble: str) -> None:
        queue = self._ledger.webhooks
        if 200 <= status < 300:
            queue.delivered(delivery)
        elif status == _GONE:
            queue.disable(delivery, f"{trouble}: the receiver wants nothing more")
        else:
            pause = self._pause(delivery.attempt)
            queue.failed(delivery, trouble, pause)
            then = "given up" if pause is None else f"again in {pause:.0f} s"
            _log.info("webhook %s, event %s: %s; %s", delivery.webhook_id, delivery.event_id, trouble, then)

    def _pause(self, attempt: int) -> float | None:
        """Return how long to wait after a try; None after the last."""
        if attempt >= self._settings.attempts:
            return None
        pause = self._settings.first_pause_seconds * _GROWTH ** min(attempt - 1, _MOST_GROWN)
        return min(pause, self._settings.longest_pause_seconds) * self._chance.uniform(0.8, 1.2)


def event_body(delivery: Delivery) -> bytes:
    """Return the bytes that are sent: the same in every try."""
    event = WebhookEvent(
        id=delivery.event_id,
        created_at=int(delivery.event_at),
        type=delivery.event,
        data=EventData(delivery.batch_id),
    )
    return msgspec.json.encode(event)


@asynccontextmanager
async def delivering(ledger: Ledger, settings: Webhooks) -> AsyncIterator[None]:
    """Send webhooks in the background until the block ends."""
    task = asyncio.create_task(Deliverer(ledger, settings).run())
    task.add_done_callback(_say_if_broken)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _say_if_broken(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.critical("webhooks are not sent any more until the service is started again", exc_info=task.exception())
