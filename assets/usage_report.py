"""`usage_report`: what every customer is charged for on one day, as Parquet and CSV."""

from collections.abc import Iterator
from datetime import date
from typing import TYPE_CHECKING

import dagster as dg

from assets.batch_results import batch_results
from assets.columns import USAGE_TABLE
from assets.partitions import CODE_VERSION, GROUP, OWNERS, RUNS_ON_TAG, days
from batch_pipeline.errors import NotAllowedInState
from resources import Service

if TYPE_CHECKING:
    from batch_pipeline.results.usage_report import DayReport

_CHECK = "bills_agree_with_files"


@dg.asset(
    name="usage_report",
    # Shown in lineage; which batches a day has is the ledger's word.
    deps=[dg.AssetDep(batch_results, partition_mapping=dg.AllPartitionMapping())],
    description=(
        "Tokens and price by batch, model and customer of the batches that ended on a day (UTC), and what was not "
        "billed and why: reports/usage/DAY/ in the bucket. Launching it again writes the same bytes."
    ),
    group_name=GROUP,
    owners=OWNERS,
    kinds={"polars", "parquet", "csv", "s3"},
    tags={RUNS_ON_TAG: "report_usage"},
    metadata=USAGE_TABLE,
    code_version=CODE_VERSION,
    partitions_def=days,
    check_specs=[
        dg.AssetCheckSpec(
            _CHECK,
            asset="usage_report",
            description="The bill of every batch has the tokens that were counted in its output file.",
            partitions_def=days,
        )
    ],
)
def usage_report(context: dg.AssetExecutionContext, service: Service) -> Iterator[dg.MaterializeResult[None]]:
    """Write the report of one day. Killed anywhere: run again, it writes the same bytes."""
    # Only this asset needs polars, and each run's start waits for what is imported above.
    from batch_pipeline.results.usage_report import write_report

    parts = service.open()
    day = date.fromisoformat(context.partition_key)
    try:
        report = write_report(day, ledger=parts.ledger, store=parts.store)
    except NotAllowedInState as error:
        raise dg.Failure(str(error), allow_retries=False) from error
    tables = [file for file in report.files if file.key.endswith(".parquet")]
    yield dg.MaterializeResult(
        metadata={
            "dagster/partition_row_count": report.batches,
            "batches": report.batches,
            "customers": len(report.customers),
            "requests": sum(customer.requests for customer in report.customers),
            "billed": sum(customer.billed for customer in report.customers),
            "cost_usd": f"{report.cost:f}",
            "batches_without_a_price": sum(customer.unpriced for customer in report.customers),
            "files": dg.MetadataValue.md("\n".join(f"- `{file.key}`, {file.bytes} bytes" for file in report.files)),
        },
        check_results=[_check(report)],
        data_version=dg.DataVersion("-".join(file.sha256[:16] for file in tables)),
    )


def _check(report: "DayReport") -> dg.AssetCheckResult:
    shown = ", ".join(report.not_whole[:20])
    return dg.AssetCheckResult(
        check_name=_CHECK,
        passed=not report.not_whole,
        description=f"another sum of tokens than in the files: {shown}" if shown else None,
        metadata={"batches": report.batches, "problems": len(report.not_whole)},
    )
