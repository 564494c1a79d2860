"""`batch_results`: the files that the customer gets, assembled from committed chunks, proved, and made visible."""

from collections.abc import Iterator
from typing import Any

import dagster as dg
from pydantic import Field

from assets.chunk_results import chunk_results, chunk_results_event
from assets.columns import RESULT_LINES
from assets.described import (
    errors_metadata,
    files_metadata,
    lineage_metadata,
    progress_metadata,
    timeline_metadata,
)
from assets.evaluations import chunk_evaluations, log_evaluations
from assets.failures import LaunchConfig, in_one_sentence
from assets.partitions import CODE_VERSION, GROUP, OWNERS, RUNS_ON_TAG, batches
from batch_pipeline.errors import NotAllowedInState
from batch_pipeline.ledger.records import Batch, BatchStatus
from batch_pipeline.results import manifest, merge, outbox, verify
from batch_pipeline.results.findings import Finding
from batch_pipeline.results.top_errors import top_errors
from batch_pipeline.results.verify import Proof
from batch_pipeline.results.versions import results_version
from batch_pipeline.results.view import view
from resources import Parts, Service

_CHECKS = {
    Finding.EXACTLY_ONE: "Every request of the input has exactly one line in the two files, in input order.",
    Finding.NOTHING_UNKNOWN: "Every line of the files is a result of a request of this batch.",
    Finding.MANIFEST_AGREES: "Counts, sizes, hashes and token usage of the files are those of manifest and ledger.",
}


class BatchResultsConfig(LaunchConfig):
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
    tags={RUNS_ON_TAG: "merge"},
    metadata=RESULT_LINES,
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
    with in_one_sentence():
        yield _merged(context, config, service.open())


def _merged(context: dg.AssetExecutionContext, config: BatchResultsConfig, parts: Parts) -> dg.MaterializeResult[None]:
    batch_id = context.partition_key
    batch = parts.ledger.batches.get(batch_id)
    if batch.status == BatchStatus.FINALIZING or (batch.outcome == BatchStatus.FAILED and not batch.status.is_final):
        _show_chunks(context, parts, batch_id)
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
    return dg.MaterializeResult(
        metadata=_metadata(batch, proof, parts),
        check_results=[_check(finding, proof) for finding in _CHECKS],
        data_version=dg.DataVersion(results_version(proof.counted.output, proof.counted.errors)),
    )


def _show_chunks(context: dg.AssetExecutionContext, parts: Parts, batch_id: str) -> None:
    """Show the verdicts on the batch's chunks; and the chunks themselves, where the worker that ran the last one died
    before it could say so.
    """
    key = chunk_results.key
    if context.instance.get_latest_data_version_record(key, is_source=False, partition_key=batch_id) is None:
        context.log_event(chunk_results_event(parts, batch_id, context.instance))
    log_evaluations(context.op_execution_context, chunk_evaluations(parts, batch_id))


def _metadata(batch: Batch, proof: Proof, parts: Parts) -> dict[str, Any]:
    written = manifest.decode(parts.store.get(batch.manifest_key)) if batch.manifest_key else None
    shown = view(batch.batch_id, ledger=parts.ledger, store=parts.store, settings=parts.settings)
    errors = proof.counted.errors
    found = top_errors(None if errors is None else errors.key, 0 if errors is None else errors.bytes, parts.store)
    return {
        **progress_metadata(shown),
        "dagster/partition_row_count": batch.completed,
        "seconds_in_all": round((batch.ended_at or batch.created_at) - batch.created_at, 1),
        **timeline_metadata(shown),
        **errors_metadata(found),
        **files_metadata(
            {"output.jsonl": proof.counted.output, "errors.jsonl": errors, "manifest.json": batch.manifest_key}, parts
        ),
        **lineage_metadata(written, batch.intake_run_id, parts),
    }


def _check(finding: Finding, proof: Proof) -> dg.AssetCheckResult:
    verdict = proof.verdicts[finding]
    return dg.AssetCheckResult(
        check_name=str(finding),
        passed=verdict.holds,
        description="; ".join(verdict.problems[:5]) or _CHECKS[finding],
        metadata={"requests": proof.counted.counts.total, "problems": verdict.count},
    )
