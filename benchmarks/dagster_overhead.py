"""What Dagster costs a batch: runs, steps and events; what a look of each sensor costs; events that Postgres takes;
what the daemon itself costs.

    python -m benchmarks.dagster_overhead [--open 0 100 1000] [--idle-seconds 60] [--batches 10]

The code location in this process, with Dagster's tables and the ledger on a Postgres, an S3 server and the tests' fake
engine, all on loopback. Processor seconds of this process are those that a code server spends; the daemon's own part of
a tick (a row written, a call over gRPC) is not in them. The database's are told beside them.

At the end a real daemon and a real code server run on the same database: a while with nothing to do, then with batches
of ten requests that come all at once. What the daemon spent beyond its idle rate is what a batch costs it: its sensors'
answers, two runs put into the queue and launched, and their monitoring.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import dagster as dg
import psutil
import sqlalchemy as sa
from dagster._core.definitions.run_request import InstigatorType

from batch_pipeline import settings as configuration
from batch_pipeline.embedded import seaweedfs
from batch_pipeline.embedded.postgres import PostgresServer
from batch_pipeline.ledger.records import BatchStatus
from batch_pipeline.settings import CONFIG_VARIABLE
from benchmarks._processes import database_seconds
from tests.fakes import engine
from tests.fakes.code_location import CodeLocation
from tests.fakes.databases import new_database
from tests.fakes.ledger_values import submitted

MODEL = engine.MODEL
REPOSITORY = Path(__file__).resolve().parent.parent
SENSORS = ("drop_folder", "gpu_workers", "batch_progress", "batch_observations", "alarms")
BATCHES_A_DAY = 10_000
DAY_SECONDS = 86_400
EVENTS = 500
_WAIT_SECONDS = 600.0


def main() -> None:
    """Measure, and print three tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--open", type=int, nargs="+", default=[0, 100, 1000], help="batches in progress")
    parser.add_argument("--idle-seconds", type=float, default=60.0, help="for which the daemon is watched idle")
    parser.add_argument("--batches", type=int, default=10, help="that the daemon has to bring through")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, location(Path(folder)) as code:
        events = show_batch(code)
        show_daemon(code, Path(folder), options.idle_seconds, options.batches)
        show_ticks(code, options.open)
        show_events(code, events)


@contextmanager
def location(folder: Path) -> Iterator[CodeLocation]:
    """Open the code location on servers of its own."""
    with (
        seaweedfs.s3_server(folder / "s3") as store,
        PostgresServer(folder / "postgres") as url,
        engine.running() as fake,
    ):
        address = sa.make_url(url)
        new_database(url, "dagster")
        file = folder / "batch-pipeline.toml"
        file.write_text(
            f"""
[store]
bucket = "{store.bucket}"
endpoint_url = "{store.endpoint_url}"
access_key_id = "{store.access_key_id}"
secret_access_key = "{store.secret_access_key}"
[ledger]
url = "{url}"
[worker]
warm_seconds = 0.1
poll_seconds = 0.05
[models.{MODEL}]
source = "{REPOSITORY / "var" / "models" / MODEL}"
context_length = 2048
engine_url = "{fake.url}"
prices = {{ input_per_million = 0.10, output_per_million = 0.20 }}
""",
            encoding="utf-8",
        )
        os.environ[CONFIG_VARIABLE] = str(file)
        database = {
            "hostname": address.host,
            "port": address.port,
            "username": address.username,
            "password": address.password or "",
            "db_name": "dagster",
            "scheme": "postgresql+psycopg2",
        }
        storage = {"storage": {"postgres": {"postgres_db": database}}}
        with dg.instance_for_test(temp_dir=str(folder), overrides=storage) as instance:
            yield CodeLocation(configuration.load(file), instance)


def show_batch(code: CodeLocation) -> int:
    """Bring a batch through and print what it took of Dagster; return its events without those of its worker."""
    _drop(code, "questions")
    print("| run | steps | events of Dagster | log lines | processor |\n| --- | --- | --- | --- | --- |")
    of_batch = 0
    for sensor in ("drop_folder", "gpu_workers", "batch_progress"):
        [request] = code.tick(sensor)
        before = time.process_time()
        result = code.execute(request)
        spent = time.process_time() - before
        records = code.instance.get_records_for_run(result.run_id).records
        kinds = Counter(record.event_log_entry.dagster_event_type for record in records)
        steps, lines = kinds[dg.DagsterEventType.STEP_START], kinds.pop(None, 0)
        of_batch += 0 if sensor == "gpu_workers" else len(records)
        print(f"| {request.job_name} | {steps} | {kinds.total()} | {lines} | {spent:.2f} s |", flush=True)
    code.tick("batch_progress")
    return of_batch


def show_ticks(code: CodeLocation, counts: list[int]) -> None:
    """Print what a look of each sensor costs with so many batches in progress."""
    print(f"\n| open batches | {' | '.join(SENSORS)} | database |\n| --- |{' --- |' * (len(SENSORS) + 1)}")
    ledger = code.parts().ledger
    made = 0
    for count in counts:
        while made < count:
            submitted(ledger, f"open-{made}", [MODEL] * 4, f"customer-{made % 20}", window_seconds=DAY_SECONDS)
            made += 1
        for _ in range(4):
            # Until every status is shown: what follows is the look alone.
            code.tick("batch_progress")
        database_before, cells = database_seconds(), []
        for sensor in SENSORS:
            before = time.process_time()
            code.tick(sensor)
            cells.append(f"{1000 * (time.process_time() - before):.0f} ms")
        database_ms = 1000 * (database_seconds() - database_before)
        print(f"| {count} | {' | '.join(cells)} | {database_ms:.0f} ms |", flush=True)


