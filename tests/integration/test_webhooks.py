"""Webhooks: every end of a batch is told to its customer's addresses, signed, and to nobody else's; none is lost."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from aiohttp.abc import AbstractResolver, ResolveResult

from batch_pipeline.api.webhooks import AddressRefused, CheckedResolver, Deliverer
from batch_pipeline.cli.program import run
from batch_pipeline.errors import CustomerError, NotFound, ProofFailed
from batch_pipeline.ledger import Ledger, schema
from batch_pipeline.ledger.records import Batch
from batch_pipeline.ledger.webhooks import MOST_AT_ONCE, MOST_WEBHOOKS
from batch_pipeline.settings import Settings, Webhooks
from batch_pipeline.store import ObjectStore
from tests.fakes import service
from tests.fakes.clock import SteppedClock
from tests.fakes.ledger_values import MODEL, counted, finish, result_of, submitted
from tests.fakes.receiver import receiver

INSIDE = Webhooks(allow_private_addresses=True, poll_seconds=0.05, timeout_seconds=5.0)


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
def ledger(ledger_url: str, clock: SteppedClock) -> Iterator[Ledger]:
    opened = Ledger.open(ledger_url, clock=clock)
    yield opened
    opened.close()


def ended(ledger: Ledger, name: str = "one", customer: str = "customer-1") -> Batch:
    """A batch of a customer that has completed."""
    batch_id = submitted(ledger, name, [MODEL], customer).batch_id
    (lease,) = ledger.chunks.lease("w", MODEL, 1, [batch_id])
    ledger.chunks.commit(lease.ref, result_of(lease))
    return finish(ledger, batch_id)


def deliver(ledger: Ledger, settings: Webhooks = INSIDE, resolver: AbstractResolver | None = None) -> int:
    """Send what is due."""
    return asyncio.run(Deliverer(ledger, settings, resolver=resolver, chance=random.Random(3)).deliver_due())


def rows(ledger: Ledger) -> list[Any]:
    """The queue, as it is."""
    with ledger._database.read() as tx:
        return list(tx.connection.execute(sa.select(schema.deliveries).order_by(schema.deliveries.c.event_id)))


def test_end_of_a_batch_is_told_once_to_its_customers_addresses_and_to_no_others(ledger: Ledger) -> None:
    with receiver() as mine, receiver() as second, receiver() as other:
        secret = ledger.webhooks.add("customer-1", mine.url).secret
        second_secret = ledger.webhooks.add("customer-1", second.url).secret
        ledger.webhooks.add("customer-2", other.url)
        batch = ended(ledger)
        finish(ledger, batch.batch_id)
        assert deliver(ledger) == 2
        assert deliver(ledger) == 0
        [event] = mine.events(secret)
        assert (event.object, event.type, event.data.id) == ("event", "batch.completed", batch.batch_id)
        assert event.created_at == int(batch.ended_at or 0)
        assert [again.id for again in second.events(second_secret)] == [event.id]
        assert mine.got[0][0]["webhook-id"] == event.id
        assert other.got == []


@pytest.mark.parametrize("end", ["failed", "expired", "cancelled"])
def test_every_kind_of_end_has_its_event(ledger: Ledger, clock: SteppedClock, end: str) -> None:
    with receiver() as mine:
        secret = ledger.webhooks.add("customer-1", mine.url).secret
        batch_id = submitted(ledger, "one", [] if end == "failed" else [MODEL], "customer-1").batch_id
        if end == "cancelled":
            ledger.batches.cancel(batch_id)
        if end == "expired":
            clock.advance(8 * 86_400)
            ledger.batches.expire_due()
        assert finish(ledger, batch_id).status == end
        deliver(ledger)
        [event] = mine.events(secret)
        assert (event.type, event.data.id) == (f"batch.{end}", batch_id)


def test_event_and_final_status_are_one_transaction(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger.webhooks.add("customer-1", "https://example.com/")
    batch_id = submitted(ledger, "one", [MODEL], "customer-1").batch_id
    (lease,) = ledger.chunks.lease("w", MODEL, 1, [batch_id])
    ledger.chunks.commit(lease.ref, result_of(lease))

    def fail(*_: object) -> None:
        raise ProofFailed(["killed here"])

    with monkeypatch.context() as patch:
        patch.setattr("batch_pipeline.ledger.ending.tallies.count", fail)
        with pytest.raises(ProofFailed):
            ledger.batches.finish(batch_id, counted(ledger.batches.get(batch_id), ledger.chunks.of(batch_id)))
    assert rows(ledger) == []
    finish(ledger, batch_id)
    assert [row.batch_id for row in rows(ledger)] == [batch_id]


def test_failed_tries_are_repeated_with_growing_pauses_under_the_same_id_and_given_up_in_the_end(
    ledger: Ledger, clock: SteppedClock
) -> None:
    settings = msgspec.structs.replace(INSIDE, attempts=4, first_pause_seconds=5.0, longest_pause_seconds=100.0)
    with receiver(500, 429, 302, 404) as mine:
        secret = ledger.webhooks.add("customer-1", mine.url).secret
        ended(ledger)
        pauses = []
        for tries in range(1, 5):
            assert deliver(ledger, settings) == 1
            assert deliver(ledger, settings) == 0, "nothing is tried again before its pause is over"
            [row] = rows(ledger)
            assert row.attempts == tries
            if tries < 4:
                pauses.append(row.due_at - clock.time)
                clock.advance(row.due_at - clock.time)
        assert (row.ended_at, row.error) == (clock.time, "answered 404")
        assert [4 <= pauses[0] <= 6, 24 <= pauses[1] <= 36, 80 <= pauses[2] <= 120] == [True] * 3
        clock.advance(1e6)
        assert deliver(ledger, settings) == 0
        assert len({event.id for event in mine.events(secret)}) == 1
        assert len({body for _, body in mine.got}) == 1
        assert len(mine.got) == 4, "a redirect is not followed"


def test_receiver_that_comes_back_hears_of_everything(ledger: Ledger, clock: SteppedClock) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        ledger.webhooks.add("customer-1", f"http://127.0.0.1:{held.getsockname()[1]}/")
        for number in range(3):
            ended(ledger, f"batch-{number}")
        assert deliver(ledger) == 3
        [hook] = ledger.webhooks.of("customer-1")
        assert hook.waiting == 3
        assert "Connect" in str(hook.last_error)
    with receiver() as back:
        with ledger._database.write() as tx:
            tx.connection.execute(schema.webhooks.update().values(url=back.url))
        clock.advance(7)
        assert deliver(ledger) == 3
        assert ledger.webhooks.of("customer-1")[0].waiting == 0
        assert len(back.got) == 3


def test_receiver_that_is_gone_for_good_is_left_alone(ledger: Ledger, clock: SteppedClock) -> None:
    with receiver(410) as mine:
        ledger.webhooks.add("customer-1", mine.url)
        ended(ledger)
        deliver(ledger)
        ended(ledger, "two")
        clock.advance(1e6)
        assert deliver(ledger) == 0
        assert len(mine.got) == 1
        assert ledger.webhooks.of("customer-1")[0].disabled_at is not None


def test_two_processes_never_take_the_same_and_a_killed_one_loses_nothing(ledger: Ledger, clock: SteppedClock) -> None:
    ledger.webhooks.add("customer-1", "https://example.com/")
    ended(ledger)
    [taken] = ledger.webhooks.take(10, 60.0)
    assert ledger.webhooks.take(10, 60.0) == []
    clock.advance(61)
    [again] = ledger.webhooks.take(10, 60.0)
    assert (taken.event_id, taken.attempt, again.attempt) == (again.event_id, 1, 2)
    assert not ledger.webhooks.failed(taken, "late", None), "who lost the lease changes nothing"
    assert not ledger.webhooks.delivered(taken)
    assert ledger.webhooks.delivered(again)
    assert ledger.webhooks.take(10, 60.0) == []
    assert ledger.webhooks.forget(1.0) == 0
    clock.advance(10)
    assert ledger.webhooks.forget(1.0) == 1


def test_many_events_of_one_webhook_leave_room_for_those_of_others(ledger: Ledger) -> None:
    ledger.webhooks.add("customer-1", "https://example.com/")
    slow = [ended(ledger, f"batch-{number}").batch_id for number in range(MOST_AT_ONCE + 3)]
    hook = ledger.webhooks.add("customer-2", "https://example.com/").webhook
    other = ended(ledger, "other", "customer-2")
    taken = ledger.webhooks.take(100, 60.0)
    assert [delivery.batch_id in slow for delivery in taken].count(True) == MOST_AT_ONCE
    assert [delivery.webhook_id for delivery in taken if delivery.batch_id == other.batch_id] == [hook.webhook_id]
    busy = {delivery.webhook_id for delivery in taken}
    assert ledger.webhooks.take(100, 60.0, busy) == []
    assert len(ledger.webhooks.take(100, 60.0)) == 3


def test_webhooks_are_their_customers_own(ledger: Ledger) -> None:
    hook = ledger.webhooks.add("customer-1", "https://example.com/").webhook
    ended(ledger)
    assert ledger.webhooks.of("customer-2") == []
    with pytest.raises(NotFound):
        ledger.webhooks.remove("customer-2", hook.webhook_id)
    ledger.webhooks.remove("customer-1", hook.webhook_id)
    assert rows(ledger) == []
    for _ in range(MOST_WEBHOOKS):
        ledger.webhooks.add("customer-1", "https://example.com/")
    with pytest.raises(CustomerError, match="remove one first"):
        ledger.webhooks.add("customer-1", "https://example.com/")


class Rebinding(AbstractResolver):
    """A name server under a customer's control: says something else each time."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        return [
            ResolveResult(hostname=host, host=address, port=port, family=family, proto=0, flags=0)
            for address in self.answers.pop(0).split()
        ]

    async def close(self) -> None:
        """Nothing is held."""


