"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_Found = TypeVar("_Found")


def wait_until(
    condition: Callable[[], _Found], what: str, timeout_seconds: float = 60.0, pause_seconds: float = 0.01
) -> _Found:
    """Wait for a condition, and return what it has found; fail with what did not come true."""
    deadline = time.monotonic() + timeout_seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not true in time: {what}"
        time.sleep(pause_seconds)
    return found