def show_events(code: CodeLocation, events_of_batch: int) -> None:
    """Print how many events Postgres takes, and how many there are in a day."""
    key = dg.AssetKey("measured")
    database_before, before, began = database_seconds(), time.process_time(), time.perf_counter()
    for number in range(EVENTS):
        code.instance.report_runless_asset_event(dg.AssetMaterialization(key, partition=str(number % 10)))
    seconds = time.perf_counter() - began
    spent, of_database = time.process_time() - before, database_seconds() - database_before
    wanted = events_of_batch * BATCHES_A_DAY / DAY_SECONDS
    print("\n| events | |\n| --- | --- |")
    print(f"| written one after the other | {EVENTS / seconds:.0f} a second |")
    each_ms, database_ms = (1000 * used / EVENTS for used in (spent, of_database))
    print(f"| processor for each | {each_ms:.1f} ms, and {database_ms:.1f} ms of Postgres |")
    print(f"| of a batch's intake and merge | {events_of_batch} |")
    print(f"| at {BATCHES_A_DAY} batches a day | {wanted:.1f} a second |")


def show_daemon(code: CodeLocation, folder: Path, idle_seconds: float, batches: int) -> None:
    """Print what daemon, code server and database spend on nothing, and on so many batches beyond that."""
    with services(folder) as (daemon, server):

        def used() -> list[float]:
            # The code server and the process that has loaded the code; runs are the children of that.
            of_server = sum(sum(process.cpu_times()[:2]) for process in (server, *server.children()))
            return [sum(daemon.cpu_times()[:2]), of_server, database_seconds(), time.monotonic(), float(ticks(code))]

        _wait(lambda: ticks(code) > len(SENSORS), "every sensor has looked")
        before = used()
        time.sleep(idle_seconds)
        idle = [after - first for after, first in zip(used(), before, strict=True)]
        ledger, before = code.parts().ledger, used()
        done = len(ledger.batches.recent(limit=1000))
        for number in range(batches):
            _drop(code, f"dropped-{number}")
        _wait(
            lambda: sum(b.status is BatchStatus.COMPLETED for b in ledger.batches.recent(limit=1000)) == done + batches,
            "all batches are complete",
        )
        busy = [after - first for after, first in zip(used(), before, strict=True)]
    seconds = idle[3]
    print(f"\n| the daemon, {batches} batches in {busy[3]:.0f} s | idle: of a core | beyond that, for each batch |")
    print("| --- | --- | --- |")
    for who, name in enumerate(("daemon", "code server, without runs", "database, with what runs ask of it")):
        extra = busy[who] - idle[who] / seconds * busy[3]
        print(f"| {name} | {100 * idle[who] / seconds:.1f} % | {1000 * extra / batches:.0f} ms |", flush=True)
    print(
        f"\n{idle[4] / seconds:.2f} looks of sensors a second; {1000 * idle[0] / idle[4]:.0f} ms of the daemon for each"
    )


@contextmanager
def services(folder: Path) -> Iterator[tuple[psutil.Process, psutil.Process]]:
    """Start a daemon and a code server on the instance in this folder; they are ended at the end."""
    socket, workspace = folder / "code.sock", folder / "workspace.yaml"
    location = {"grpc_server": {"socket": str(socket), "location_name": "batch_pipeline"}}
    workspace.write_text(json.dumps({"load_from": [location]}), encoding="utf-8")
    commands = (
        ["dagster-daemon", "run", "-w", str(workspace)],
        ["dagster", "code-server", "start", "-m", "batch_pipeline.definitions", "-s", str(socket)],
    )
    environment = {**os.environ, "DAGSTER_HOME": str(folder)}
    with ExitStack() as stops, (folder / "services.log").open("wb") as log:
        started = []
        for program, *words in reversed(commands):
            command = [sys.executable, f"{sysconfig.get_path('scripts')}/{program}", *words]
            process = subprocess.Popen(command, env=environment, cwd=REPOSITORY, stdout=log, stderr=log)
            stops.callback(process.wait)
            stops.callback(process.terminate)
            started.append(psutil.Process(process.pid))
            _wait(socket.exists, "the code server listens")
        yield started[1], started[0]


def ticks(code: CodeLocation) -> int:
    """Return how many looks of sensors Dagster's database has."""
    instance = code.instance
    states = instance.all_instigator_state(instigator_type=InstigatorType.SENSOR)
    return sum(len(instance.get_ticks(state.instigator_origin_id, state.selector_id)) for state in states)


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"not true after {_WAIT_SECONDS:.0f} s: {what}")
        time.sleep(0.25)


def _drop(code: CodeLocation, name: str) -> None:
    code.parts().store.put(f"inbox/acme/{name}.jsonl", b"".join(_line(number) for number in range(10)))


def _line(number: int) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"question {number}"}], "max_tokens": 8}
    request = {"custom_id": f"q{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(request).encode() + b"\n"


if __name__ == "__main__":
    main()
