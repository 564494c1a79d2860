"""The bytes as the customer handed them in: made outside of Dagster, shown in it, so that lineage begins there."""

import dagster as dg

from assets.columns import REQUEST_LINES
from assets.partitions import GROUP, OWNERS, RUNS_ON_TAG, batches
from batch_pipeline.ledger.records import Batch
from batch_pipeline.results.versions import upload_version

UPLOADS = dg.AssetKey("uploads")

uploads = dg.AssetSpec(
    UPLOADS,
    description=(
        "A file of requests as its customer handed it in, fixed under our own key: what happens to the customer's "
        "object afterwards changes nothing. Made outside of Dagster, by the drop folder, the API or the CLI."
    ),
    group_name=GROUP,
    owners=OWNERS,
    kinds={"s3", "jsonl"},
    tags={RUNS_ON_TAG: "doors"},
    metadata=REQUEST_LINES,
    partitions_def=batches,
)


def upload_events(batch: Batch) -> list[dg.AssetMaterialization | dg.AssetObservation]:
    """Return the events that show a batch's upload in Dagster.

    Two, because Dagster counts partitions by materializations, and looks for the versions of what is made outside of it
    among observations: without one, other bytes would not make what was made from them stale. The observation comes
    first: one behind the materialization would count as newer than what a run has read.
    """
    version = {"dagster/data_version": upload_version(batch)}
    observed = dg.AssetObservation(UPLOADS, partition=batch.batch_id, tags=version)
    return [observed, _materialization(batch, version)]


def _materialization(batch: Batch, version: dict[str, str]) -> dg.AssetMaterialization:
    return dg.AssetMaterialization(
        UPLOADS,
        partition=batch.batch_id,
        description=f"{batch.name} of {batch.customer}",
        metadata={
            "customer": batch.customer,
            "name": batch.name,
            "door": str(batch.door),
            "endpoint": batch.endpoint,
            "bytes": batch.input_bytes,
            "etag": batch.input_etag,
            "key": batch.input_key,
            "created": dg.TimestampMetadataValue(batch.created_at),
            "deadline": dg.TimestampMetadataValue(batch.deadline_at),
            "on_invalid": str(batch.on_invalid),
        },
        tags=version,
    )
