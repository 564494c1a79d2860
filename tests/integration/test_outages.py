"""Real outages: the S3 server and Postgres are killed under a worker and under a merge, and started again.

On the port and data that they had, after some seconds: a minute goes the same way, with longer pauses between tries.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy.exc import OperationalError

from batch_pipeline import settings as configuration
from batch_pipeline.embedded import seaweedfs
from batch_pipeline.embedded.ports import LOOPBACK, free_ports
from batch_pipeline.embedded.postgres import PostgresServer
from batch_pipeline.embedded.processes import Service, descendants, identify, send
from batch_pipeline.errors import StoreError
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import BatchStatus, ChunkState
from batch_pipeline.results.merge import merge
from batch_pipeline.results.verify import verify
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore
from batch_pipeline.wire import chunk_files
from batch_pipeline.worker import WorkerReport
from tests.chaos.parts import kill
from tests.fakes import answered
from tests.fakes import engine as fake_engine
from tests.fakes.batches import chat_request, make_batch
from tests.fakes.engine import RunningFake
from tests.fakes.waiting import wait_until
from tests.fakes.workers import attached, in_thread, lines_of, make_worker, quick

REQUESTS = 200
CHUNKS = [[0, 2, 4], [1, 3, 5], [6, 7]]


class Servers:
    """An S3 server and a Postgres of this test's own, each with a way to take it away and to bring it back."""

    def __init__(self, folder: Path) -> None:
        self.reachable = configuration.Store(
            endpoint_url=f"http://{LOOPBACK}:{free_ports(1)[0]}", access_key_id="key", secret_access_key="secret"
        )
        self._s3: Service = seaweedfs.s3_service(self.reachable, folder / "s3", folder, folder)
        self._data = folder / "postgres" / "data"
        self.postgres = PostgresServer(folder / "postgres")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Both, from ready to ended."""
        try:
            self.bring_back_store()
            self.postgres.start()
            yield
        finally:
            self._s3.stop()
            self.postgres.stop()

    def kill_store(self) -> None:
        """SIGKILL."""
        kill(self._s3.family())

    def freeze_store(self) -> None:
        """SIGSTOP: connections are taken by the kernel, and nobody answers."""
        for process in self._s3.family():
            send(process, signal.SIGSTOP)

    def bring_back_store(self) -> None:
        """Start it where it was killed, wake it where it was frozen; returns when it serves."""
        for process in self._s3.family():
            send(process, signal.SIGCONT)
        self._s3.start()
        self._s3.wait_ready()

    def kill_ledger(self) -> None:
        """SIGKILL to all of its processes."""
        postmaster = identify(int((self._data / "postmaster.pid").read_text(encoding="utf-8").split()[0]))
        assert postmaster is not None
        kill([postmaster, *descendants(postmaster)])


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    both = Servers(tmp_path_factory.mktemp("outages"))
    with both.running():
        yield both


@pytest.fixture
def bucket(servers: Servers) -> ObjectStore:
    return ObjectStore.open(servers.reachable)


def marked(ledger: Ledger, batch_id: str) -> tuple[int, int]:
    """How many requests the ledger says to be saved, and how many chunks to be committed."""
    chunks = ledger.chunks.of(batch_id)
    saved = sum(part.requests for chunk in chunks for part in chunk.parts)
    return saved, sum(chunk.state is ChunkState.COMMITTED for chunk in chunks)


def has_answered(fake: RunningFake, least: int) -> bool:
    return fake.stats().answered >= least


def assert_whole(ledger: Ledger, store: ObjectStore, batch_id: str) -> None:
    """Every request has one result, and all that the ledger names is in the store."""
    assert sorted(lines_of(ledger, store, batch_id)) == list(range(REQUESTS))
    for chunk in ledger.chunks.of(batch_id):
        assert [len(chunk_files.read_part(store.get(part.key))) for part in chunk.parts] == [
            part.requests for part in chunk.parts
        ]


@pytest.mark.parametrize("outage", ["killed", "frozen"])
def test_11_a_worker_outlasts_the_store_and_marks_nothing_done_meanwhile(
    servers: Servers, bucket: ObjectStore, sqlite_url: str, settings: Settings, outage: str
) -> None:
    ledger = Ledger.open(sqlite_url)
    batch = make_batch(ledger, bucket, [[chat_request(index, f"say {index}") for index in range(REQUESTS)]])
    with fake_engine.running() as fake:
        # Most of the work is left when the store goes away, however late this test comes to that.
        fake.control(hold_after=50)
        with in_thread(make_worker(ledger, bucket, quick(settings), attached(fake.url))) as ends:
            wait_until(lambda: marked(ledger, batch.batch_id)[0] > 0, "something is saved")
            {"killed": servers.kill_store, "frozen": servers.freeze_store}[outage]()
            answers = fake.stats().answered
            fake.control(delay_seconds=0.1)
            wait_until(partial(has_answered, fake, min(REQUESTS, answers + 100)), "the engine goes on")
            # What was answered before the outage may have been on its way into a checkpoint when it began.
            saved, committed = marked(ledger, batch.batch_id)
            assert (saved <= answers, committed) == (True, 0)
            servers.bring_back_store()
        assert fake.stats().calls == REQUESTS
    assert isinstance(ends[0], WorkerReport), ends
    assert_whole(ledger, bucket, batch.batch_id)
    ledger.close()


def test_11_a_worker_outlasts_postgres_and_runs_nothing_twice(
    servers: Servers, bucket: ObjectStore, settings: Settings
) -> None:
    ledger = Ledger.open(servers.postgres.url)
    batch = make_batch(ledger, bucket, [[chat_request(index, f"say {index}") for index in range(REQUESTS)]])
    with fake_engine.running() as fake:
        fake.control(hold_after=50)
        with in_thread(make_worker(ledger, bucket, quick(settings), attached(fake.url))) as ends:
            wait_until(lambda: marked(ledger, batch.batch_id)[0] > 0, "something is saved")
            servers.kill_ledger()
            answers = fake.stats().answered
            fake.control(delay_seconds=0.1)
            wait_until(partial(has_answered, fake, min(REQUESTS, answers + 100)), "the engine goes on")
            servers.postgres.start()
        calls = fake.stats().calls
    assert isinstance(ends[0], WorkerReport), ends
    assert calls == REQUESTS
    afresh = Ledger.open(servers.postgres.url)
    assert_whole(afresh, bucket, batch.batch_id)
    assert afresh.batches.get(batch.batch_id).status is BatchStatus.FINALIZING
    afresh.close()
    ledger.close()


class Interposed:
    """A store that does something before call number `at_call` (from 1) of one of its methods."""

    def __init__(self, store: ObjectStore, method: str, at_call: int, action: Callable[[], None]) -> None:
        self._store = store
        self._method = method
        self._left = at_call
        self._lock = threading.Lock()
        self._action = action

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            # A merge reads in several threads.
            with self._lock:
                self._left -= 1
                is_the_one = self._left == 0
            if is_the_one:
                self._action()
        return getattr(self._store, name)


def interposed(store: ObjectStore, method: str, at_call: int, action: Callable[[], None]) -> ObjectStore:
    """Return the store with an action before one call of a method."""
    return cast("ObjectStore", Interposed(store, method, at_call, action))


FIRST_READ, FIRST_FILE, MANIFEST = ("get", 1), ("put", 1), ("put", 3)


@pytest.mark.parametrize("moment", [FIRST_READ, FIRST_FILE, MANIFEST], ids=["first read", "first file", "manifest"])
def test_11_a_merge_that_lost_its_store_ends_nothing_and_is_repeated(
    servers: Servers, bucket: ObjectStore, sqlite_url: str, settings: Settings, moment: tuple[str, int]
) -> None:
    ledger = Ledger.open(sqlite_url)
    batch, leases = answered.in_progress(ledger, bucket, CHUNKS)
    answered.commit_all(ledger, bucket, leases, CHUNKS, refused=[3])
    parts: dict[str, Any] = {"ledger": ledger, "settings": settings, "run_id": "run"}
    with pytest.raises(StoreError, match="cannot be reached"):
        merge(batch.batch_id, store=interposed(bucket, *moment, servers.kill_store), **parts)
    left = ledger.batches.get(batch.batch_id)
    assert (left.status, left.output_key) == (BatchStatus.FINALIZING, None)
    servers.bring_back_store()
    merge(batch.batch_id, store=bucket, **parts)
    assert ledger.batches.get(batch.batch_id).status is BatchStatus.COMPLETED
    assert verify(batch.batch_id, ledger=ledger, store=bucket).problems == []
    ledger.close()


def test_11_a_merge_waits_for_a_store_that_hangs(
    servers: Servers, bucket: ObjectStore, sqlite_url: str, settings: Settings
) -> None:
    ledger = Ledger.open(sqlite_url)
    batch, leases = answered.in_progress(ledger, bucket, CHUNKS)
    answered.commit_all(ledger, bucket, leases, CHUNKS)

    waking = threading.Timer(2.0, servers.bring_back_store)

    def hang() -> None:
        servers.freeze_store()
        waking.start()

    merge(batch.batch_id, ledger=ledger, store=interposed(bucket, *FIRST_FILE, hang), settings=settings, run_id="run")
    # Else it might still start what a later test has taken away.
    waking.join()
    assert verify(batch.batch_id, ledger=ledger, store=bucket).problems == []
    ledger.close()


@pytest.mark.parametrize("moment", [FIRST_READ, MANIFEST], ids=["first read", "manifest"])
def test_11_a_merge_that_lost_postgres_ends_nothing_and_is_repeated(
    servers: Servers, bucket: ObjectStore, settings: Settings, moment: tuple[str, int]
) -> None:
    """Killed before the manifest, all files are written and only the ledger is not told."""
    ledger = Ledger.open(servers.postgres.url)
    batch, leases = answered.in_progress(ledger, bucket, CHUNKS)
    answered.commit_all(ledger, bucket, leases, CHUNKS, refused=[3])
    with pytest.raises(OperationalError):
        merge(
            batch.batch_id,
            ledger=ledger,
            store=interposed(bucket, *moment, servers.kill_ledger),
            settings=settings,
            run_id="run",
        )
    servers.postgres.start()
    left = ledger.batches.get(batch.batch_id)
    assert (left.status, left.output_key) == (BatchStatus.FINALIZING, None)
    merge(batch.batch_id, ledger=ledger, store=bucket, settings=settings, run_id="run")
    assert ledger.batches.get(batch.batch_id).status is BatchStatus.COMPLETED
    assert verify(batch.batch_id, ledger=ledger, store=bucket).problems == []
    ledger.close()
