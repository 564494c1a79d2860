"""Intake: what lies between an upload and the chunks that workers lease: check every line, order, cut, record."""

from batch_pipeline.intake.chunks import write_chunks
from batch_pipeline.intake.validate import ValidationSummary, validate

__all__ = ["ValidationSummary", "validate", "write_chunks"]
