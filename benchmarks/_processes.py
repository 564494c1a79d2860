"""Processor seconds of processes that are not this one."""

from __future__ import annotations

import psutil


def database_seconds() -> float:
    """Return the processor seconds of the Postgres below this process so far, with those of its ended processes."""
    return sum(
        _seconds(process) for process in psutil.Process().children(recursive=True) if _name(process) == "postgres"
    )


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
