"""`batch_results`: the files that the customer gets, assembled from committed chunks, proved, and made visible."""

from collections.abc import Iterator
from typing import Any

import dagster as dg
from pydantic import Field

from assets.chunk_results import chunk_results, chunk_results_event
from assets.partitions import CODE_VERSION, GROUP, OWNERS, batches
from batch_pipeline.errors import NotAllowedInState
from batch_pipeline.ledger.records import Batch, BatchStatus
from batch_pipeline.results import manifest, merge, outbox, verify
from batch_pipeline.results.findings import Finding
from batch_pipeline.results.verify import Proof
from resources import Parts, Service

_CHECKS = {
    Finding.EXACTLY_ONE: "Every request of the input has exactly one line in the two files, in input order.",
    Finding.NOTHING_UNKNOWN: "Every line of the files is a result of a request of this batch.",
    Finding.MANIFEST_AGREES: "Counts, sizes, hashes and token usage of the files are those of manifest and ledger.",
}


class BatchResultsConfig(dg.Config):
    """What an operator may ask for when launching `batch_results`."""

    rebuild: bool = Field(
        default=False,
        description=(
            "Assemble the files again although the batch is done, and require that their bytes are the same as before. "
            "Its status and its counts do not change."
        ),
    )


@dg.asset(
    name="batch_results",
    deps=[chunk_results],
    description=(
        "output.jsonl, errors.jsonl and manifest.json of a batch: one line per request, in input order, from committed "
        "chunks only. The merge proves what it wrote before the batch's status changes; the checks repeat the proof. "
        "Launching it again is harmless: the same bytes."
    ),
    group_name=GROUP,
    owners=OWNERS,
    kinds={"jsonl", "s3"},
    code_version=CODE_VERSION,
    partitions_def=batches,
    check_specs=[
        dg.AssetCheckSpec(str(finding), asset="batch_results", description=description, partitions_def=batches)
        for finding, description in _CHECKS.items()
    ],
)
def batch_results(
    context: dg.AssetExecutionContext, config: BatchResultsConfig, service: Service
) -> Iterator[dg.MaterializeResult[None]]:
    """Merge one batch. Killed anywhere: run again, it writes the same bytes and flips the status once."""
    parts = service.open()
    batch_id = context.partition_key
    batch = parts.ledger.batches.get(batch_id)
    if batch.status == BatchStatus.FINALIZING or (batch.outcome == BatchStatus.FAILED and not batch.status.is_final):
        _report_chunks(context, parts, batch_id)
    try:
        merge.merge(
            batch_id,
            ledger=parts.ledger,
            store=parts.store,
            settings=parts.settings,
            run_id=context.run_id,
            rebuild=config.rebuild,
        )
    except NotAllowedInState as error:
        raise dg.Failure(f"{error}; it is merged by itself once they have", allow_retries=False) from error
    outbox.deliver(batch_id, ledger=parts.ledger, store=parts.store, settings=parts.settings)
    proof = verify.verify(batch_id, ledger=parts.ledger, store=parts.store)
    batch = parts.ledger.batches.get(batch_id)
    files = (proof.counted.output, proof.counted.errors)
    version = "-".join(file.sha256[:16] for file in files if file is not None)
    yield dg.MaterializeResult(
        metadata=_metadata(batch, proof, parts),
        check_results=[_check(finding, proof) for finding in _CHECKS],
        data_version=dg.DataVersion(version or "empty"),
    )


def _report_chunks(context: dg.AssetExecutionContext, parts: Parts, batch_id: str) -> None:
    """Show the batch's chunks as materialized, where the worker that ran the last one died before it could say so."""
    key = chunk_results.key
    if batch_id not in context.instance.get_materialized_partitions(key):
        context.log_event(chunk_results_event(parts, batch_id))


def _metadata(batch: Batch, proof: Proof, parts: Parts) -> dict[str, Any]:
    written = manifest.decode(parts.store.get(batch.manifest_key)) if batch.manifest_key else None
    return {
        "customer": batch.customer,
        "name": batch.name,
        "status": str(batch.status),
        "requests": batch.total,
        "completed": batch.completed,
        "failed": batch.failed,
        "expired": batch.expired,
        "cancelled": batch.cancelled,
        "invalid": batch.invalid,
        "input_tokens": batch.input_tokens,
        "cached_tokens": batch.cached_tokens,
        "output_tokens": batch.output_tokens,
        "price_usd": "unknown" if written is None or written.cost is None else float(written.cost),
        "output": batch.output_key or "none",
        "errors": batch.error_key or "none",
        "manifest": batch.manifest_key or "none",
        "input_sha256": batch.input_sha256 or "",
        "output_sha256": proof.counted.output.sha256 if proof.counted.output else "none",
        "errors_sha256": proof.counted.errors.sha256 if proof.counted.errors else "none",
        "seconds_in_all": (batch.ended_at or batch.created_at) - batch.created_at,
    }


def _check(finding: Finding, proof: Proof) -> dg.AssetCheckResult:
    verdict = proof.verdicts[finding]
    return dg.AssetCheckResult(
        check_name=str(finding),
        passed=verdict.holds,
        description="; ".join(verdict.problems[:5]) or _CHECKS[finding],
        metadata={"requests": proof.counted.counts.total, "problems": verdict.count},
    )
