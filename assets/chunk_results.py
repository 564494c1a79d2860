"""`chunk_results`: every chunk of a batch has a result. GPU workers fill it; launching it makes sure that they do."""

import hashlib
from typing import Any

import dagster as dg
from pydantic import Field

from assets.partitions import CODE_VERSION, GROUP, OWNERS, batches
from assets.request_chunks import request_chunks
from batch_pipeline.results import demand
from batch_pipeline.results.demand import ChunkSummary
from resources import Parts, Service


class ChunkResultsConfig(dg.Config):
    """What an operator may ask for when launching `chunk_results`."""

    priority: int = Field(
        default=1,
        description="Runs before the customer's other batches where above 0. It changes nothing between customers.",
    )
    wait_minutes: float = Field(
        default=60.0 * 24,
        description="How long the run waits for the workers before it fails; the chunks stay wanted.",
    )


@dg.asset(
    name="chunk_results",
    deps=[request_chunks],
    description=(
        "One committed result object per chunk, written by the GPU workers, which report it when a batch's last chunk "
        "stops. Launching it for a batch makes the ledger want what is missing (chunks that were given up are tried "
        "again), gives the batch an operator's priority, and waits; where all is committed it does nothing. It never "
        "loads a model itself, and never runs again what is committed."
    ),
    group_name=GROUP,
    owners=OWNERS,
    kinds={"vllm", "jsonl", "s3"},
    code_version=CODE_VERSION,
    partitions_def=batches,
    backfill_policy=dg.BackfillPolicy.single_run(),
)
def chunk_results(context: dg.AssetExecutionContext, config: ChunkResultsConfig, service: Service) -> None:
    """Want the chunks of these batches, and wait for them. Killed anywhere: what it asked for stays asked for."""
    parts = service.open()
    actor = f"dagster run {context.run_id}"
    waiting = demand.want(list(context.partition_keys), parts.ledger, priority=config.priority, actor=actor)
    context.log.info(f"waiting for the chunks of {len(waiting)} batches")
    for batch_id in demand.wait(waiting, parts.ledger, timeout_seconds=config.wait_minutes * 60):
        context.log.info(f"every chunk of {batch_id} has stopped")
    for batch_id in context.partition_keys:
        summary = demand.summarise(batch_id, parts.ledger, parts.store)
        context.add_asset_metadata(_metadata(summary), partition_key=batch_id)


def chunk_results_event(parts: Parts, batch_id: str) -> dg.AssetMaterialization:
    """Return the event with which a worker reports that the last chunk of a batch has stopped."""
    summary = demand.summarise(batch_id, parts.ledger, parts.store)
    version = hashlib.sha256("".join(summary.result_hashes).encode()).hexdigest()
    return dg.AssetMaterialization(
        "chunk_results",
        partition=batch_id,
        metadata=_metadata(summary),
        tags={"dagster/data_version": version},
    )


def _metadata(summary: ChunkSummary) -> dict[str, Any]:
    return {
        "customer": summary.customer,
        "chunks_committed": summary.committed,
        "chunks_stopped": summary.stopped,
        "chunks_open": summary.open,
        "requests_completed": summary.completed,
        "requests_failed": summary.failed,
        "input_tokens": summary.input_tokens,
        "cached_tokens": summary.cached_tokens,
        "output_tokens": summary.output_tokens,
        "attempts": summary.attempts,
        "workers": dg.JsonMetadataValue(summary.workers),
        "engine_versions": dg.JsonMetadataValue(summary.engine_versions),
        "model_versions": dg.JsonMetadataValue(summary.model_versions),
    }
