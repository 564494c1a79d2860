"""One partition per batch, its key the batch's id; and one per day (UTC), for reports."""

import dagster as dg

batches = dg.DynamicPartitionsDefinition(name="batches")
days = dg.DailyPartitionsDefinition(start_date="2026-01-01", timezone="UTC")

GROUP = "batch_pipeline"
STAGE_TAG = "batch_pipeline/stage"
"""What Dagster's tag_concurrency_limits count: `intake` and `merge` have places of their own. What operators launch
from an asset's page has no stage: it is counted by Dagster's own tags, `dagster/from_ui` and `dagster/backfill`.
"""
RUNS_ON_TAG = "batch_pipeline/runs_on"
"""Of an asset: what makes it, to select by in the catalogue (`tag:"batch_pipeline/runs_on"="gpu_workers"`)."""
PRIORITY_TAG = "dagster/priority"
OWNERS = ["team:batch-inference"]

CODE_VERSION = "1"
"""Changes when the same input would give other bytes; without it every run would count as new code in lineage."""
