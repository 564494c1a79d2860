"""What in an engine's log tells an operator why it did not start."""

from __future__ import annotations

import itertools
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
_CONTINUED = re.compile(r"\d+ validation errors? for \w+$")
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
    telling = [
        # A validation error says in its next line what it is about.
        f"{line}: {following}" if _CONTINUED.search(line) else line
        for line, following in itertools.zip_longest(lines, lines[1:], fillvalue="")
        if _TELLING.search(line) and not _EMPTY.search(line)
    ]
    chosen: list[str] = []
    for line in telling or lines[-_SHOWN_LINES:]:
        # The same error is often told again by each process that it passes through.
        if not any(_gist(line) in known or _gist(known) in line for known in chosen):
            chosen.append(line)
    shown = " | ".join(chosen[-_SHOWN_LINES:]) or "its log is empty"
    return shown if len(shown) <= _SHOWN_CHARACTERS else shown[: _SHOWN_CHARACTERS - 1] + "…"


def _gist(line: str) -> str:
    """Return what an error line says, without the error's name."""
    return line.partition(": ")[2] or line
