"""Verify: prove of a final batch that its files hold exactly one result per request, by counting the files."""

from __future__ import annotations

import hashlib

import msgspec

from batch_pipeline.errors import NotAllowedInState
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch
from batch_pipeline.results import manifest
from batch_pipeline.results.archived import check_files_kept
from batch_pipeline.results.facts import files_to_count
from batch_pipeline.results.findings import Finding, Problems, Verdict
from batch_pipeline.results.manifest import Counts, Manifest, Usage
from batch_pipeline.results.proof import Counted, count_files
from batch_pipeline.store import ObjectMissing, ObjectStore


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What was counted, and what stands against each finding (nothing, in a proof that `holds`)."""

    batch_id: str
    status: str
    counted: Counted
    manifest_sha256: str | None
    verdicts: dict[Finding, Verdict]

    @property
    def holds(self) -> bool:
        """Whether every finding does."""
        return all(verdict.holds for verdict in self.verdicts.values())

    @property
    def problems(self) -> list[str]:
        """All problems that were kept, each as one sentence."""
        return [sentence for finding in Finding for sentence in self.verdicts[finding].problems]

    @property
    def problem_count(self) -> int:
        """All problems, also those that were not kept."""
        return sum(verdict.count for verdict in self.verdicts.values())


def verify(batch_id: str, *, ledger: Ledger, store: ObjectStore) -> Proof:
    """Read input, output, errors and manifest of a final batch and return the proof, whether it holds or not.

    Reads only. Raises NotFound; NotAllowedInState before the end and once the files were removed; StoreError where the
    store cannot be used (a file that is missing is a problem in the proof, not an error). Cost: each byte is read and
    parsed once, in bounded memory.
    """
    batch = ledger.batches.get(batch_id)
    if not batch.status.is_final:
        raise NotAllowedInState(f"batch {batch_id} is {batch.status}: there are no results to verify before its end")
    check_files_kept(batch)
    problems = Problems()
    counted = count_files(files_to_count(batch), store, problems)
    _compare_with_ledger(batch, counted, problems)
    digest = None
    try:
        data = store.get(batch.manifest_key or "")
        digest = hashlib.sha256(data).hexdigest()
        _compare_with_manifest(batch, manifest.decode(data), counted, problems)
    except ObjectMissing:
        problems.add(Finding.MANIFEST_AGREES, f"the manifest is missing: there is no object {batch.manifest_key}")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        problems.add(Finding.MANIFEST_AGREES, f"the manifest cannot be read: {error}")
    return Proof(
        batch_id=batch_id,
        status=batch.status,
        counted=counted,
        manifest_sha256=digest,
        verdicts=problems.verdicts,
    )


def _compare_with_ledger(batch: Batch, counted: Counted, problems: Problems) -> None:
    by = "the ledger"
    expected = Counts(
        total=batch.total,
        completed=batch.completed,
        failed=batch.failed,
        expired=batch.expired,
        cancelled=batch.cancelled,
        invalid=batch.invalid,
    )
    _compare_counts(counted.counts, by, expected, problems)
    problems.differ(
        "tokens",
        counted.usage,
        by,
        Usage(input_tokens=batch.input_tokens, cached_tokens=batch.cached_tokens, output_tokens=batch.output_tokens),
    )
    if counted.input_sha256 is not None:
        problems.differ("sha256 of the input", counted.input_sha256, by, batch.input_sha256)
        problems.differ("bytes of the input", counted.input_bytes, by, batch.input_bytes)


def _compare_with_manifest(batch: Batch, says: Manifest, counted: Counted, problems: Problems) -> None:
    by = "the manifest"
    problems.differ("batch", batch.batch_id, by, says.batch_id)
    problems.differ("status", str(batch.status), by, says.status)
    _compare_counts(counted.counts, by, says.counts, problems)
    problems.differ("requests that ended", counted.counts.total, by, says.counts.ended)
    problems.differ("tokens", counted.usage, by, says.usage)
    problems.differ("shared requests", counted.shared_requests, by, says.shared_requests)
    if counted.input_sha256 is not None:
        problems.differ("sha256 of the input", counted.input_sha256, by, says.input.sha256)
        problems.differ("bytes of the input", counted.input_bytes, by, says.input.bytes)
    problems.differ("requests in the input", counted.counts.total, by, says.input.requests)
    for name, found, expected in (("output", counted.output, says.output), ("error", counted.errors, says.errors)):
        if found is None or expected is None:
            problems.differ(f"whether there is an {name} file", found is not None, by, expected is not None)
            continue
        for field in ("key", "bytes", "lines", "sha256"):
            problems.differ(f"{field} of the {name} file", getattr(found, field), by, getattr(expected, field))
    _compare_chunks(says, counted, problems)


def _compare_chunks(says: Manifest, counted: Counted, problems: Problems) -> None:
    """The manifest's chunks must account for all valid requests, and for the tokens in the files."""
    by = "the manifest's list of chunks"
    valid = counted.counts.total - counted.counts.invalid
    problems.differ("valid requests", valid, by, sum(chunk.requests for chunk in says.chunks))
    problems.differ("completed requests", counted.counts.completed, by, sum(chunk.completed for chunk in says.chunks))
    by_chunks, by_models = Usage(), Usage()
    for chunk in says.chunks:
        by_chunks = by_chunks.plus(chunk.usage)
    for model in says.models:
        by_models = by_models.plus(model.usage)
    problems.differ("tokens", counted.usage, by, by_chunks)
    problems.differ("tokens", counted.usage, "the manifest's list of models", by_models)


def _compare_counts(found: Counts, by: str, expected: Counts, problems: Problems) -> None:
    for field in Counts.__struct_fields__:
        problems.differ(f"{field} requests", getattr(found, field), by, getattr(expected, field))
