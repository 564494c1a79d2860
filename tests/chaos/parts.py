"""The parts of a chaos run: the real stack and Postgres, and workers under a supervisor; how to kill and mend each."""

from __future__ import annotations

import os
import signal
import subprocess
import sysconfig
import threading
from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from batch_pipeline import settings as configuration
from batch_pipeline.embedded.ports import LOOPBACK, free_ports
from batch_pipeline.embedded.postgres import PostgresServer
from batch_pipeline.embedded.processes import Identity, Service, descendants, identify, send, wait_for_end
from batch_pipeline.embedded.stack import Stack
from batch_pipeline.engine import guard
from batch_pipeline.errors import OperatorError
from batch_pipeline.settings import CONFIG_VARIABLE, Settings
from tests.chaos import engine
from tests.chaos.files import MODEL
from tests.chaos.plan import Part
from tests.fakes.small_model import write_model

SUPERVISED = 2
"""Workers that are started again whenever they end; Dagster starts one more where there is backlog."""
CHECKPOINT_SECONDS, LEASE_SECONDS, DELAY_SECONDS = 1.0, 8.0, 0.4
_NAMES = {Part.STORE: "seaweedfs", Part.DAEMON: "dagster-daemon", Part.CODE_SERVER: "dagster-code-server"}
_KILLED_SECONDS = 20.0
_TRIES = 5


def configure(folder: Path) -> tuple[Path, PostgresServer]:
    """Write the configuration of a run, and the model's folder; return the file, and the server that it names."""
    s3, web, code, database = free_ports(4)
    postgres = PostgresServer(folder / "postgres", database)
    environment = engine.install(folder / "engine", folder / "journal", DELAY_SECONDS)
    (folder / "journal").touch()
    write_model(folder / "model")
    file = folder / "batch-pipeline.toml"
    file.write_text(
        f"""
[store]
endpoint_url = "http://{LOOPBACK}:{s3}"
access_key_id = "chaos"
secret_access_key = "only-for-this-run"
[ledger]
url = "{postgres.url}"
[intake]
chunk_requests = 100
min_window_seconds = 10
scratch_dir = "scratch"
[worker]
lease_seconds = {LEASE_SECONDS}
heartbeat_seconds = 1.0
checkpoint_seconds = {CHECKPOINT_SECONDS}
leases = 2
poll_seconds = 0.5
warm_seconds = 15.0
grace_seconds = 5.0
[scheduling]
sensor_interval_seconds = 3
retry_run_seconds = 2.0
[embedded]
data_dir = "data"
s3_port = {s3}
dagster_port = {web}
code_server_port = {code}
serve_api = false
[models.{MODEL}]
source = "model"
context_length = 2048
max_in_flight = 16
engine_start_seconds = 60.0
[models.{MODEL}.engine_environment]
{"".join(f'{name} = "{value}"' + chr(10) for name, value in environment.items())}""",
        encoding="utf-8",
    )
    return file, postgres


