"""A cursor over one final result file: reads every line as a stranger would, and judges it by what it says itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from batch_pipeline import ids
from batch_pipeline.results.findings import Finding, Problems
from batch_pipeline.results.manifest import FileFacts, Usage
from batch_pipeline.results.streams import HashedObject
from batch_pipeline.store import ObjectMissing, ObjectStore
from batch_pipeline.wire import codes
from batch_pipeline.wire.usage import AnswerBody, tokens_of

END = 1 << 62
"""An index above every other one."""
_PRINTED_CHARACTERS = 80


class _Answer(msgspec.Struct):
    status_code: int
    body: AnswerBody


class _AnyAnswer(msgspec.Struct):
    status_code: int


class _Error(msgspec.Struct):
    code: str
    line: int | None = None


class _OutputLine(msgspec.Struct, kw_only=True):
    id: str
    custom_id: str | None
    response: _Answer
    error: None
    shared_with: str | None = None


class _OddOutputLine(msgspec.Struct, kw_only=True):
    id: str
    custom_id: str | None
    response: _AnyAnswer
    error: None
    shared_with: str | None = None


class _ErrorLine(msgspec.Struct, kw_only=True):
    id: str
    custom_id: str | None
    response: _AnyAnswer | None
    error: _Error | None
    shared_with: str | None = None


_output_decoder = msgspec.json.Decoder(_OutputLine)
_odd_output_decoder = msgspec.json.Decoder(_OddOutputLine)
_error_decoder = msgspec.json.Decoder(_ErrorLine)


class ResultFile:
    """One result file, read once. `index` is the request of the current line, END after the last.

    Lines that are no result of this batch, or stand out of order, are reported to `problems` and passed by.
    Subclasses say what a line of their file must look like and count it.
    """

    name = ""

    def __init__(
        self,
        store: ObjectStore,
        batch_id: str,
        key: str | None,
        problems: Problems,
        tap: Callable[[bytes], None] | None = None,
    ) -> None:
        self._batch_id = batch_id
        self._object = None if key is None else HashedObject(store, key, tap)
        self.problems = problems
        self._rest = self._lines()
        self.lines = 0
        self.index = -1
        self.custom_id: str | None = None
        self.shared = 0
        """Lines taken so far whose result another request brought."""

    def advance(self) -> None:
        """Go to the next line that is a result of this batch and stands in order."""
        before = self.index
        for data in self._rest:
            self.lines += 1
            index = self._identify(data)
            if index is None:
                continue
            if index > before:
                self.index = index
                return
            fault = "stands there a second time" if index == before else f"comes after request {before}"
            self.problems.add(Finding.EXACTLY_ONE, f"{self.here}: request {index} {fault}")
        self.index = END

    @property
    def here(self) -> str:
        """The current line, for messages."""
        return f"{self.name} file, line {self.lines}"

    @property
    def facts(self) -> FileFacts | None:
        """What the file is, once all of it was read; None where there is none."""
        read = self._object
        if read is None:
            return None
        return FileFacts(key=read.key, bytes=read.size, lines=self.lines, sha256=read.sha256)

    def take(self) -> None:
        """Count the current line as the result of its request."""
        raise NotImplementedError

    def _decode(self, data: bytes) -> tuple[str, str | None]:
        raise NotImplementedError

    def _is_shared(self, shared_with: str | None) -> bool:
        """Count the current line as shared where it is; report one that names no other request of the batch."""
        if shared_with is None:
            return False
        self.shared += 1
        ran = ids.index_of(self._batch_id, shared_with)
        if ran is None or ran == self.index:
            shown = repr(shared_with[:_PRINTED_CHARACTERS])
            self.problems.add(Finding.NOTHING_UNKNOWN, f"{self.here}: it shares the result of {shown}")
        return True

    def _identify(self, data: bytes | None) -> int | None:
        if data is None:
            self.problems.add(Finding.NOTHING_UNKNOWN, f"{self.here}: longer than any result line")
            return None
        try:
            request, self.custom_id = self._decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.problems.add(Finding.NOTHING_UNKNOWN, f"{self.here}: not a result line: {error}")
            return None
        index = ids.index_of(self._batch_id, request)
        if index is None or request != ids.request_id(self._batch_id, index):
            shown = repr(request[:_PRINTED_CHARACTERS])
            self.problems.add(Finding.NOTHING_UNKNOWN, f"{self.here}: the id {shown} is not one of this batch")
            return None
        return index

    def _lines(self) -> Iterator[bytes | None]:
        if self._object is None:
            return
        try:
            yield from self._object.lines()
        except ObjectMissing:
            self.problems.add(
                Finding.EXACTLY_ONE, f"the {self.name} file is missing: there is no object {self._object.key}"
            )
            return
        if not self._object.ends_whole:
            self.problems.add(Finding.EXACTLY_ONE, f"the {self.name} file is cut off: it does not end with a newline")


class OutputFile(ResultFile):
    """output.jsonl: answers, each with a status of success. Sums their token usage."""

    name = "output"

    def __init__(
        self,
        store: ObjectStore,
        batch_id: str,
        key: str | None,
        problems: Problems,
        tap: Callable[[bytes], None] | None = None,
    ) -> None:
        super().__init__(store, batch_id, key, problems, tap)
        self._answer: _Answer | _AnyAnswer | None = None
        self._shared_with: str | None = None
        self._input_tokens = self._cached_tokens = self._output_tokens = 0
        self.completed = 0

    @property
    def usage(self) -> Usage:
        """Tokens of the lines taken so far, as the engine reported them in its answers; of an answer that is shared
        they count once, with the request that was run.
        """
        return Usage(
            input_tokens=self._input_tokens, cached_tokens=self._cached_tokens, output_tokens=self._output_tokens
        )

    def take(self) -> None:
        """Count the current line as completed."""
        self.completed += 1
        answer = self._answer
        is_shared = self._is_shared(self._shared_with)
        if answer is None or not 200 <= answer.status_code < 300:
            self.problems.add(Finding.NOTHING_UNKNOWN, f"{self.here}: not an answer of success")
        elif isinstance(answer, _Answer) and not is_shared:
            tokens = tokens_of(answer.body.usage)
            self._input_tokens += tokens.input
            self._cached_tokens += tokens.cached
            self._output_tokens += tokens.output

    def _decode(self, data: bytes) -> tuple[str, str | None]:
        line: _OutputLine | _OddOutputLine
        try:
            line = _output_decoder.decode(data)
        except msgspec.ValidationError:
            # An engine may answer with JSON of any form; then it tells no usage.
            line = _odd_output_decoder.decode(data)
        self._answer, self._shared_with = line.response, line.shared_with
        return line.id, line.custom_id


class ErrorFile(ResultFile):
    """errors.jsonl: refusals by the engine, and requests without an answer. Counts them by why."""

    name = "error"

    def __init__(
        self,
        store: ObjectStore,
        batch_id: str,
        key: str | None,
        problems: Problems,
        tap: Callable[[bytes], None] | None = None,
    ) -> None:
        super().__init__(store, batch_id, key, problems, tap)
        self._line: _ErrorLine | None = None
        self.failed = self.expired = self.cancelled = self.invalid = 0

    @property
    def is_by_intake(self) -> bool:
        """Whether the current line says that its request could not be run, naming the line of the input."""
        return self._line is not None and self._line.error is not None and self._line.error.line is not None

    def take(self) -> None:
        """Count the current line by what it says."""
        line = self._line
        if line is None or (line.error is None) == (line.response is None):
            self.problems.add(Finding.NOTHING_UNKNOWN, f"{self.here}: it must have either an error or a response")
        self._is_shared(None if line is None else line.shared_with)
        error = None if line is None else line.error
        if error is not None and error.line is not None:
            self.invalid += 1
            if error.line != self.index + 1:
                self.problems.add(
                    Finding.EXACTLY_ONE, f"{self.here}: it names line {error.line} for request {self.index}"
                )
        elif error is not None and error.code == codes.BATCH_EXPIRED:
            self.expired += 1
        elif error is not None and error.code == codes.BATCH_CANCELLED:
            self.cancelled += 1
        else:
            self.failed += 1

    def _decode(self, data: bytes) -> tuple[str, str | None]:
        self._line = _error_decoder.decode(data)
        return self._line.id, self._line.custom_id
