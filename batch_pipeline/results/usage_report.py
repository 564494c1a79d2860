"""The usage of one day as files in the bucket, for whoever writes invoices.

    reports/usage/DAY/batches.{parquet,csv}      one row per batch
    reports/usage/DAY/models.{parquet,csv}       one row per batch and model: tokens, prices, cost
    reports/usage/DAY/customers.{parquet,csv}    one row per customer
    reports/usage/DAY/report.json                sums, and the size and sha256 of each file; written last

Costs are decimals with 18 digits behind the point, enough for every price that the configuration takes.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from datetime import date
from decimal import Decimal
from typing import Any

import msgspec
import polars as pl

from batch_pipeline.ledger import Ledger
from batch_pipeline.results.usage import BatchUsage, CustomerDay, by_customer, check_over, usage
from batch_pipeline.store import ObjectStore, keys

_MONEY = pl.Decimal(38, 18)
_COUNTS = dict.fromkeys(("requests", "billed", "invalid", "expired", "cancelled", "failed"), pl.Int64)
_TOKENS = dict.fromkeys(("input_tokens", "cached_tokens", "output_tokens"), pl.Int64)
_BATCH = {"day": pl.Date, "customer": pl.String, "batch_id": pl.String, "name": pl.String, "status": pl.String}
_COLUMNS: dict[str, dict[str, Any]] = {
    "batches": {**_BATCH, **_COUNTS, **_TOKENS, "cost_usd": _MONEY},
    "models": {
        **{"day": pl.Date, "customer": pl.String, "batch_id": pl.String, "model": pl.String},
        **_TOKENS,
        **dict.fromkeys(("input_usd_per_million", "output_usd_per_million", "batch_discount", "cost_usd"), _MONEY),
    },
    "customers": {
        **{"day": pl.Date, "customer": pl.String, "batches": pl.Int64},
        **_COUNTS,
        **_TOKENS,
        **{"cost_usd": _MONEY, "unpriced": pl.Int64},
    },
}


class ReportFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a report."""

    key: str
    bytes: int
    sha256: str


class DayReport(msgspec.Struct, frozen=True, kw_only=True):
    """report.json."""

    day: date
    batches: int
    customers: list[CustomerDay]
    cost: Decimal
    """In US dollars, of the batches with a price."""
    not_whole: list[str]
    """Batches whose bill has other tokens than their files: somebody should look before it is sent."""
    files: list[ReportFile]


def write_report(day: date, *, ledger: Ledger, store: ObjectStore) -> DayReport:
    """Write the report of a day that is over, and return what it says.

    Each file is one put. Killed before the last of them, report.json is missing, or is that of an earlier run with the
    same bytes beside it; run again, all are written with the same bytes, for nothing changes of a batch that has ended.
    Raises NotAllowedInState on a day that is not over; StoreError. Memory: about 2 kB a batch.
    """
    check_over(day, ledger)
    batches = list(usage(ledger, store, first=day, last=day))
    customers = by_customer(batches)
    rows = {
        "batches": [_batch_row(batch) for batch in batches],
        "models": [row for batch in batches for row in _model_rows(batch)],
        "customers": [_customer_row(customer) for customer in customers],
    }
    files = [file for name in rows for file in _write(day, name, rows[name], store)]
    report = DayReport(
        day=day,
        batches=len(batches),
        customers=customers,
        cost=sum((customer.cost for customer in customers), Decimal(0)),
        not_whole=[batch.batch_id for batch in batches if not batch.is_whole],
        files=files,
    )
    data = msgspec.json.Encoder(decimal_format="number").encode(report)
    store.put(keys.usage_report(day, "report.json"), msgspec.json.format(data, indent=2) + b"\n")
    return report


def read_report(day: date, store: ObjectStore) -> DayReport:
    """Return what the report of a day says. Raises ObjectMissing where there is none."""
    return msgspec.json.decode(store.get(keys.usage_report(day, "report.json")), type=DayReport)


def _write(day: date, name: str, rows: Sequence[dict[str, Any]], store: ObjectStore) -> list[ReportFile]:
    table = pl.DataFrame(rows, schema=_COLUMNS[name], orient="row")
    parquet = io.BytesIO()
    table.write_parquet(parquet, compression="zstd")
    return [
        _put(day, f"{name}.parquet", parquet.getvalue(), store),
        _put(day, f"{name}.csv", table.write_csv().encode(), store),
    ]


def _put(day: date, file: str, data: bytes, store: ObjectStore) -> ReportFile:
    key = keys.usage_report(day, file)
    store.put(key, data)
    return ReportFile(key=key, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def _batch_row(batch: BatchUsage) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in (*_BATCH, *_COUNTS, *_TOKENS)} | {"cost_usd": batch.cost}


def _model_rows(batch: BatchUsage) -> list[dict[str, Any]]:
    return [
        {
            **{name: getattr(batch, name) for name in ("day", "customer", "batch_id")},
            **{name: getattr(charge, name) for name in ("model", *_TOKENS)},
            "input_usd_per_million": None if charge.prices is None else Decimal(repr(charge.prices.input_per_million)),
            "output_usd_per_million": None
            if charge.prices is None
            else Decimal(repr(charge.prices.output_per_million)),
            "batch_discount": None if charge.prices is None else Decimal(repr(charge.prices.batch_discount)),
            "cost_usd": charge.cost,
        }
        for charge in batch.models
    ]


def _customer_row(customer: CustomerDay) -> dict[str, Any]:
    names = ("day", "customer", "batches", *_COUNTS, *_TOKENS, "unpriced")
    return {name: getattr(customer, name) for name in names} | {"cost_usd": customer.cost}
