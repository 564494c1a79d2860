"""One partition per batch; its key is the batch's id."""

import dagster as dg

batches = dg.DynamicPartitionsDefinition(name="batches")

GROUP = "batch_pipeline"
OWNERS = ["team:batch-inference"]

CODE_VERSION = "1"
"""Changes when the same input would give other bytes; without it every run would count as new code in lineage."""
