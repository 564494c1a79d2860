"""What kind of machine an engine runs on: two of a kind do as much with the same model."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

_ASK_SECONDS = 20.0


def kind() -> str:
    """Return the GPUs of this machine, or where none are seen its processor, for instance `2 x NVIDIA L4`."""
    gpus = _gpus()
    if gpus:
        return ", ".join(f"{count} x {name}" for name, count in sorted(Counter(gpus).items()))
    return f"{os.cpu_count()} x {_processor()}"


def _gpus() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    answer = subprocess.run(
        [program, "--query-gpu=name", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=_ASK_SECONDS,
        check=False,
    )
    return answer.stdout.split("\n")[:-1] if answer.returncode == 0 else []


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", file.read_text(), re.MULTILINE) if file.exists() else None
    return found[1] if found else platform.machine()
