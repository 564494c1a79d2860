"""What processes use: processor seconds, and memory at most."""

from __future__ import annotations

from pathlib import Path

import psutil


def database_seconds() -> float:
    """Return the processor seconds of the Postgres below this process so far, with those of its ended processes."""
    return sum(
        _seconds(process) for process in psutil.Process().children(recursive=True) if _name(process) == "postgres"
    )


def peak_bytes() -> int:
    """Return the most memory that this program has had. `ru_maxrss` has also what its parent had when it started it."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].removesuffix("kB")) * 1024


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def _seconds(process: psutil.Process) -> float:
    try:
        return sum(process.cpu_times()[:4])
    except psutil.NoSuchProcess:
        # It has ended since: its parent tells of it from now on.
        return 0.0
