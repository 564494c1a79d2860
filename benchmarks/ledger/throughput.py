"""Several worker processes on one ledger: chunks a second, and what a chunk costs of the processors.

python -m benchmarks.ledger.throughput URL WORKER AT_ONCE   is one of the workers
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import NamedTuple

import msgspec

from batch_pipeline.errors import LeaseLost
from batch_pipeline.ledger import Ledger
from benchmarks._processes import database_seconds
from tests.fakes.ledger_statements import sent_by
from tests.fakes.ledger_values import MODEL, result_of, submitted

CUSTOMERS = 4
HEAD = (
    "| database | workers | chunks at once | chunks a second | of one processor's | client ms a chunk "
    "| server ms a chunk | statements a chunk | lease p50 / p99 | commit p50 / p99 |\n" + "| --- " * 10 + "|"
)


class Load(NamedTuple):
    """How many workers lease how many chunks, of so many batches."""

    workers: int
    at_once: int
    chunks: int
    batches: int


class Measured(msgspec.Struct):
    """What one worker did, and how long each of its calls took."""

    lease_seconds: list[float] = []
    commit_seconds: list[float] = []
    chunks: int = 0
    statements: int = 0
    processor_seconds: float = 0.0


def measure(name: str, url: str, load: Load) -> str:
    """Fill a ledger, let the workers empty it, and return a line of the table."""
    ledger = Ledger.open(url)
    of_each = load.chunks // load.batches
    made = [
        submitted(ledger, f"b{number}", [MODEL] * of_each, f"customer-{number % CUSTOMERS}")
        for number in range(load.batches)
    ]
    command = [sys.executable, "-m", "benchmarks.ledger.throughput", url]
    processes = [
        subprocess.Popen(
            [*command, f"w{number}", str(load.at_once)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for number in range(load.workers)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    server_before = database_seconds()
    began = time.perf_counter()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    # The workers print only when they have ended, so they may be read one after the other.
    done = [msgspec.json.decode(process.communicate()[0], type=Measured) for process in processes]
    seconds = time.perf_counter() - began
    server_seconds = database_seconds() - server_before
    for batch in made:
        assert all(lane.committed == of_each for lane in ledger.batches.lanes(batch.batch_id))
    ledger.close()
    chunks = sum(one.chunks for one in done)
    client_seconds = sum(one.processor_seconds for one in done)
    return (
        f"| {name} | {load.workers} | {load.at_once} | {chunks / seconds:.0f} "
        f"| {chunks / (client_seconds + server_seconds):.0f} "
        f"| {1000 * client_seconds / chunks:.2f} | {1000 * server_seconds / chunks:.2f} "
        f"| {sum(one.statements for one in done) / chunks:.1f} "
        f"| {milliseconds([each for one in done for each in one.lease_seconds])} "
        f"| {milliseconds([each for one in done for each in one.commit_seconds])} |"
    )


def work(url: str, worker: str, at_once: int) -> None:
    """Be a worker: lease and commit until nothing is left."""
    ledger = Ledger.open(url)
    ledger.batches.recent(limit=1)  # connects and compiles, which is not to be measured
    measured = Measured()
    print("ready", flush=True)
    sys.stdin.readline()
    before = time.process_time()
    with sent_by(ledger) as sent:
        while True:
            began = time.perf_counter()
            leases = ledger.chunks.lease(worker, MODEL, at_once)
            leased = time.perf_counter()
            if not leases:
                break
            replies = ledger.chunks.commit_all({lease.ref: result_of(lease) for lease in leases})
            assert not any(isinstance(reply, LeaseLost) for reply in replies.values())
            measured.lease_seconds.append(leased - began)
            measured.commit_seconds.append(time.perf_counter() - leased)
            measured.chunks += len(leases)
    measured.statements = len(sent)
    measured.processor_seconds = time.process_time() - before
    sys.stdout.write(msgspec.json.encode(measured).decode())
    ledger.close()


def milliseconds(seconds: list[float]) -> str:
    """Return the median and the 99th percentile."""
    ordered = sorted(seconds)
    p50, p99 = (1000 * ordered[int(len(ordered) * share)] for share in (0.5, 0.99))
    return f"{p50:.1f} / {p99:.1f} ms"


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2], int(sys.argv[3]))
