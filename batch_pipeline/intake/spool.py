"""The local copy of a batch's input while it is worked on: `SCRATCH/BATCH/input.jsonl`.

A copy is filled under a name of its own and renamed when it is whole, so that whoever opens `input.jsonl` finds all
of it, also where two runs of one batch are at work. It is only a copy: where it is missing (another machine, a kill,
a clean-up) it is downloaded again. A process that is killed leaves its unfinished folder behind; the next one on this
machine that finds it unlocked removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from batch_pipeline import ids
from batch_pipeline.ledger.records import Batch
from batch_pipeline.store import ObjectStore

_WORK = "intake-"
_LOCK = "lock"
_PIECE_BYTES = 8 * 1024 * 1024
_BLOCK_BYTES = 512 * 1024
_FORGOTTEN_SECONDS = 6 * 3600.0
"""A whole copy that nobody has used for so long belongs to a batch that went on elsewhere."""


@contextmanager
def workspace(scratch_dir: str, batch_id: str) -> Iterator[Path]:
    """Yield an empty folder for one run of intake, on the batch's scratch folder; it is removed at the end."""
    scratch = Path(scratch_dir)
    of_batch = scratch / batch_id
    sweep(scratch)
    of_batch.mkdir(parents=True, exist_ok=True)
    folder = of_batch / f"{_WORK}{ids.new_nonce()}"
    folder.mkdir()
    try:
        with (folder / _LOCK).open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _remove_if_empty(of_batch)


def copy_of(scratch_dir: str, batch_id: str) -> Path:
    """Return where the whole local copy of a batch's input lies, if there is one."""
    return Path(scratch_dir) / batch_id / "input.jsonl"


def discard(scratch_dir: str, batch_id: str) -> None:
    """Remove the local copy."""
    copy_of(scratch_dir, batch_id).unlink(missing_ok=True)
    _remove_if_empty(Path(scratch_dir) / batch_id)


@contextmanager
def open_copy(store: ObjectStore, batch: Batch, scratch_dir: str, folder: Path) -> Iterator[BinaryIO]:
    """Yield the local copy of a batch's input, downloaded to `folder` first where this machine has none."""
    path = copy_of(scratch_dir, batch.batch_id)
    file = _open_whole(path, batch.input_bytes)
    if file is None:
        mine = folder / path.name
        if batch.input_bytes:
            store.download(batch.input_key, mine)
        else:
            mine.touch()
        file = mine.open("rb")
        mine.replace(path)
    with file:
        yield file


def _open_whole(path: Path, size: int) -> BinaryIO | None:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    if os.fstat(file.fileno()).st_size == size:
        return file
    file.close()
    return None


def pieces(store: ObjectStore, key: str, size: int) -> Iterator[bytes]:
    """Yield an object in pieces that suit `read_blocks`, reading ahead. Memory: three ranges of 8 MiB."""
    with ThreadPoolExecutor(2, thread_name_prefix="intake-read") as readers:
        starts = range(0, size, _PIECE_BYTES)
        ahead = [readers.submit(_range, store, key, start) for start in starts[:2]]
        for number in range(len(starts)):
            blocks = ahead.pop(0).result()
            if number + 2 < len(starts):
                ahead.append(readers.submit(_range, store, key, starts[number + 2]))
            yield from blocks


def _range(store: ObjectStore, key: str, start: int) -> list[bytes]:
    return list(store.iterate_range(key, start, _PIECE_BYTES, _BLOCK_BYTES))


def sweep(scratch: Path) -> None:
    """Remove what killed runs and finished batches have left in the scratch folder, and nothing else."""
    if not scratch.is_dir():
        return
    for of_batch in scratch.iterdir():
        if not ids.BATCH_ID_PATTERN.fullmatch(of_batch.name) or not of_batch.is_dir():
            continue
        for folder in of_batch.glob(f"{_WORK}*"):
            _remove_if_unlocked(folder)
        copy = of_batch / "input.jsonl"
        try:
            if time.time() - copy.stat().st_mtime > _FORGOTTEN_SECONDS:
                copy.unlink(missing_ok=True)
        except FileNotFoundError:
            pass
        _remove_if_empty(of_batch)


def _remove_if_unlocked(folder: Path) -> None:
    try:
        with (folder / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except (FileNotFoundError, BlockingIOError):
        return


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return
