"""Processes that outlive the command that started them.

    absent ──start──> starting ──ready──> running ──stop──> absent
                          └──died──> absent (its pid file stays and is recognised as stale)

A service is known by the pid file that it writes itself before it becomes the program (so no moment exists in which it
runs unknown): its pid, the moment of its birth and the boot in which that was. A pid that was given to another program
since then has another birth, and is never signalled. What a service starts inherits a variable that names the pid file,
and so is found even where the service was killed before it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from batch_pipeline.errors import OperatorError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# $0 is the pid file. `exec` keeps the pid and the time of birth, so what is written here stays true of the program.
_WRITE_PID_THEN_EXEC = (
    '{ echo $$; cut -d" " -f22 /proc/$$/stat; cat /proc/sys/kernel/random/boot_id; } >"$0.new"'
    ' && mv "$0.new" "$0" && exec "$@"'
)
_MARK = "BATCH_PIPELINE_PID_FILE"
_POLL_SECONDS = 0.05
LOG_LINES_SHOWN = 15

Probe = Callable[[], str | None]
"""Returns None when a service is ready, else what it still waits for, in words for an operator."""


@dataclass(frozen=True)
class Identity:
    """One process, told apart from any other that ever has its pid."""

    pid: int
    birth: str
    """Clock ticks from boot to the process's start, and the id of that boot."""


def identify(pid: int) -> Identity | None:
    """Return the identity of the living process `pid`, or None where there is none.

    A zombie has ended, unless it has threads left: those still hold its files and ports.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        threads = sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name in parentheses may hold spaces
    if fields[0] == "X" or (fields[0] == "Z" and threads <= 1):
        return None
    return Identity(pid, f"{fields[19]} {_BOOT_ID.read_text(encoding='ascii').strip()}")


def is_alive(identity: Identity) -> bool:
    """Return whether this very process still runs."""
    return identify(identity.pid) == identity


def descendants(identity: Identity) -> list[Identity]:
    """Return the children of a process, theirs and so on; empty where it has ended."""
    if not is_alive(identity):
        return []
    try:
        pids = [child.pid for child in psutil.Process(identity.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
    return [found for found in map(identify, pids) if found is not None]


def send(identity: Identity, number: signal.Signals) -> None:
    """Send a signal to this process; nothing where it has ended."""
    if is_alive(identity):
        try:
            os.kill(identity.pid, number)
        except ProcessLookupError:
            return


def wait_for_end(processes: Sequence[Identity], timeout_seconds: float) -> list[Identity]:
    """Wait until all of these have ended; return those that have not within the timeout."""
    deadline = time.monotonic() + timeout_seconds
    left = [process for process in processes if is_alive(process)]
    while left and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        left = [process for process in left if is_alive(process)]
    return left


def last_lines(log: Path, count: int = LOG_LINES_SHOWN) -> str:
    """Return the last lines of a log, indented, for a message; a sentence where it is empty or missing."""
    if not log.is_file():
        return f"  ({log} does not exist)"
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 64 * 1024))
        lines = file.read().decode(errors="replace").splitlines()[-count:]
    return "\n".join(f"  {line}" for line in lines) or f"  ({log} is empty)"


@dataclass
class Service:
    """One background process: what to run, where its pid file and log go, and how to see that it is ready."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    """Variables beside those of the process that starts it."""
    run_dir: Path
    log_dir: Path
    probe: Probe
    ready_seconds: float = 60.0
    """How long it may take to be ready."""
    stop_signal: signal.Signals = signal.SIGTERM
    stop_seconds: float = 20.0
    """How long it may take to end by itself; after that it is killed."""
    _child: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def pid_file(self) -> Path:
        """Where the process writes its identity."""
        return self.run_dir / f"{self.name}.pid"

    @property
    def log(self) -> Path:
        """Where the process writes what it has to say; that of the process before it is kept as `NAME.log.before`."""
        return self.log_dir / f"{self.name}.log"

    def process(self) -> Identity | None:
        """Return the running process of this service, or None. A stale or half-written pid file counts as none."""
        if self._child is not None:
            self._child.poll()  # takes the exit status of a child of ours, which would stay a zombie otherwise
        try:
            pid, ticks, boot = self.pid_file.read_text(encoding="ascii").split()
        except (FileNotFoundError, ValueError):
            return None
        recorded = Identity(int(pid), f"{ticks} {boot}")
        return recorded if is_alive(recorded) else None

    @property
    def started_at(self) -> float:
        """When the last process of this service started, in UTC seconds since the epoch."""
        return self.pid_file.stat().st_mtime

    def family(self) -> list[Identity]:
        """Return the process and what it started, also what is left of that where the process itself was killed."""
        mark, leader = str(self.pid_file.absolute()), self.process()
        marked = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == mark:
                    marked.append(identify(process.pid))
            except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
                continue  # another user's, or gone: not one of ours
        found = [leader, *(descendants(leader) if leader else []), *marked]
        return list(dict.fromkeys(member for member in found if member is not None))

    def start(self) -> bool:
        """Start the process unless it runs already; return whether it was started now.

        What a killed process of this service left behind is ended first. The new one is in a session of its own: a
        Ctrl-C at the terminal or the end of this command does not reach it. Killed at any moment, this leaves either no
        process or one that its pid file names.
        """
        if self.process() is not None:
            return False
        self.stop()
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.pid_file.unlink(missing_ok=True)
        if self.log.exists():
            self.log.replace(self.log.with_name(f"{self.log.name}.before"))
        with self.log.open("wb") as log:
            self._child = subprocess.Popen(
                ["/bin/sh", "-c", _WRITE_PID_THEN_EXEC, str(self.pid_file.absolute()), *self.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment, _MARK: str(self.pid_file.absolute())},
                start_new_session=True,
            )
        while self.process() is None and self._child.poll() is None:
            time.sleep(_POLL_SECONDS / 10)
        return True

    def _has_ended(self) -> bool:
        return self.process() is None if self._child is None else self._child.poll() is not None

    def wait_ready(self) -> None:
        """Wait until the probe is content.

        Raises OperatorError, with the end of the log, where the process ended or took too long.
        """
        deadline = time.monotonic() + self.ready_seconds
        waits_for: str | None = "its start"
        while waits_for is not None:
            if self._has_ended():
                status = f" with status {self._child.returncode}" if self._child is not None else ""
                raise OperatorError(f"{self.name} ended{status}; its log {self.log} says:\n{last_lines(self.log)}")
            waits_for = self.probe()
            if waits_for is not None and time.monotonic() > deadline:
                raise OperatorError(
                    f"{self.name} is not ready after {self.ready_seconds:.0f} s (waiting for {waits_for}); "
                    f"its log {self.log} says:\n{last_lines(self.log)}"
                )
            if waits_for is not None:
                time.sleep(_POLL_SECONDS)

    def stop(self) -> bool:
        """End the process and what it started; return whether there was anything to end.

        The process gets `stop_signal` and ends its own children. What is left after `stop_seconds` gets SIGTERM, and
        after as long again is killed. Killed itself in between, this leaves the pid file, and the next stop goes on.
        """
        family, leader = self.family(), self.process()
        if leader is not None:
            send(leader, self.stop_signal)
            wait_for_end([leader], self.stop_seconds)
        left = [member for member in dict.fromkeys([*family, *self.family()]) if is_alive(member)]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for member in left:
                send(member, number)
            left = wait_for_end(left, self.stop_seconds)
        if self._child is not None:
            self._child.wait(self.stop_seconds)
            self._child = None
        self.pid_file.unlink(missing_ok=True)
        return bool(family)
