"""The two ops of intake, in their order. The package itself imports nothing: a process that checks lines needs few."""

from batch_pipeline.intake.chunks import write_chunks
from batch_pipeline.intake.validate import ValidationSummary, validate

__all__ = ["ValidationSummary", "validate", "write_chunks"]
