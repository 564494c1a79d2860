"""The bytes as the customer handed them in: made outside of Dagster, shown in it, so that lineage begins there."""

import dagster as dg

from assets.columns import REQUEST_LINES
from assets.partitions import GROUP, OWNERS, batches
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
    metadata=REQUEST_LINES,
    partitions_def=batches,
)


def upload_event(batch: Batch) -> dg.AssetMaterialization:
    """Return the event that shows a batch's upload in Dagster."""
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
        tags={"dagster/data_version": upload_version(batch)},
    )
