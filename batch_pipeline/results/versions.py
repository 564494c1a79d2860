"""What identifies the content of each step of a batch: Dagster's data versions, and what `audit` shows beside them.

The same bytes have the same version, whoever made them and how often.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from batch_pipeline.ledger.records import Batch, Chunk, ChunkState
from batch_pipeline.models import Model
from batch_pipeline.results.manifest import FileFacts

_MOST_CHARACTERS = 200


def upload_version(batch: Batch) -> str:
    """Return the version of the bytes that the batch was taken from: their etag."""
    return batch.input_etag.strip('"')


def chunks_version(chunks: Iterable[Chunk]) -> str:
    """Return the version of a batch's chunk results: a hash of those of the committed chunks, in their order."""
    hashes = [chunk.result.sha256 for chunk in chunks if chunk.state == ChunkState.COMMITTED and chunk.result]
    return version_of_hashes(hashes)


def version_of_hashes(result_hashes: Iterable[str]) -> str:
    """Return the version that stands for the hashes of committed chunks, in their order."""
    return hashlib.sha256("".join(result_hashes).encode()).hexdigest()


def results_version(output: FileFacts | None, errors: FileFacts | None) -> str:
    """Return the version of a batch's final files: the first half of a sha256 of each."""
    return "-".join(file.sha256[:16] for file in (output, errors) if file is not None) or "empty"


def model_code_version(base: str, models: Mapping[str, Model]) -> str:
    """Return the code version of what models make: it changes with the version of any model of the catalogue.

    In words where they are short, so that people read in Dagster what has changed.
    """
    words = "; ".join(f"{name} {model.version}" for name, model in sorted(models.items()))
    if len(words) > _MOST_CHARACTERS:
        words = f"{len(models)} models {hashlib.sha256(words.encode()).hexdigest()[:16]}"
    return f"{base}; {words}" if words else base
