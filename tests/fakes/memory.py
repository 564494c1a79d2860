"""How much memory a process has held."""

from __future__ import annotations

from pathlib import Path


def peak_bytes() -> int:
    """Return the largest resident set of this process since its program was started.

    `getrusage` would not do: its maximum is carried over from the process that started this one, and the tests' own
    process grows large.
    """
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
