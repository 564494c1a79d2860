"""Billing: what the ledger charges is what the files hold, whatever is removed or changed afterwards."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import dagster as dg
import msgspec
import polars as pl
import pytest
from dagster._core.errors import DagsterUnknownPartitionError
from dagster._core.test_utils import freeze_time

from batch_pipeline import housekeeping
from batch_pipeline import settings as configuration
from batch_pipeline.cli.program import run
from batch_pipeline.errors import NotAllowedInState, ProofFailed
from batch_pipeline.ledger import Ledger, schema
from batch_pipeline.ledger.database import DatabaseClock
from batch_pipeline.ledger.records import Batch, OnInvalid
from batch_pipeline.models import Prices
from batch_pipeline.results import outbox, usage_report
from batch_pipeline.results.merge import merge
from batch_pipeline.results.status import current_status
from batch_pipeline.results.usage import BatchUsage, by_customer, usage
from batch_pipeline.settings import CONFIG_VARIABLE, Settings
from batch_pipeline.store import ObjectStore, keys
from tests.fakes import answered
from tests.fakes.clock import SteppedClock

DAY_SECONDS = 86_400.0
MODEL, OTHER = answered.MODEL, "other-model"
CHUNKS = [[0, 1, 2], [3, 4], [5, 6]]
TABLES = ("batches", "models", "customers")
NOT_BILLED = {"invalid": 1, "expired": 2, "failed": 1, "cancelled": 0}


class Office(NamedTuple):
    """The parts, and the time in the test's hand."""

    ledger: Ledger
    store: ObjectStore
    settings: Settings
    clock: SteppedClock

    def merge(self, batch_id: str, **changes: Any) -> Batch:
        """End a batch whose chunks have stopped."""
        settings = msgspec.structs.replace(self.settings, **changes)
        merge(batch_id, ledger=self.ledger, store=self.store, settings=settings, run_id="merge-run")
        return self.ledger.batches.get(batch_id)

    def today(self) -> date:
        """The day by the ledger's clock."""
        return datetime.fromtimestamp(self.clock.time, UTC).date()

    def used(self, day: date, customer: str | None = None) -> list[BatchUsage]:
        """What the report of one day is made from."""
        return list(usage(self.ledger, self.store, first=day, last=day, customer=customer))

    def write(self, day: date) -> dict[str, bytes]:
        """The files of a day's report, written anew."""
        usage_report.write_report(day, ledger=self.ledger, store=self.store)
        prefix = keys.usage_report(day, "")
        return {info.key.removeprefix(prefix): self.store.get(info.key) for info in self.store.list(prefix)}


BOTH = pytest.mark.parametrize("ledger_url", ["sqlite_url", "postgres_url"], indirect=True)
"""The other tests run on SQLite alone: what they ask of the ledger is asked on both by these, or by its own tests."""


@pytest.fixture
def ledger_url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty ledger database: SQLite's, unless a test is marked."""
    url: str = request.getfixturevalue(getattr(request, "param", "sqlite_url"))
    return url


@pytest.fixture
def office(ledger_url: str, store: ObjectStore, settings: Settings) -> Iterator[Office]:
    clock = SteppedClock()
    ledger = Ledger.open(ledger_url, clock=clock)
    model = settings.models[MODEL]
    prices = Prices(input_per_million=0.1, output_per_million=0.7, batch_discount=0.3)
    models = {**settings.models, OTHER: msgspec.structs.replace(model, prices=prices)}
    yield Office(ledger, store, msgspec.structs.replace(settings, models=models), clock)
    ledger.close()


def run_to_end(office: Office, *, customer: str = "acme") -> Batch:
    """A batch on two models that expires: one request refused, one invalid, two that never ran."""
    ledger, store = office.ledger, office.store
    lines = [answered.input_line(index) for index in range(7)] + [b"{broken"]
    batch = answered.create(ledger, store, lines, customer=customer, window_seconds=3600)
    answered.take_in(ledger, store, batch.batch_id, CHUNKS, invalid=[7], models=(MODEL, OTHER, MODEL))
    leases = answered.lease_all(ledger, (MODEL, OTHER))
    done = {number: lease for number, lease in leases.items() if lease.ref.batch_id == batch.batch_id and number < 2}
    answered.commit_all(ledger, store, done, CHUNKS, refused=[4])
    office.clock.advance(3601)
    ledger.batches.expire_due()
    ledger.chunks.expire_leases()
    return office.merge(batch.batch_id)