def test_name_is_connected_to_at_the_address_that_was_checked_and_is_checked_each_time() -> None:
    async def look() -> None:
        resolver = CheckedResolver(Rebinding("93.184.216.34", "127.0.0.1"), allow_private=False)
        assert [result["host"] for result in await resolver.resolve("example.com", 443)] == ["93.184.216.34"]
        with pytest.raises(AddressRefused, match=r"at 127\.0\.0\.1"):
            await resolver.resolve("example.com", 443)

    asyncio.run(look())


def test_names_of_the_inside_are_never_reached(ledger: Ledger, clock: SteppedClock) -> None:
    with receiver() as inside:
        port = int(inside.url.rstrip("/").rpartition(":")[2])
        ledger.webhooks.add("customer-1", f"https://rebinding.example.com:{port}/")
        ended(ledger)
        settings = msgspec.structs.replace(INSIDE, allow_private_addresses=False)
        # One lookup for each try: a second one, between check and connection, would find no answer here.
        names = Rebinding("127.0.0.1", "93.184.216.34 127.0.0.1", "169.254.169.254", "::ffff:127.0.0.1")
        while names.answers:
            assert deliver(ledger, settings, names) == 1
            [row] = rows(ledger)
            assert "no public address" in row.error
            clock.advance(row.due_at - clock.time)
        assert inside.got == []


