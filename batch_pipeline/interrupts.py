"""Signals that told this process to end, kept although nobody has heard of them.

While a step of a run works, Dagster raises an error for such a signal wherever the main thread is at that moment. Where
that is Python code below native code which clears errors, the error is gone and with it the wish; the process would go
on until it is killed. That is no rare thing: native code runs no handler, so a signal that comes while botocore's JSON
is parsed is taken by the next Python code there is, which may be what the garbage collector calls (SQLAlchemy's
`_collection_gced`, for one): of the signals in the first half second of a step four in ten were lost so.

So the signal is sent again where the interpreter says that its error was ignored. And its wake-up descriptor takes the
number of each signal before any handler runs: what was written there cannot be swallowed.
"""

from __future__ import annotations

import _thread
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

NUMBERS = (signal.SIGTERM, signal.SIGINT)
_AGAIN_SECONDS = 0.05
"""Until whoever ignored the error has returned, most likely; where it is ignored again, it is sent again."""
_readers: list[socket.socket] = []
_ignored: list[type[BaseException]] = []


@contextmanager
def kept(raised: type[BaseException] = KeyboardInterrupt) -> Iterator[None]:
    """Keep the signals that come, and send one again whose error, which is `raised`, was ignored. Nothing outside of
    the main thread, which alone can take signals.

    Whoever takes the descriptor over meanwhile, as an event loop with handlers of its own, hears of later ones itself.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    with reader, writer, _sent_again(raised):
        reader.setblocking(False)
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        _readers.append(reader)
        try:
            yield
        finally:
            _readers.remove(reader)
            signal.set_wakeup_fd(before)


@contextmanager
def _sent_again(raised: type[BaseException]) -> Iterator[None]:
    before = sys.unraisablehook

    def ignored(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, raised):
            before(unraisable)
            return
        # Nothing here takes a lock: the garbage collector comes anywhere, also where the lock is held.
        _ignored.append(raised)
        _thread.start_new_thread(_send_again, ())

    sys.unraisablehook = ignored
    try:
        yield
    finally:
        sys.unraisablehook = before
        _ignored.clear()


def _send_again() -> None:
    """Send the signal once more, unless somebody has heard of it meanwhile or there is nobody left to."""
    time.sleep(_AGAIN_SECONDS)
    if _ignored:
        _ignored.clear()
        # To this very thread: it may be in a call that only its own signal interrupts.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def were_told() -> bool:
    """Whether a signal that ends a process has come since `kept` was entered, or since the last question."""
    told = False
    _ignored.clear()
    for reader in _readers:
        try:
            told = told or any(number in NUMBERS for number in reader.recv(4096))
        except BlockingIOError:
            continue
    return told
