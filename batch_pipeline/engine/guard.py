"""Runs an engine, and sees to it that nothing of the engine outlives the worker.

    python guard.py COMMAND ARGUMENT...      (standard input: a pipe whose other end only the worker holds)

An engine is several processes, and some may not notice when the one that started them is killed: they would keep
the GPU's memory for ever. So the worker starts this program in between. It ends all processes below it as soon as its
standard input ends (the worker has ended, however: kill -9 as well) or the engine's first process does. SIGTERM is
passed on to the engine. Its exit status is the engine's, 128 + N where signal N killed that.

Run as a file and importing nothing but the standard library: it is there in milliseconds and holds little memory.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def run(command: list[str]) -> int:
    """Run the command to its end, or to the end of standard input; return the exit status to end with."""
    # Orphans of the engine become our children instead of init's, so that they can be found and ended.
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, _note)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_the_guard)  # noqa: PLW1509

    def forward(number: int, _frame: FrameType | None) -> None:
        child.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    while child.poll() is None:
        ready, _, _ = select.select([sys.stdin.fileno(), wake], [], [])
        if wake in ready:
            os.read(wake, 512)
        if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 512):
            child.kill()
            child.wait()
    _end_children()
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _note(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the byte in the wake-up pipe is what matters."""


def _die_with_the_guard() -> None:
    # Should somebody kill the guard itself, at least the engine's first process goes with it.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _end_children() -> None:
    """Kill every process below this one. Killing a parent makes its children ours, hence the rounds."""
    while True:
        for pid in _children():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the name, which is in parentheses and may hold anything: state, parent.
            parent = stat.read_bytes().rpartition(b")")[2].split()[1]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == os.getpid():
            found.append(int(stat.parent.name))
    return found


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
