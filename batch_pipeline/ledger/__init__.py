"""The metadata database, and the only module with SQL: batches, chunks, leases, workers, the audit trail."""

from batch_pipeline.ledger.ledger import Ledger

__all__ = ["Ledger"]