class Parts:
    """Use it as a context manager: everything that it started has ended after it, however it is left."""

    def __init__(self, folder: Path) -> None:
        self.file, self._postgres = configure(folder)
        self._database = folder / "postgres" / "data"
        self.settings: Settings = configuration.load(self.file, environment={})
        self.stack = Stack(self.settings, self.file)
        self._services: dict[str, Service] = {service.name: service for service in self.stack.services}
        self._starting = threading.Lock()
        """One at a time: starting the stack starts whatever is down of it."""
        self._supervisors = [Supervisor(self.file, folder / f"worker-{number}.log") for number in range(SUPERVISED)]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Everything, from ready to ended."""
        with ExitStack() as ends:
            ends.callback(self._postgres.stop)
            self._postgres.start()
            ends.callback(self.stack.down, say=_to_nobody)
            self.stack.up(say=_to_nobody)
            for supervisor in self._supervisors:
                ends.callback(supervisor.stop)
                supervisor.start()
            yield

    def victim(self, part: Part, pick: float, asleep: Set[Identity]) -> list[Identity]:
        """Return what to kill for a part: the whole of a server, or one of several workers that are not asleep.

        Empty where none runs.
        """
        if part in (Part.WORKER, Part.ENGINE):
            pairs = [pair for pair in self._workers() if pair[0] not in asleep]
            chosen = pairs[int(pick * len(pairs))] if pairs else None
            return [] if chosen is None else [chosen[0 if part is Part.WORKER else 1]]
        if part is Part.LEDGER:
            postmaster = self._postmaster()
            return [postmaster, *descendants(postmaster)] if postmaster else []
        service = self._services[_NAMES[part]]
        return service.family() if service.process() is not None else []

    def start_again(self, part: Part) -> None:
        """Start a part that was killed, with its data and on its port; returns when it is ready.

        Nothing to do for a worker (its supervisor or the sensor starts another) and an engine (its worker does).
        """
        if part is Part.LEDGER:
            self._postgres.start()
        elif part in (Part.DAEMON, Part.CODE_SERVER):
            self._up()
        elif part is Part.STORE:
            with self._starting:
                service = self._services[_NAMES[part]]
                service.start()
                service.wait_ready()

    def _up(self) -> None:
        """Start what has died of the stack, as an operator does; again where something was killed under the call."""
        with self._starting:
            for tries_left in reversed(range(_TRIES)):
                try:
                    self.stack.up(say=_to_nobody)
                    return
                except OperatorError:
                    if not tries_left:
                        raise

    def _postmaster(self) -> Identity | None:
        """Return the server's first process; by its folder, since a stale file may name a pid that is another's now."""
        try:
            pid = int((self._database / "postmaster.pid").read_text(encoding="utf-8").split()[0])
            is_ours = str(self._database) in psutil.Process(pid).cmdline()
        except (FileNotFoundError, IndexError, psutil.NoSuchProcess, psutil.ZombieProcess):
            return None
        return identify(pid) if is_ours else None

    def _workers(self) -> list[tuple[Identity, Identity]]:
        """Return each worker of this run that has an engine, with that engine's process, in the order of their ids."""
        found = []
        for process in psutil.process_iter():
            try:
                command = process.cmdline()
                if guard.__file__ not in command or process.environ().get(CONFIG_VARIABLE) != str(self.file):
                    continue
                worker, children = identify(process.ppid()), [identify(child.pid) for child in process.children()]
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
            found += [(worker, child) for child in children if worker is not None and child is not None]
        return sorted(found, key=lambda pair: pair[0].pid)


class Supervisor:
    """Keeps one worker of the command line running, as a service manager would."""

    def __init__(self, config: Path, log: Path) -> None:
        self._environment = {**os.environ, CONFIG_VARIABLE: str(config)}
        self._log = log
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep_running)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End the worker, which hands back what it holds, and start none any more."""
        self._stopping.set()
        if self._thread.ident is None:
            return
        while self._thread.is_alive():
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(signal.SIGCONT)
                self._process.send_signal(signal.SIGTERM)
            self._thread.join(timeout=10.0)

    def _keep_running(self) -> None:
        command = [str(Path(sysconfig.get_path("scripts")) / "batch-pipeline"), "worker", MODEL]
        with self._log.open("ab") as log:
            while not self._stopping.is_set():
                self._process = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)
                self._process.wait()
                self._stopping.wait(0.5)


def _to_nobody(_line: str) -> None:
    """Hear what the stack says of its work."""


def kill(victim: Sequence[Identity]) -> None:
    """SIGKILL all of it; returns once none of it runs."""
    for process in victim:
        send(process, signal.SIGKILL)
    left = wait_for_end(victim, _KILLED_SECONDS)
    if left:
        raise RuntimeError(f"still there after SIGKILL: {left}")