def recount(office: Office, batch: Batch) -> tuple[dict[str, int], Decimal]:
    """Tokens and price of a batch from its output file alone, with the catalogue's prices as they are written."""
    model_of = {index: (MODEL, OTHER, MODEL)[number] for number, chunk in enumerate(CHUNKS) for index in chunk}
    tokens = {"input_tokens": 0, "cached_tokens": 0, "output_tokens": 0}
    cost = Decimal(0)
    for line in office.store.get(str(batch.output_key)).splitlines():
        result = json.loads(line)
        said = result["response"]["body"]["usage"]
        tokens["input_tokens"] += said["prompt_tokens"]
        tokens["cached_tokens"] += said["prompt_tokens_details"]["cached_tokens"]
        tokens["output_tokens"] += said["completion_tokens"]
        index = int(result["id"].rpartition("_")[2])
        a_million_in, a_million_out, paid = (
            ("0.1", "0.7", "0.7") if model_of[index] == OTHER else ("0.10", "0.20", "0.5")
        )
        online = said["prompt_tokens"] * Decimal(a_million_in) + said["completion_tokens"] * Decimal(a_million_out)
        cost += online * Decimal(paid) / 1_000_000
    return tokens, cost


@BOTH
def test_report_charges_what_the_output_file_holds_and_says_what_it_does_not_charge(office: Office) -> None:
    batch = run_to_end(office)
    day = office.today()
    office.clock.advance(DAY_SECONDS)
    files = office.write(day)
    tokens, cost = recount(office, batch)
    assert sum(tokens.values()) > 0
    assert set(files) == {"report.json", *(f"{name}.{kind}" for name in TABLES for kind in ("parquet", "csv"))}

    [row] = pl.read_parquet(files["batches.parquet"]).to_dicts()
    assert {name: row[name] for name in tokens} == tokens
    assert (row["cost_usd"], row["billed"], row["requests"]) == (cost, 4, 8)
    assert {name: row[name] for name in NOT_BILLED} == NOT_BILLED
    assert (row["batch_id"], row["customer"], row["day"], row["status"]) == (batch.batch_id, "acme", day, "expired")
    of_models = pl.read_parquet(files["models.parquet"]).to_dicts()
    assert [(row["model"], row["batch_discount"]) for row in of_models] == [
        (OTHER, Decimal("0.3")),
        (MODEL, Decimal("0.5")),
    ]
    assert sum(row["cost_usd"] for row in of_models) == cost
    [of_customer] = csv.DictReader(io.StringIO(files["customers.csv"].decode()))
    assert (Decimal(of_customer["cost_usd"]), of_customer["billed"], of_customer["unpriced"]) == (cost, "4", "0")
    report = usage_report.read_report(day, office.store)
    assert (report.cost, report.batches, report.not_whole) == (cost, 1, [])
    shown = current_status(batch.batch_id, ledger=office.ledger, settings=office.settings)
    assert shown.cost == cost
    assert float(cost) == pytest.approx(json.loads(office.store.get(str(batch.manifest_key)))["cost"])


def test_report_has_the_same_bytes_when_all_that_the_batch_was_made_of_is_gone_and_prices_have_changed(
    office: Office,
) -> None:
    batch = run_to_end(office)
    outbox.deliver(batch.batch_id, ledger=office.ledger, store=office.store, settings=office.settings)
    day = office.today()
    office.clock.advance(40 * DAY_SECONDS)
    before = office.write(day)
    assert office.write(day) == before
    later = datetime.now(UTC).timestamp() + 41 * DAY_SECONDS
    for _ in range(2):
        housekeeping.tidy(ledger=office.ledger, store=office.store, settings=office.settings, clock=lambda: later)
    assert list(office.store.list(keys.batch(batch.batch_id))) == []
    assert office.write(day) == before
    free = {name: msgspec.structs.replace(model, prices=Prices()) for name, model in office.settings.models.items()}
    office.merge(batch.batch_id, models=free)
    assert office.write(day) == before


