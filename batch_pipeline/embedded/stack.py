"""The embedded stack: the object store, the HTTP service and Dagster on this machine, started and ended as one.

    up:    object store ─> HTTP service ─> code server ─> webserver ─> (limits of pools, lost runs) ─> daemon
    down:  daemon ─> runs in progress ─> webserver ─> code server ─> HTTP service ─> object store

Each part runs in the background with its log in `DATA_DIR/logs` and its pid file in `DATA_DIR/run`. One `up` or `down`
at a time: both hold a lock file. The daemon comes last and goes first, because it is what launches runs.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from batch_pipeline.embedded.api_service import api_service, api_url
from batch_pipeline.embedded.dagster_client import DagsterClient
from batch_pipeline.embedded.dagster_services import (
    DEFINITIONS,
    LOCATION,
    dagster_services,
    prepare_home,
    webserver_url,
)
from batch_pipeline.embedded.ports import LOOPBACK, TWIN_OFFSET, holder, is_free, reserve
from batch_pipeline.embedded.processes import Service, last_lines
from batch_pipeline.embedded.seaweedfs import s3_service
from batch_pipeline.errors import OperatorError, SettingsError
from batch_pipeline.settings import CONFIG_VARIABLE, Settings

_LOOPBACK_NAMES = {LOOPBACK, "localhost", "::1"}
_POLL_SECONDS = 0.2
_RUN_END_MARGIN_SECONDS = 15.0

Say = Callable[[str], None]
"""Takes one line about what is being done, for a person who waits."""


@dataclass(frozen=True)
class Addresses:
    """Where the parts of a running stack are."""

    dagster: str
    """The Dagster UI."""
    object_store: str
    """The S3 endpoint; the region's own for AWS."""
    inbox: str
    """Where files are dropped: s3://BUCKET/inbox/CUSTOMER/NAME.jsonl."""
    logs: Path
    api: str | None = None
    """The HTTP service, without `/v1`; null where it is none of the parts."""


