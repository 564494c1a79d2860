"""How many chunks a second the ledger leases and commits, with several worker processes on one database.

    python -m benchmarks.ledger [--workers 1 8] [--chunks 4000] [--batches 16] [--at-once 1 4]

Starts a Postgres on loopback (fsync on) and makes a SQLite file, both with data in a temporary folder. Each worker is a
process that leases, commits each lease, and begins again, until nothing is left; it does nothing else, so that the
ledger is all that is measured. The workers and the database share this machine's processors; processor seconds are of
both together, and say more than seconds where the machine is busy with other things as well.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import psutil

from batch_pipeline.embedded.postgres import PostgresServer
from batch_pipeline.ledger import Ledger
from tests.fakes.ledger_values import MODEL, result_of, submitted

CUSTOMERS = 4


class Measured(msgspec.Struct):
    """What one worker did, and how long each of its calls took."""

    lease_seconds: list[float]
    commit_seconds: list[float]
    processor_seconds: float = 0.0


class Load(msgspec.Struct, frozen=True):
    """How many workers lease how many chunks, of so many batches."""

    workers: int
    at_once: int
    chunks: int
    batches: int


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--chunks", type=int, default=4000, help="in all")
    parser.add_argument("--batches", type=int, default=16, help="that the chunks are spread over")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4], help="chunks asked for with each lease")
    parser.add_argument("--work", nargs=3, metavar=("URL", "WORKER", "AT_ONCE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        url, worker, at_once = options.work
        work(url, worker, int(at_once))
        return
    print(
        "| database | workers | chunks a lease | chunks a second | chunks a processor second "
        "| lease p50 / p99 | commit p50 / p99 |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for workers in options.workers:
        for at_once in options.at_once:
            load = Load(workers=workers, at_once=at_once, chunks=options.chunks, batches=options.batches)
            with tempfile.TemporaryDirectory() as folder:
                print(measure("SQLite", f"sqlite:///{folder}/ledger.sqlite", load), flush=True)
                with PostgresServer(Path(folder) / "postgres") as url:
                    print(measure("Postgres", url, load), flush=True)


def measure(name: str, url: str, load: Load) -> str:
    """Fill a ledger, let the workers empty it, and return a line of the table."""
    ledger = Ledger.open(url)
    of_each = load.chunks // load.batches
    made = [
        submitted(ledger, f"b{number}", [MODEL] * of_each, f"customer-{number % CUSTOMERS}")
        for number in range(load.batches)
    ]
    command = [sys.executable, "-m", "benchmarks.ledger", "--work", url]
    processes = [
        subprocess.Popen(
            [*command, f"w{number}", str(load.at_once)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for number in range(load.workers)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    server_before = _server_seconds()
    began = time.perf_counter()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    # The workers print only when they have ended, so they may be read one after the other.
    done = [msgspec.json.decode(process.communicate()[0], type=Measured) for process in processes]
    seconds = time.perf_counter() - began
    processor_seconds = sum(one.processor_seconds for one in done) + _server_seconds() - server_before
    for batch in made:
        assert all(lane.committed == of_each for lane in ledger.batches.lanes(batch.batch_id))
    ledger.close()
    commits = [each for one in done for each in one.commit_seconds]
    leases = [each for one in done for each in one.lease_seconds]
    return (
        f"| {name} | {load.workers} | {load.at_once} "
        f"| {len(commits) / seconds:.0f} | {len(commits) / processor_seconds:.0f} "
        f"| {_milliseconds(leases)} | {_milliseconds(commits)} |"
    )


def work(url: str, worker: str, at_once: int) -> None:
    """Be a worker: lease and commit until nothing is left."""
    ledger = Ledger.open(url)
    ledger.batches.recent(limit=1)  # connects and compiles, which is not to be measured
    measured = Measured(lease_seconds=[], commit_seconds=[])
    print("ready", flush=True)
    sys.stdin.readline()
    before = time.process_time()
    while True:
        began = time.perf_counter()
        leases = ledger.chunks.lease(worker, MODEL, at_once)
        if not leases:
            break
        measured.lease_seconds.append(time.perf_counter() - began)
        for lease in leases:
            began = time.perf_counter()
            ledger.chunks.commit(lease.ref, result_of(lease))
            measured.commit_seconds.append(time.perf_counter() - began)
    measured.processor_seconds = time.process_time() - before
    sys.stdout.write(msgspec.json.encode(measured).decode())
    ledger.close()


def _server_seconds() -> float:
    """Return the processor seconds of the database server so far: of its processes, and of those that have ended."""
    servers = [process for process in psutil.Process().children(recursive=True) if process.name() == "postgres"]
    return sum(sum(process.cpu_times()[:4]) for process in servers)


def _milliseconds(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    p50, p99 = (1000 * ordered[int(len(ordered) * share)] for share in (0.5, 0.99))
    return f"{p50:.1f} / {p99:.1f} ms"


if __name__ == "__main__":
    main()