@BOTH
def test_batches_of_before_bills_were_kept_are_charged_from_their_manifest_or_said_to_have_no_price(
    office: Office,
) -> None:
    first, second = run_to_end(office), run_to_end(office)
    day = office.today()
    expected = office.used(day)
    with office.ledger._database.write() as tx:
        tx.connection.execute(schema.charges.delete())
    assert office.used(day) == expected
    assert [one.batch_id for one in expected] == [first.batch_id, second.batch_id]

    with office.ledger._database.write() as tx:
        tx.connection.execute(schema.charges.delete())
    office.ledger.retention.begin_file_removal(first.batch_id)
    office.ledger.retention.end_file_removal(first.batch_id)
    unpriced, priced = office.used(day)
    assert (unpriced.cost, unpriced.input_tokens, unpriced.is_whole) == (None, first.input_tokens, True)
    assert priced == expected[1]
    [sums] = by_customer([unpriced, priced])
    assert (sums.batches, sums.unpriced, sums.cost) == (2, 1, expected[1].cost)


@BOTH
def test_days_and_customers_are_kept_apart(office: Office) -> None:
    one = run_to_end(office)
    day = office.today()
    office.clock.advance(DAY_SECONDS)
    other = run_to_end(office, customer="other")
    assert [found.batch_id for found in office.used(day)] == [one.batch_id]
    assert office.used(day, "other") == []
    assert [found.batch_id for found in office.used(office.today())] == [other.batch_id]
    both = usage(office.ledger, office.store, first=day, last=office.today())
    assert [(sums.day, sums.customer) for sums in by_customer(both)] == [(day, "acme"), (office.today(), "other")]


