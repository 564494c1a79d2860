"""Housekeeping: what is over leaves the ledger and the bucket, and nothing that a final file needs.

    policy    what may go, as pure functions of rows, listings and times
    archive   chunks leave the ledger once the manifest has them
    objects   objects leave the bucket
    tidy      one bounded run of all of it

    end ──ledger_minutes──> chunks in the manifest alone ──work_hours──> final files alone ──files_days──> counts alone

Every step may be killed anywhere and repeated: the ledger notes that something is about to go before the first object
is deleted, and that it is gone after the last one. Two runs at once do the same work twice, and no harm.
"""

from batch_pipeline.housekeeping.policy import Removal, Step, partitions_to_delete
from batch_pipeline.housekeeping.tidy import Report, tidy

__all__ = ["Removal", "Report", "Step", "partitions_to_delete", "tidy"]
