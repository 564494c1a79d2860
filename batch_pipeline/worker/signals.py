"""SIGTERM and SIGINT as a wish to end."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from batch_pipeline import interrupts


@contextmanager
def calling(wish: Callable[[], None], loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Call `wish` in the loop at each signal that ends a process, and give the handlers back afterwards; at once where
    one came before (`interrupts.kept`).

    Nothing outside of the main thread, which alone can take signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = [signal.getsignal(number) for number in interrupts.NUMBERS]
    for number in interrupts.NUMBERS:
        loop.add_signal_handler(number, wish)
    if interrupts.were_told():
        loop.call_soon(wish)
    try:
        yield
    finally:
        for number, handler in zip(interrupts.NUMBERS, previous, strict=True):
            loop.remove_signal_handler(number)
            if handler is not None:  # None: it was not set from Python, and cannot be set again from here
                signal.signal(number, handler)