def test_address_that_was_allowed_once_is_refused_when_it_is_not_any_more(ledger: Ledger) -> None:
    with receiver() as inside:
        ledger.webhooks.add("customer-1", inside.url)
        ended(ledger)
        deliver(ledger, msgspec.structs.replace(INSIDE, allow_private_addresses=False))
        assert inside.got == []
        assert "https://" in rows(ledger)[0].error


def test_running_service_sends_by_itself(sqlite_url: str, store: ObjectStore, settings: Settings) -> None:
    ledger = Ledger.open(sqlite_url)
    with receiver(503) as mine:
        quick = msgspec.structs.replace(INSIDE, first_pause_seconds=0.05)
        with service.running(ledger, store, msgspec.structs.replace(settings, webhooks=quick)):
            secret = ledger.webhooks.add("customer-1", mine.url).secret
            batch = ended(ledger)
            assert mine.came.acquire(timeout=30)
            assert mine.came.acquire(timeout=30)
        assert [event.data.id for event in mine.events(secret)] == [batch.batch_id] * 2
    ledger.close()


def test_command_registers_lists_and_removes(settings_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def cli(*arguments: str) -> int:
        return run(["--config", str(settings_file), "customers", "webhooks", *arguments])

    assert cli("add", "acme", "https://hooks.example.com/batches") == 0
    assert capsys.readouterr().out.startswith("whsec_")
    assert cli("add", "acme", "https://127.0.0.1/") == 1
    assert "no public address" in capsys.readouterr().err
    assert cli("list", "acme", "--json") == 0
    text = capsys.readouterr().out
    [hook] = json.loads(text)
    assert (hook["url"], hook["waiting"]) == ("https://hooks.example.com/batches", 0)
    assert "whsec_" not in text
    assert cli("list", "acme") == 0
    assert cli("remove", "other", hook["webhook_id"]) == 1
    assert cli("remove", "acme", hook["webhook_id"]) == 0
    capsys.readouterr()
    assert cli("list", "acme", "--json") == 0
    assert json.loads(capsys.readouterr().out) == []