class Stack:
    """The parts that `settings` describes. `config_file` is passed on, so that every part reads the same configuration.

    `definitions` is the module of the Dagster code location.
    """

    def __init__(self, settings: Settings, config_file: Path | None = None, *, definitions: str = DEFINITIONS) -> None:
        self._settings = settings
        self._data = Path(settings.embedded.data_dir)
        self._home = self._data / "dagster"
        self._run_dir = self._data / "run"
        # The S3 server chooses some of its ports by itself, before the others are listened on.
        reserve(settings.embedded.dagster_port, settings.embedded.code_server_port, settings.api.port)
        environment = {CONFIG_VARIABLE: str(config_file.resolve())} if config_file is not None else {}
        places = (self._run_dir, self._data / "logs")
        self._code, self._web, self._daemon = dagster_services(
            settings, self._home, *places, environment=environment, definitions=definitions
        )
        self._store = s3_service(settings.store, self._data / "s3", *places) if _is_ours(settings) else None
        self._api = api_service(settings, *places, environment=environment) if settings.embedded.serve_api else None
        self._dagster = DagsterClient(webserver_url(settings))

    @property
    def services(self) -> list[Service]:
        """The parts in the order in which they are started."""
        first = [service for service in (self._store, self._api) if service is not None]
        return [*first, self._code, self._web, self._daemon]

    def addresses(self) -> Addresses:
        """Return where the parts are, whether they run or not."""
        store = self._settings.store
        return Addresses(
            dagster=webserver_url(self._settings),
            object_store=store.endpoint_url or f"AWS S3 in {store.region}",
            inbox=f"s3://{store.bucket}/inbox/",
            logs=self._data / "logs",
            api=None if self._api is None else api_url(self._settings),
        )

    def running(self) -> dict[str, int | None]:
        """Return the pid of each part, None where it does not run."""
        processes = {service.name: service.process() for service in self.services}
        return {name: process.pid if process else None for name, process in processes.items()}

    def up(self, say: Say = print) -> Addresses:
        """Start every part that does not run, wait until all are ready, and return their addresses.

        Where the code server has died, the daemon is started again with it. Raises OperatorError that names the part
        and shows the end of its log, after stopping what this call started; what ran before goes on. Killed half-way it
        leaves parts that run and are known by their pid files: the next `up` or `down` goes on from there.
        """
        with self._locked():
            started: list[Service] = []
            try:
                self._start_all(started, say)
            except BaseException:
                for service in reversed(started):
                    say(f"stopping {service.name}")
                    service.stop()
                raise
            if not started:
                say("already running")
        return self.addresses()

    def down(self, say: Say = print) -> bool:
        """Stop every part that runs, and the runs in progress; return whether there was any.

        A run that is ended so is `canceled` in Dagster; its worker hands its unfinished work back. Files and databases
        stay. Killed half-way, the next `down` ends the rest.
        """
        with self._locked():
            found = self._stop(self._daemon, say)
            if self._web.process() is not None and self._code.process() is not None:
                try:
                    self._end_runs(say)
                except OperatorError as error:
                    say(f"runs in progress will be killed, since Dagster cannot be asked to end them: {error}")
            for service in (self._web, self._code, self._api, self._store):
                found = (self._stop(service, say) if service is not None else False) or found
            if not found:
                say("nothing was running")
        return found

    def _start_all(self, started: list[Service], say: Say) -> None:
        for service, ports in self._ports():
            if service.process() is None:
                service.stop()  # what a killed one left behind
                _check_ports(ports)
        if self._store is not None:
            self._start(self._store, started, say)
            self._store.wait_ready()
        if self._api is not None:
            self._start(self._api, started, say)
        prepare_home(self._settings, self._home)
        if self._code.process() is None:
            # Until the lost runs are cancelled nothing may launch others: they would be taken for lost as well.
            self._stop(self._daemon, say)
        self._start(self._code, started, say)
        self._code.wait_ready()
        self._start(self._web, started, say)
        self._web.wait_ready()
        if self._code in started and self._web not in started:
            self._dagster.reload_location(LOCATION)
        self._check_location()
        for name, model in self._settings.models.items():
            self._dagster.set_pool_limit(name, model.pool_limit)
        if self._code in started:
            self._cancel_lost_runs(say)
        self._start(self._daemon, started, say)
        self._daemon.wait_ready()
        if self._api is not None:
            # It starts beside Dagster's parts, which take longer.
            self._api.wait_ready()

    def _start(self, service: Service, started: list[Service], say: Say) -> None:
        if service.process() is None:
            say(f"starting {service.name}")
            started.append(service)
            service.start()

    def _stop(self, service: Service, say: Say) -> bool:
        if service.process() is not None:
            say(f"stopping {service.name}")
        return service.stop()

    def _ports(self) -> list[tuple[Service, dict[int, str]]]:
        """Return the ports that each part needs, and the setting that names each."""
        embedded = self._settings.embedded
        ports = [
            (self._code, {embedded.code_server_port: "embedded.code_server_port"}),
            (self._web, {embedded.dagster_port: "embedded.dagster_port"}),
        ]
        if self._api is not None:
            ports.append((self._api, {self._settings.api.port: "api.port"}))
        if self._store is not None:
            setting = "embedded.s3_port and store.endpoint_url"
            ports.append((self._store, {embedded.s3_port: setting, embedded.s3_port + TWIN_OFFSET: setting}))
        return ports

    def _check_location(self) -> None:
        deadline = time.monotonic() + self._web.ready_seconds
        errors = self._dagster.location_errors()
        while errors is None:
            if time.monotonic() > deadline:
                raise OperatorError(f"Dagster's code location is not loaded; see {self._code.log} and {self._web.log}")
            time.sleep(_POLL_SECONDS)
            errors = self._dagster.location_errors()
        if errors:
            raise OperatorError(
                f"Dagster cannot load the pipeline's code: {'; '.join(errors)}\n"
                f"{self._code.name}'s log {self._code.log} says:\n{last_lines(self._code.log)}"
            )

    def _cancel_lost_runs(self, say: Say) -> None:
        """Cancel the runs whose processes were killed with an earlier code server.

        Nobody else would: Dagster's own monitoring cannot see the processes of runs on one machine. Such a run would be
        `started` for ever, and keep its place in the pool of its model.
        """
        lost = self._dagster.runs_in_progress()
        if lost:
            say(f"cancelling {len(lost)} run(s) whose processes have gone")
            self._dagster.terminate(lost, lost=True)

    def _end_runs(self, say: Say) -> None:
        """Ask the runs in progress to end and wait for that; one that does not is killed with the code server."""
        deadline = time.monotonic() + self._settings.worker.grace_seconds + _RUN_END_MARGIN_SECONDS
        runs = self._dagster.runs_in_progress()
        if runs:
            say(f"ending {len(runs)} run(s) in progress")
            self._dagster.terminate(runs)
        while runs and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            runs = self._dagster.runs_in_progress()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._run_dir.mkdir(parents=True, exist_ok=True)
        with (self._run_dir / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise OperatorError("another `up` or `down` of this stack is at work; wait for it to end") from error
            yield


def _is_ours(settings: Settings) -> bool:
    """Return whether the object store is the embedded one: its address is on this machine."""
    address = urlsplit(settings.store.endpoint_url or "")
    if address.hostname not in _LOOPBACK_NAMES:
        return False
    if address.port != settings.embedded.s3_port:
        raise SettingsError(
            f"store.endpoint_url ({settings.store.endpoint_url}) must have the port of embedded.s3_port "
            f"({settings.embedded.s3_port}), or be the address of an object store elsewhere"
        )
    return True


def _check_ports(ports: dict[int, str]) -> None:
    for port, setting in ports.items():
        if not is_free(port):
            by = holder(port)
            raise OperatorError(
                f"port {port} on {LOOPBACK} is in use by {by or 'another program'}: "
                f"end that program, or set {setting} to another port"
            )
