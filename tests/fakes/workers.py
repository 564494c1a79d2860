"""Workers for tests: settings with short times, a worker in a thread or in a process of its own, and what it committed.

As a program (`start_process`) it is a worker that can be killed and measured.
"""

from __future__ import annotations

import itertools
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import sqlalchemy as sa

from batch_pipeline import settings as configuration
from batch_pipeline.engine import AttachedEngine, Engine, VllmServer
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import ChunkState
from batch_pipeline.models import Model
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore
from batch_pipeline.wire import chunk_files
from batch_pipeline.worker import Worker, WorkerReport
from tests.fakes import engine as fake_engine
from tests.fakes.databases import open_transactions
from tests.fakes.memory import peak_bytes
from tests.fakes.waiting import wait_until

MODEL = fake_engine.MODEL
REPOSITORY = Path(__file__).resolve().parents[2]
QUICK: dict[str, Any] = {
    "lease_seconds": 20.0,
    "heartbeat_seconds": 0.1,
    "checkpoint_seconds": 0.1,
    "poll_seconds": 0.05,
    "warm_seconds": 0.3,
    "grace_seconds": 5.0,
}


class Life(msgspec.Struct, frozen=True):
    """What a worker's process tells at its end."""

    report: WorkerReport
    cpu_seconds: float
    max_rss_bytes: int


def quick(settings: Settings, *, model: dict[str, Any] | None = None, **worker: Any) -> Settings:
    """Return the settings with short times, and with these fields of `worker` and of the model changed."""
    changed = msgspec.structs.replace(settings.models[MODEL], **{"max_in_flight": 16, **(model or {})})
    return msgspec.structs.replace(
        settings,
        worker=msgspec.structs.replace(settings.worker, **{**QUICK, **worker}),
        models={MODEL: changed},
    )


def child_engine(log: Path, *options: str, model: Model | None = None, at_first: Sequence[str] = ()) -> VllmServer:
    """Return an engine that starts a fake one as its child process; `at_first` are options of the first start alone."""
    catalogued = model or Model(source="none", context_length=fake_engine.CONTEXT, engine_start_seconds=60.0)
    more = itertools.chain([at_first], itertools.repeat(()))
    return VllmServer(MODEL, catalogued, log, command=lambda port: fake_engine.command(port, *options, *next(more)))


def attached(url: str) -> AttachedEngine:
    """Return an engine that is a fake one which runs already."""
    return AttachedEngine(MODEL, url, 60.0)


def make_worker(ledger: Ledger, store: ObjectStore, settings: Settings, engine: Engine, **options: Any) -> Worker:
    """Return a worker of the fake model."""
    return Worker(ledger=ledger, store=store, settings=settings, model=MODEL, engine=engine, **options)


def lines_of(ledger: Ledger, store: ObjectStore, batch_id: str) -> dict[int, Any]:
    """Return the result line of each request in committed chunks, by index. Fails where one comes twice."""
    found: dict[int, Any] = {}
    for chunk in ledger.chunks.of(batch_id):
        if chunk.state is not ChunkState.COMMITTED or chunk.result is None:
            continue
        data = store.get(chunk.result.result_key)
        table = chunk_files.read_lines_table(store.get(chunk.result.lines_key))
        lines = data.splitlines()
        assert len(lines) == len(table.index) == chunk.requests
        for index, is_error, length, line in zip(table.index, table.is_error, table.length, lines, strict=True):
            assert length == len(line) + 1
            assert int(index) not in found
            found[int(index)] = msgspec.json.decode(line)
            assert (found[int(index)]["error"] is not None or found[int(index)]["response"]["status_code"] >= 400) == (
                is_error
            )
    return found


@contextmanager
def in_thread(worker: Worker) -> Iterator[list[WorkerReport | BaseException]]:
    """Run a worker beside the test; the list gets its report, or what it raised. Joined at the end."""
    ends: list[WorkerReport | BaseException] = []

    def live() -> None:
        try:
            ends.append(worker.run())
        except BaseException as error:  # noqa: BLE001 - handed to the test
            ends.append(error)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        yield ends
    except BaseException:
        # The test has failed already: do not wait for work that may never end.
        while thread.is_alive():
            worker._ledger.workers.ask_to_leave(worker.worker_id)
            thread.join(timeout=0.5)
        raise
    finally:
        thread.join()


def start_process(config: Path, ledger_url: str, engine: str, **overrides: Any) -> subprocess.Popen[bytes]:
    """Start a worker as a process; `engine`: a URL, `vllm` or `child:JOURNAL`. It prints its Life."""
    arguments = [str(config), ledger_url, engine, msgspec.json.encode(overrides).decode()]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.workers", *arguments], stdout=subprocess.PIPE, cwd=REPOSITORY
    )


def put_to_sleep(process: subprocess.Popen[bytes], ledger_url: str) -> None:
    """SIGSTOP a worker between two of its transactions: asleep within one, it would keep all others waiting for it."""

    def sleeps_outside() -> bool:
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "the worker sleeps")
        if _nobody_writes(ledger_url):
            return True
        process.send_signal(signal.SIGCONT)
        return False

    wait_until(sleeps_outside, "the worker sleeps, and in no transaction")


def _nobody_writes(ledger_url: str) -> bool:
    """Whether nobody has a transaction open that others would have to wait for."""
    url = sa.make_url(ledger_url)
    if url.get_backend_name() == "sqlite":
        connection = sqlite3.connect(str(url.database), timeout=0.0, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        finally:
            connection.close()
        return True
    return open_transactions(url) == 0


def main() -> None:
    """Run one worker as `start_process` says."""
    file, ledger_url, engine_word = sys.argv[1:4]
    overrides = msgspec.json.decode(sys.argv[4].encode())
    settings = quick(configuration.load(Path(file), environment={}), **overrides)
    engine: Engine = attached(engine_word)
    if engine_word.startswith("child:"):
        journal = engine_word.removeprefix("child:")
        engine = child_engine(Path(journal).with_suffix(".log"), "--journal", journal, "--delay", "0.05")
    if engine_word == "vllm":
        engine = VllmServer(MODEL, settings.models[MODEL], Path(file).with_suffix(".log"))
    ledger = Ledger.open(ledger_url, lease_seconds=settings.worker.lease_seconds)
    report = make_worker(ledger, ObjectStore.open(settings.store), settings, engine).run()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    life = Life(report, usage.ru_utime + usage.ru_stime, peak_bytes())
    print(msgspec.json.encode(life).decode(), flush=True)


if __name__ == "__main__":
    main()
