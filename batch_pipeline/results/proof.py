"""Counting the files themselves: every request of the input has exactly one line in exactly one of the two result
files.

All three files are in index order, so one pass over the three together suffices: a merge join, in memory that does not
depend on their size. Nothing here asks the ledger; `verify` compares what is counted here with it and with the
manifest.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from batch_pipeline.results.findings import Finding, Problems
from batch_pipeline.results.manifest import Counts, FileFacts, Usage
from batch_pipeline.results.result_file import END, ErrorFile, OutputFile, ResultFile
from batch_pipeline.results.streams import HashedObject
from batch_pipeline.store import ObjectMissing, ObjectStore

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PRINTED_CHARACTERS = 80


class Files(msgspec.Struct, frozen=True, kw_only=True):
    """Which objects to count. A key is None where the batch has no such file.

    `input_key` is also None where the whole file was refused before its lines were looked at: then no line may have a
    result.
    """

    batch_id: str
    input_key: str | None
    output_key: str | None
    error_key: str | None


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """What the files hold. `counts.total` are the input's lines that are not blank; the rest counts result lines."""

    input_bytes: int
    input_sha256: str | None
    counts: Counts
    usage: Usage
    shared_requests: int = 0
    """Requests whose result another one brought, which the customer had asked for; they are in `counts` as well."""
    output: FileFacts | None
    errors: FileFacts | None


class Taps(msgspec.Struct, frozen=True):
    """What else is to see the bytes of the result files as they are read, block by block."""

    output: Callable[[bytes], None] | None = None
    errors: Callable[[bytes], None] | None = None


class _Label(msgspec.Struct):
    custom_id: object = None


_label_decoder = msgspec.json.Decoder(_Label)
_UNREADABLE = object()


def count_files(files: Files, store: ObjectStore, problems: Problems, taps: Taps | None = None) -> Counted:
    """Read the three files to their ends and return what they hold; what is wrong goes to `problems`.

    Cost: each byte is read, hashed and parsed once. Raises StoreError where the store cannot be used.
    """
    taps = taps or Taps()
    output = OutputFile(store, files.batch_id, files.output_key, problems, taps.output)
    errors = ErrorFile(store, files.batch_id, files.error_key, problems, taps.errors)
    source = None if files.input_key is None else HashedObject(store, files.input_key)
    output.advance()
    errors.advance()
    total = 0 if source is None else _join(source, output, errors, problems)
    _refuse_below(output, END)
    _refuse_below(errors, END)
    return Counted(
        input_bytes=0 if source is None else source.size,
        input_sha256=None if source is None else source.sha256,
        counts=Counts(
            total=total,
            completed=output.completed,
            failed=errors.failed,
            expired=errors.expired,
            cancelled=errors.cancelled,
            invalid=errors.invalid,
        ),
        usage=output.usage,
        shared_requests=output.shared + errors.shared,
        output=output.facts,
        errors=errors.facts,
    )


def _join(source: HashedObject, output: OutputFile, errors: ErrorFile, problems: Problems) -> int:
    """Walk the input and both files side by side; return how many requests the input has."""
    total = 0
    try:
        for index, line in enumerate(source.lines()):
            if line is not None and (not line or line.isspace() or (index == 0 and _is_blank_after_mark(line))):
                continue
            total += 1
            if output.index < index:
                _refuse_below(output, index)
            if errors.index < index:
                _refuse_below(errors, index)
            in_output, in_errors = output.index == index, errors.index == index
            if in_output == in_errors:
                fault = "has a line in both files" if in_output else "has no line in either file"
                problems.add(Finding.EXACTLY_ONE, f"request {index} (line {index + 1} of the input) {fault}")
            if in_output:
                _take(output, _label(line), may_be_unreadable=False)
            if in_errors:
                _take(errors, _label(line), may_be_unreadable=errors.is_by_intake)
    except ObjectMissing:
        problems.add(Finding.EXACTLY_ONE, f"the input is missing: there is no object {source.key}")
    return total


def _take(file: ResultFile, label: object, *, may_be_unreadable: bool) -> None:
    # Where intake could not use the line it may have given up before it came to the custom_id.
    excused = file.custom_id is None and may_be_unreadable
    if label is not _UNREADABLE and file.custom_id != label and not excused:
        file.problems.add(
            Finding.EXACTLY_ONE,
            f"{file.here}: request {file.index} has the custom_id {_shown(file.custom_id)}, the input {_shown(label)}",
        )
    file.take()
    file.advance()


def _refuse_below(file: ResultFile, index: int) -> None:
    """Report and pass by the lines of requests below `index`: the input has no such request."""
    while file.index < index:
        file.problems.add(
            Finding.NOTHING_UNKNOWN, f"{file.here}: the input has no request {file.index} (line {file.index + 1})"
        )
        file.advance()


def _label(line: bytes | None) -> object:
    return _UNREADABLE if line is None else label_of(line)


def label_of(line: bytes) -> str | None:
    """Return the custom_id that an input line has, None where it has none that is a string."""
    try:
        label = _label_decoder.decode(line.removeprefix(_BYTE_ORDER_MARK)).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return label if isinstance(label, str) else None


def _is_blank_after_mark(line: bytes) -> bool:
    rest = line.removeprefix(_BYTE_ORDER_MARK)
    return not rest or rest.isspace()


def _shown(label: object) -> str:
    return "null" if label is None else repr(str(label)[:_PRINTED_CHARACTERS])
