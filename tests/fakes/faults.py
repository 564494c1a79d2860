"""Interrupting a piece of work at one of its calls to the parts that it uses, as a kill would."""

from __future__ import annotations

import threading
from typing import Any, TypeVar, cast

_P = TypeVar("_P")
_PLAIN = (str, bytes, int, float, tuple, list, dict, type(None))


class Killed(BaseException):
    """The process is gone: not an Exception, so that nothing that handles errors handles it."""


class Faults:
    """Counts the calls to everything that it is put around, and raises Killed at call number `at_call` (from 0).

    `after`: the call is made, and its answer is lost. Every later call raises too: a dead process makes none.
    """

    def __init__(self, at_call: int, *, after: bool = False) -> None:
        self._at_call = at_call
        self._after = after
        self._lock = threading.Lock()
        self.calls = 0

    def around(self, part: _P) -> _P:
        """Return something that does what `part` does, through this."""
        return cast("_P", _Part(part, self))

    def pass_through(self, function: Any, arguments: Any, options: Any) -> Any:
        """Make one call, or die."""
        with self._lock:
            call = self.calls
            self.calls += 1
        if call > self._at_call or (call == self._at_call and not self._after):
            raise Killed
        result = function(*arguments, **options)
        if call == self._at_call:
            raise Killed
        return result


class _Part:
    """Stands in front of an object and counts the calls of its methods; so it does for its parts and what it opens."""

    def __init__(self, part: Any, faults: Faults) -> None:
        self._part = part
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._part, name)
        if callable(value):
            return lambda *arguments, **options: self._wrap(self._faults.pass_through(value, arguments, options))
        return self._wrap(value)

    def _wrap(self, value: Any) -> Any:
        is_ours = type(value).__module__.startswith("batch_pipeline.") and not hasattr(value, "__struct_fields__")
        if isinstance(value, _PLAIN) or not is_ours:
            return value
        return _Part(value, self._faults)
