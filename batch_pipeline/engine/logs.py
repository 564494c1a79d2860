"""What in an engine's log tells an operator why it did not start."""

from __future__ import annotations

import re
from pathlib import Path

_TAIL_BYTES = 256 * 1024
_SHOWN_LINES = 2
_SHOWN_CHARACTERS = 600
# vLLM's prefix: "(APIServer pid=12) ERROR 11-29 20:05:24 [core.py:12] ".
_PREFIX = re.compile(r"^(?:\([A-Za-z0-9_ ]+pid=\d+\)\s*)?(?:(?:DEBUG|INFO|WARNING|ERROR) [\d-]+ [\d:]+ \[[^\]]*\]\s*)?")
_TELLING = re.compile(
    r"^[\w.]*(?:Error|Exception|Interrupt)\b|: error: |^Killed\b|^Segmentation fault|CUDA error|out of memory"
)
# These say that something failed, not what; the reason stands above them.
_EMPTY = re.compile(r"See root cause above|Engine core initialization failed")


def tail(log: Path, start: int = 0) -> str:
    """Return the end of the log from byte `start` on; empty where there is no log."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(start, size - _TAIL_BYTES))
        return file.read().decode(errors="replace")


def telling_lines(text: str) -> str:
    """Return the lines that name the error, joined and shortened; the last lines where none does."""
    lines = [_PREFIX.sub("", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    telling = [line for line in lines if _TELLING.search(line) and not _EMPTY.search(line)]
    chosen = list(dict.fromkeys(telling or lines))[-_SHOWN_LINES:]
    shown = " | ".join(chosen) or "its log is empty"
    return shown if len(shown) <= _SHOWN_CHARACTERS else shown[: _SHOWN_CHARACTERS - 1] + "…"
