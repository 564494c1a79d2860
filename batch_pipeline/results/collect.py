"""Bringing the final files of a batch into a local folder.

    download all under temporary names ──> compare each with the manifest's sha256 ──> rename; manifest.json comes last

A folder that holds manifest.json holds the whole of that batch's files. Killed before the renames, only files with
names like `.output.jsonl.BATCH.partial` are left, which the next call replaces; killed between the renames there is no
manifest.json, and the next call brings it all again. The same call again is harmless.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from batch_pipeline.errors import CustomerError, NotAllowedInState, ProofFailed
from batch_pipeline.ledger.records import Batch
from batch_pipeline.results import manifest as manifests
from batch_pipeline.results.archived import check_files_kept
from batch_pipeline.results.status import ERRORS, MANIFEST, OUTPUT
from batch_pipeline.store import ObjectStore
from batch_pipeline.wire import codes


class Collected(NamedTuple):
    """The files that are in the folder now; None for one that the batch does not have."""

    output: Path | None
    errors: Path | None
    manifest: Path

    @property
    def files(self) -> list[Path]:
        """The files that there are."""
        return [file for file in self if file is not None]


class _Origin(msgspec.Struct):
    batch_id: str


Download = Callable[[Path], None]
"""Writes a file's bytes to a path."""


def collect(batch: Batch, folder: Path, store: ObjectStore, *, overwrite: bool = False) -> Collected:
    """Download the final files of a batch into `folder`, which is created where it is missing.

    Raises NotAllowedInState where the batch has no final files yet, or none any more; CustomerError where the folder
    holds files of the same names that are not this batch's, unless `overwrite`; ProofFailed where what arrived is not
    what the manifest says; StoreError; OSError.
    """
    if not batch.status.is_final or batch.manifest_key is None:
        raise not_there_yet(batch.batch_id, batch.status)
    check_files_kept(batch)
    files = {OUTPUT: batch.output_key, ERRORS: batch.error_key}
    downloads = {name: partial(store.download, key) for name, key in files.items() if key is not None}
    return bring(batch.batch_id, folder, partial(store.get, batch.manifest_key), downloads, overwrite=overwrite)


def not_there_yet(batch_id: str, status: str) -> NotAllowedInState:
    """Return the error that says when results will be there."""
    return NotAllowedInState(
        f"batch {batch_id} is {status}: its results are there once it is completed, failed, expired or cancelled"
    )


def bring(
    batch_id: str,
    folder: Path,
    manifest: Callable[[], bytes],
    downloads: Mapping[str, Download],
    *,
    overwrite: bool = False,
) -> Collected:
    """Bring the final files of a batch from wherever they are, `downloads` by their names; as `collect`.

    Raises what those raise, and as `collect`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not overwrite:
        _refuse_others(folder, batch_id)
    data = manifest()
    facts = manifests.decode(data)
    expected = {OUTPUT: facts.output, ERRORS: facts.errors}
    try:
        for name, download in downloads.items():
            download(_partial(folder, name, batch_id))
            _compare(_partial(folder, name, batch_id), name, expected[name])
        _partial(folder, MANIFEST, batch_id).write_bytes(data)
        (folder / MANIFEST).unlink(missing_ok=True)
        for name in expected:
            if name in downloads:
                _partial(folder, name, batch_id).replace(folder / name)
            else:
                (folder / name).unlink(missing_ok=True)
        _partial(folder, MANIFEST, batch_id).replace(folder / MANIFEST)
    finally:
        for name in (OUTPUT, ERRORS, MANIFEST):
            _partial(folder, name, batch_id).unlink(missing_ok=True)
    return Collected(
        output=folder / OUTPUT if OUTPUT in downloads else None,
        errors=folder / ERRORS if ERRORS in downloads else None,
        manifest=folder / MANIFEST,
    )


def _partial(folder: Path, name: str, batch_id: str) -> Path:
    return folder / f".{name}.{batch_id}.partial"


def _compare(file: Path, name: str, expected: manifests.FileFacts | None) -> None:
    with file.open("rb") as opened:
        sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
    if expected is None or expected.sha256 != sha256:
        said = "does not name it" if expected is None else f"says {expected.sha256}"
        raise ProofFailed([f"{name} has the sha256 {sha256}, but its manifest {said}: run `verify`"])


def _refuse_others(folder: Path, batch_id: str) -> None:
    there = [name for name in (OUTPUT, ERRORS, MANIFEST) if (folder / name).exists()]
    # The manifest under its temporary name: a download of this batch was killed while it renamed.
    if not there or _partial(folder, MANIFEST, batch_id).exists():
        return
    try:
        origin = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=_Origin).batch_id
    except (FileNotFoundError, msgspec.DecodeError):
        origin = None
    if origin != batch_id:
        whose = f"of {origin}" if origin else "of unknown origin"
        raise CustomerError(
            codes.INVALID_OPTION,
            f"{folder} holds {', '.join(there)} {whose}: choose another folder, or pass --overwrite",
        )
