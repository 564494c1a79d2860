"""Signals that told this process to end, kept although nobody has heard of them.

While a step of a run begins, Dagster raises an error for such a signal wherever the main thread is at that moment.
Where that is Python code below native code which clears errors (the imports of large packages have such places), the
error is gone and with it the wish; the process would go on until it is killed. The interpreter's wake-up descriptor
takes the number of each signal before any handler runs: what was written there cannot be swallowed.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

NUMBERS = (signal.SIGTERM, signal.SIGINT)
_readers: list[socket.socket] = []


@contextmanager
def kept() -> Iterator[None]:
    """Keep the signals that come. Nothing outside of the main thread, which alone can take signals.

    Whoever takes the descriptor over meanwhile, as an event loop with handlers of its own, hears of later ones itself.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        _readers.append(reader)
        try:
            yield
        finally:
            _readers.remove(reader)
            signal.set_wakeup_fd(before)


def were_told() -> bool:
    """Whether a signal that ends a process has come since `kept` was entered, or since the last question."""
    told = False
    for reader in _readers:
        try:
            told = told or any(number in NUMBERS for number in reader.recv(4096))
        except BlockingIOError:
            continue
    return told