def test_day_belongs_to_the_batch_from_its_first_to_its_last_moment(office: Office) -> None:
    midnight = (office.clock.time // DAY_SECONDS + 1) * DAY_SECONDS
    office.clock.advance(midnight - office.clock.time - 3601)
    late = run_to_end(office)
    assert late.ended_at == midnight
    day = office.today()
    assert office.used(day - timedelta(days=1)) == []
    assert [found.batch_id for found in office.used(day)] == [late.batch_id]


def test_report_of_a_day_that_is_not_over_is_refused(office: Office) -> None:
    with pytest.raises(NotAllowedInState, match="not over yet"):
        office.write(office.today())


def test_day_without_batches_has_a_report_with_empty_tables(office: Office) -> None:
    files = office.write(office.today() - timedelta(days=1))
    assert [pl.read_parquet(files[f"{name}.parquet"]).height for name in TABLES] == [0, 0, 0]
    assert all(files[f"{name}.csv"].count(b"\n") == 1 for name in TABLES)


def test_batch_without_a_valid_line_costs_nothing(office: Office) -> None:
    batch = answered.create(office.ledger, office.store, [b"{"], on_invalid=OnInvalid.FAIL)
    answered.take_in(office.ledger, office.store, batch.batch_id, [], invalid=[0])
    office.merge(batch.batch_id)
    [used] = office.used(office.today())
    assert (used.status, used.requests, used.invalid, used.billed, used.cost) == ("failed", 1, 1, 0, 0)


def test_model_that_left_the_catalogue_has_no_price(office: Office) -> None:
    chunks = [[0, 1]]
    batch, leases = answered.in_progress(office.ledger, office.store, chunks)
    answered.commit_all(office.ledger, office.store, leases, chunks)
    office.merge(batch.batch_id, models={})
    [used] = office.used(office.today())
    assert (used.cost, used.billed, used.models[0].prices) == (None, 2, None)


@BOTH
def test_bill_and_final_status_are_one_transaction(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [[0, 1]]
    batch, leases = answered.in_progress(office.ledger, office.store, chunks)
    answered.commit_all(office.ledger, office.store, leases, chunks)

    def fail(*_: object) -> None:
        raise ProofFailed(["killed here"])

    with monkeypatch.context() as patch:
        patch.setattr("batch_pipeline.ledger.ending.charge", fail)
        with pytest.raises(ProofFailed):
            office.merge(batch.batch_id)
    assert not office.ledger.batches.get(batch.batch_id).status.is_final
    assert office.ledger.usage.of(batch.batch_id) == []
    assert office.merge(batch.batch_id).status.is_final
    assert [charge.model for charge in office.ledger.usage.of(batch.batch_id)] == [MODEL]


@pytest.fixture
def moment(monkeypatch: pytest.MonkeyPatch) -> Iterator[datetime]:
    """Now, by the clocks of the ledger's database and of Dagster: otherwise a day, or a month, may end in a test."""
    now = datetime(2026, 11, 30, 23, 59, 59, tzinfo=UTC)
    monkeypatch.setattr(DatabaseClock, "now", lambda *_: now.timestamp())
    with freeze_time(now):
        yield now


@pytest.fixture
def ended(
    moment: datetime, settings: Settings, settings_file: Path, store: ObjectStore
) -> Iterator[tuple[Callable[..., int], Batch]]:
    """The command line, and a batch of the configuration's own ledger that has ended at this moment."""
    ledger = Ledger.from_settings(settings)
    chunks = [[0, 1]]
    batch, leases = answered.in_progress(ledger, store, chunks, invalid=[2])
    answered.commit_all(ledger, store, leases, chunks)
    merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=None)
    yield lambda *arguments: run(["--config", str(settings_file), *arguments]), ledger.batches.get(batch.batch_id)
    ledger.close()


def test_command_prints_what_each_customer_is_charged_for(
    ended: tuple[Callable[..., int], Batch], capsys: pytest.CaptureFixture[str]
) -> None:
    cli, batch = ended
    assert cli("usage", "--json", "--batches") == 0
    said = json.loads(capsys.readouterr().out)
    assert [sums["customer"] for sums in said["customers"]] == ["acme"]
    assert (said["batches"][0]["batch_id"], said["batches"][0]["billed"]) == (batch.batch_id, 2)
    assert Decimal(str(said["cost"])) == Decimal("0.00000165")
    assert cli("usage", "--batches") == 0
    text = capsys.readouterr().out
    assert batch.batch_id in text
    assert "1 batches, 0.00000165 USD" in text
    assert cli("usage", "--customer", "nobody", "--json") == 0
    assert json.loads(capsys.readouterr().out)["customers"] == []
    assert cli("usage", "--from", "2026-02-01", "--to", "2026-01-01") == 2
    assert cli("usage", "--from", "yesterday") == 2


def test_daily_asset_writes_the_report_and_its_schedule_asks_for_the_day_before(
    ended: tuple[Callable[..., int], Batch],
    settings_file: Path,
    store: ObjectStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from batch_pipeline.definitions import make_definitions

    monkeypatch.setenv(CONFIG_VARIABLE, str(settings_file))
    _, batch = ended
    day = datetime.fromtimestamp(batch.ended_at or 0, UTC).date()
    with dg.instance_for_test(temp_dir=str(tmp_path)) as instance:
        repository = make_definitions(configuration.load()).get_repository_def()
        morning = datetime(day.year, day.month, day.day, 0, 15, tzinfo=UTC) + timedelta(days=1)
        with dg.build_schedule_context(
            instance=instance, scheduled_execution_time=morning, repository_def=repository
        ) as context:
            tick = repository.get_schedule_def("usage_report").evaluate_tick(context)
        [request] = tick.run_requests or []
        assert request.partition_key == day.isoformat()
        # Today is no partition before it is over.
        with pytest.raises(DagsterUnknownPartitionError):
            repository.get_job("report_usage").execute_in_process(instance=instance, partition_key=day.isoformat())
        before = (day - timedelta(days=1)).isoformat()
        result = repository.get_job("report_usage").execute_in_process(instance=instance, partition_key=before)
        assert result.success
        [materialized] = result.asset_materializations_for_node("usage_report")
        assert materialized.partition == before
        assert [check.passed for check in result.get_asset_check_evaluations()] == [True]
    assert usage_report.read_report(date.fromisoformat(before), store).batches == 0
