"""One pass over a file: every line checked, duplicates found, the request table and the list of problems written.

The same bytes and the same rules give the same files. Memory is bounded whatever the file holds: a block of lines, a
row group, and eight bytes a request (28 more while duplicates are looked at, where there are any).
"""

from __future__ import annotations

import hashlib
import heapq
import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import pyarrow as pa

from batch_pipeline.intake.blocks import read_blocks
from batch_pipeline.intake.checkers import check_all
from batch_pipeline.intake.duplicates import CustomIds, Duplicates
from batch_pipeline.intake.lines import readable_custom_id
from batch_pipeline.intake.problems import LineProblem, duplicate
from batch_pipeline.intake.table import Column, RequestTable, Summary, TableWriter
from batch_pipeline.ledger.records import BatchError
from batch_pipeline.settings import Settings
from batch_pipeline.wire import codes

FIRST_ERRORS = 50
"""Problems that are shown with the batch; the file of problems has them all."""
_TABLE = "requests.parquet"
_PROBLEMS = "problems.jsonl"

_problems = msgspec.json.Decoder(LineProblem)


class Scan:
    """The pass over one file. `pieces` are its bytes; `file` holds them too, or receives them where `fill` is asked
    for.

    What is found lies in `folder`, which is the caller's to remove. Killed at any time, what lies there is of no use to
    anybody and is made again.
    """

    def __init__(self, settings: Settings, endpoint: str, folder: Path, size: int | None) -> None:
        self._settings = settings
        self._limits = settings.intake
        self._endpoint = endpoint
        self._size = size
        self._folder = folder
        self._sha256 = hashlib.sha256()
        self._bytes = 0
        self._total = 0
        self._ids = CustomIds()
        self.table = folder / _TABLE
        self.problems = folder / _PROBLEMS

    def run(self, pieces: Iterable[bytes], file: BinaryIO, *, fill: bool) -> Summary:
        """Check the whole file and write both results; return what was found."""
        stream = self._seen(pieces, file if fill else None)
        with TableWriter(self.table) as writer:
            with self.problems.open("wb") as out:
                invalid = self._check(stream, file.fileno(), writer, out)
            refused = self._total > self._limits.max_requests
            if refused:
                return self._refuse(stream, writer)
            summary = self._summary(invalid, self._first_errors())
            writer.close(summary)
        return self._without_duplicates(summary, file.fileno())

    def read_problems(self) -> Iterator[LineProblem]:
        """Yield the problems in the order of their lines."""
        return _read_problems(self.problems)

    def _seen(self, pieces: Iterable[bytes], copy: BinaryIO | None) -> Iterator[bytes]:
        for piece in pieces:
            self._sha256.update(piece)
            self._bytes += len(piece)
            if copy is not None:
                copy.write(piece)
                copy.flush()
            yield piece

    def _check(self, stream: Iterator[bytes], descriptor: int, writer: TableWriter, out: BinaryIO) -> int:
        invalid = 0
        blocks = read_blocks(stream, self._limits.max_line_bytes)
        checking = check_all(blocks, self._settings, self._endpoint, descriptor=descriptor, size=self._size)
        with closing(checking) as checked_blocks:
            for checked in checked_blocks:
                requests = checked.requests.array
                writer.add(checked.requests)
                self._ids.add(requests["id_hash"].tobytes())
                out.writelines(msgspec.json.encode(problem) + b"\n" for problem in checked.problems)
                invalid += len(checked.problems)
                self._total += len(requests) + len(checked.problems)
                if self._total > self._limits.max_requests:
                    break
        return invalid

    def _refuse(self, stream: Iterator[bytes], writer: TableWriter) -> Summary:
        """The file has too many requests: read the rest for its hash only, and keep nothing of it."""
        for _ in stream:
            pass
        message = f"the file has more than {self._limits.max_requests} requests; divide it into several files"
        summary = Summary(
            total=0,
            invalid=0,
            input_bytes=self._bytes,
            input_sha256=self._sha256.hexdigest(),
            refused=True,
            errors=[BatchError(codes.TOO_MANY_REQUESTS, message)],
        )
        writer.discard()
        self.problems.write_bytes(b"")
        with TableWriter(self.table) as empty:
            empty.close(summary)
        return summary

    def _summary(self, invalid: int, errors: list[BatchError]) -> Summary:
        if not self._total:
            errors = [BatchError(codes.EMPTY_BATCH, "the file has no requests: put one JSON object on each line")]
        return Summary(
            total=self._total,
            invalid=invalid,
            input_bytes=self._bytes,
            input_sha256=self._sha256.hexdigest(),
            errors=errors,
        )

    def _first_errors(self) -> list[BatchError]:
        return [
            BatchError(problem.code, problem.message, problem.line)
            for problem, _ in zip(self.read_problems(), range(FIRST_ERRORS), strict=False)
        ]

    def _without_duplicates(self, summary: Summary, descriptor: int) -> Summary:
        """Take requests with an id that is taken out of the table, and put them among the problems."""
        table = RequestTable(self.table)
        lines = _Lines(table, descriptor)
        found = self._ids.duplicates(lines.custom_id)
        self._ids = CustomIds()
        if not len(found):
            table.close()
            return summary
        own, merged = self.problems.with_suffix(".own"), self.problems.with_suffix(".merged")
        self.problems.rename(own)
        duplicates = (duplicate(*lines.named(later, first)) for later, first in found)
        with merged.open("wb") as out:
            for problem in heapq.merge(_read_problems(own), duplicates, key=lambda problem: problem.line):
                out.write(msgspec.json.encode(problem) + b"\n")
        own.unlink()
        merged.rename(self.problems)
        del lines
        summary = self._summary(summary.invalid + len(found), self._first_errors())
        kept = self.table.with_suffix(".kept")
        with TableWriter(kept) as writer:
            for part in _without_rows(table, found):
                writer.add_table(part)
            writer.close(summary)
        table.close()
        kept.rename(self.table)
        return summary


class _Lines:
    """Where the lines of the table's requests lie in the file; a column is read when it is first asked for."""

    def __init__(self, table: RequestTable, descriptor: int) -> None:
        self._table = table
        self._descriptor = descriptor
        self._columns: dict[str, Column] = {}

    def custom_id(self, position: int) -> str:
        """Return the custom_id of the request at a position of the table."""
        length, offset = (int(self._column(name)[position]) for name in ("line_bytes", "line_offset"))
        line = os.pread(self._descriptor, length, offset)
        return readable_custom_id(line) or ""

    def named(self, later: int, first: int) -> tuple[int, str, int]:
        """Return the line number and the id of a later request, and the line number of the first one with its id."""
        index = self._column("index")
        return int(index[later]) + 1, self.custom_id(later), int(index[first]) + 1

    def _column(self, name: str) -> Column:
        found = self._columns.get(name)
        if found is None:
            found = self._columns[name] = self._table.column(name)
        return found


def _read_problems(path: Path) -> Iterator[LineProblem]:
    with path.open("rb") as file:
        for line in file:
            yield _problems.decode(line)


def _without_rows(table: RequestTable, duplicates: Duplicates) -> Iterator[pa.Table]:
    """Yield the rows of a table but the duplicates."""
    start = 0
    for part in table.groups():
        end = start + part.num_rows
        keep = np.ones(part.num_rows, dtype=np.bool_)
        keep[duplicates.between(start, end) - start] = False
        yield part.filter(pa.array(keep))
        start = end
