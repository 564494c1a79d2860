"""Blocks of lines checked one after the other: here, or for large files in processes beside this one, one a core.

What a block is told depends on its bytes and the rules alone, so it is the same wherever it is checked, and the
answers come in the order of the blocks. A process beside is this module run as a program: it reads the settings, then
blocks from its standard input, and answers on its standard output; it ends when its input does, that is with its
parent at the latest. The bytes of a block it reads from the local copy of the file, which it inherits open.
"""

from __future__ import annotations

import gc
import os
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import IO

import msgspec

from batch_pipeline.errors import BatchPipelineError
from batch_pipeline.intake.block_check import CheckedBlock, check_block
from batch_pipeline.intake.blocks import Block
from batch_pipeline.intake.rules import Rules
from batch_pipeline.settings import Settings

PARALLEL_BYTES = 64 * 1024 * 1024
"""Smaller files are done sooner than a process starts."""
MOST_PROCESSES = 8
_FRAME = struct.Struct("<Q")


class CheckerLost(BatchPipelineError):
    """A process that checks lines has ended before its work did (killed for memory, perhaps). Intake can be run
    again.
    """


def check_all(
    blocks: Iterable[Block], settings: Settings, endpoint: str, *, descriptor: int, size: int | None
) -> Generator[CheckedBlock]:
    """Yield what each block holds, in their order. `size` is the file's in bytes, None where it is not known.

    `descriptor` is that of the local file, which has the bytes of each block once it is given.
    """
    processes = min(MOST_PROCESSES, len(os.sched_getaffinity(0)))
    if processes == 1 or size is None or size < PARALLEL_BYTES:
        rules = Rules(settings, endpoint)
        for block in blocks:
            yield check_block(block, rules)
        return
    with Checkers(settings, endpoint, descriptor, processes) as checkers:
        yield from checkers.check(blocks)


class _Start(msgspec.Struct, frozen=True):
    """What a process beside is told first."""

    endpoint: str
    settings: Settings
    descriptor: int
    """Of the local file."""


class _Given(msgspec.Struct, frozen=True, array_like=True):
    """A block to check: its bytes, or how many there are of them in the file."""

    first_line: int
    offset: int
    data: bytes | int
    is_cut: bool


class Checkers:
    """Processes that check blocks. Memory: in each a block and what is made of it; here three answers for each."""

    def __init__(self, settings: Settings, endpoint: str, descriptor: int, processes: int) -> None:
        rules = Settings(intake=settings.intake, models=settings.models)
        self._start = msgspec.json.encode(_Start(endpoint, rules, descriptor))
        self._descriptor = descriptor
        self._processes = processes
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="intake-check")
        self._own = threading.local()
        self._started: list[subprocess.Popen[bytes]] = []

    def check(self, blocks: Iterable[Block]) -> Iterator[CheckedBlock]:
        """Yield what each block holds, in their order. Raises CheckerLost."""
        under_way: deque[Future[CheckedBlock]] = deque()
        for block in blocks:
            if len(under_way) >= 3 * self._processes:
                yield under_way.popleft().result()
            data = len(block.data) if block.is_verbatim else block.data
            given = _Given(block.first_line, block.offset, data, block.is_cut)
            under_way.append(self._threads.submit(self._ask, given))
        while under_way:
            yield under_way.popleft().result()

    def __enter__(self) -> Checkers:
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes, whatever they are at."""
        for process in self._started:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._started:
            # One that was being started meanwhile has not been ended yet.
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                # What the process was not told any more breaks the pipe, and it need not be told.
                with suppress(BrokenPipeError):
                    if pipe is not None:
                        pipe.close()

    def _ask(self, given: _Given) -> CheckedBlock:
        process: subprocess.Popen[bytes] | None = getattr(self._own, "process", None)
        if process is None:
            process = self._own.process = self._new()
        if process.stdin is None or process.stdout is None:
            raise ValueError("the process was started with pipes")
        try:
            _send(process.stdin, msgspec.msgpack.encode(given))
            answer = _receive(process.stdout)
        except BrokenPipeError:
            answer = None
        if answer is None:
            raise CheckerLost(f"the process that checks lines ended with {process.wait()}; see its messages")
        return msgspec.msgpack.decode(answer, type=CheckedBlock)

    def _new(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "batch_pipeline.intake"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._descriptor],
        )
        self._started.append(process)
        if process.stdin is not None:
            _send(process.stdin, self._start)
        return process


def serve(given: IO[bytes], answers: IO[bytes]) -> None:
    """Check the blocks that are given until there are no more: the whole life of a process beside."""
    first = _receive(given)
    if first is None:
        return
    start = msgspec.json.decode(first, type=_Start)
    rules = Rules(start.settings, start.endpoint)
    # Hardly anything that is made of a line has circles. Looking for some all the time takes a third of it all; once a
    # block, among what is new, takes none.
    gc.disable()
    gc.freeze()
    while (data := _receive(given)) is not None:
        block = _read(msgspec.msgpack.decode(data, type=_Given), start.descriptor)
        _send(answers, msgspec.msgpack.encode(check_block(block, rules)))
        gc.collect(0)


def _read(given: _Given, descriptor: int) -> Block:
    data = given.data if isinstance(given.data, bytes) else os.pread(descriptor, given.data, given.offset)
    return Block(given.first_line, given.offset, data, given.is_cut)


def _send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(_FRAME.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes | None:
    """Return what was sent, or None where the other side has ended."""
    head = pipe.read(_FRAME.size)
    if len(head) < _FRAME.size:
        return None
    (size,) = _FRAME.unpack(head)
    data = pipe.read(size)
    return data if len(data) == size else None
