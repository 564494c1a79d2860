"""How long a merge takes, how much of the processor and of memory, against the store's own copy of the same bytes.

    python -m benchmarks.merge [--chunks 200] [--megabytes 2] [--requests 1000]

Starts a SeaweedFS on loopback with data in a temporary folder, makes a batch of committed chunks, once with contiguous
index ranges and once interleaved, and merges each in a process of its own. `assemble` writes the files; `merge` also
reads them back, proves them, and writes manifest and status. Seconds of this machine's processor are those of the
merging process alone, without the store's.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from batch_pipeline import settings as configuration
from batch_pipeline.embedded import seaweedfs
from batch_pipeline.ledger import Ledger
from batch_pipeline.results.assemble import assemble
from batch_pipeline.results.facts import chunks_of
from batch_pipeline.results.merge import merge
from batch_pipeline.results.verify import verify
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore, keys
from tests.fakes import answered
from tests.fakes.memory import peak_bytes

MEGABYTE = 1_000_000


class Measured(msgspec.Struct):
    """What one process used."""

    seconds: float
    processor_seconds: float
    peak_megabytes: float


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=20)
    parser.add_argument("--megabytes", type=float, default=2.0, help="of results in each chunk")
    parser.add_argument("--requests", type=int, default=1000, help="in each chunk")
    parser.add_argument("--work", nargs=3, metavar=("STEP", "SETTINGS", "BATCH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*options.work)
        return
    with tempfile.TemporaryDirectory() as folder, seaweedfs.s3_server(Path(folder) / "s3") as reachable:
        for interleaved in (False, True):
            measure(Path(folder), reachable, interleaved, options)


def measure(folder: Path, reachable: configuration.Store, interleaved: bool, options: argparse.Namespace) -> None:
    """Make one batch, merge it, and print what that took."""
    name = "interleaved" if interleaved else "contiguous"
    settings = Settings(
        store=reachable,
        ledger=configuration.Ledger(url=f"sqlite:///{folder}/{name}.sqlite"),
        intake=configuration.Intake(scratch_dir=f"{folder}/scratch"),
    )
    file = folder / f"{name}.json"
    file.write_bytes(msgspec.json.encode(settings))
    ledger, store = Ledger.from_settings(settings), ObjectStore.open(settings.store)
    total = options.chunks * options.requests
    chunks = [
        list(range(number, total, options.chunks))
        if interleaved
        else list(range(number * options.requests, (number + 1) * options.requests))
        for number in range(options.chunks)
    ]
    batch_id = prepare(ledger, store, chunks, int(options.megabytes * MEGABYTE / options.requests))
    rows = [("assemble", child("assemble", file, batch_id)), ("merge", child("merge", file, batch_id))]
    rows.append(("verify", child("verify", file, batch_id)))
    output = store.head(keys.final(batch_id, "output.jsonl"))
    assert output is not None
    started = time.monotonic()
    store.copy(output, f"{keys.batch(batch_id)}copy")
    copy_seconds = time.monotonic() - started
    print(f"\n{name}: {options.chunks} chunks, {output.size / MEGABYTE:.0f} MB, {total} requests")
    print(f"{'step':<12}{'seconds':>10}{'processor s':>14}{'peak MB':>10}{'times the copy':>16}")
    print(f"{'store copy':<12}{copy_seconds:>10.2f}{'':>14}{'':>10}{1:>16.1f}")
    for step, used in rows:
        print(
            f"{step:<12}{used.seconds:>10.2f}{used.processor_seconds:>14.2f}{used.peak_megabytes:>10.0f}"
            f"{used.seconds / copy_seconds:>16.1f}"
        )


def prepare(ledger: Ledger, store: ObjectStore, chunks: Sequence[Sequence[int]], line_bytes: int) -> str:
    """Make a batch whose every chunk is committed with answers of about `line_bytes`."""
    count = sum(len(chunk) for chunk in chunks)
    batch = answered.create(ledger, store, [answered.input_line(index) for index in range(count)])
    answered.take_in(ledger, store, batch.batch_id, chunks)
    short = len(answered.answer(batch.batch_id, 0).line)
    for number, lease in answered.lease_all(ledger).items():
        finished = [answered.answer(batch.batch_id, index, max(line_bytes - short, 0)) for index in chunks[number]]
        answered.commit(ledger, store, lease, finished)
    return batch.batch_id


def child(step: str, file: Path, batch_id: str) -> Measured:
    """Do one step in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.merge", "--work", step, str(file), batch_id]
    return msgspec.json.decode(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout, type=Measured)


def work(step: str, file: str, batch_id: str) -> None:
    """The other process: do one step, and print what it used."""
    settings = msgspec.json.decode(Path(file).read_bytes(), type=Settings)
    ledger, store = Ledger.from_settings(settings), ObjectStore.open(settings.store)
    prefix = f"{keys.batch(batch_id)}benchmark/"

    def assemble_only() -> None:
        assemble(
            ledger.batches.get(batch_id),
            chunks_of(batch_id, ledger),
            store=store,
            scratch=Path(settings.intake.scratch_dir),
            output_key=f"{prefix}output.jsonl",
            error_key=f"{prefix}errors.jsonl",
        )

    steps: dict[str, Callable[[], object]] = {
        "assemble": assemble_only,
        "merge": lambda: merge(batch_id, ledger=ledger, store=store, settings=settings, run_id=None),
        "verify": lambda: verify(batch_id, ledger=ledger, store=store),
    }
    before, started = processor_seconds(), time.monotonic()
    steps[step]()
    used = Measured(
        seconds=time.monotonic() - started,
        processor_seconds=processor_seconds() - before,
        peak_megabytes=peak_bytes() / MEGABYTE,
    )
    sys.stdout.buffer.write(msgspec.json.encode(used))


def processor_seconds() -> float:
    """Processor time of this process so far, in user and in system mode."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
