"""How long intake takes and how much memory, against the raw parse of the same file by the fastest exact parser here.

    python -m benchmarks.intake [--requests 200000] [--model FOLDER]

Starts a SeaweedFS on loopback with data in a temporary folder, puts a file of requests there (about 640 bytes each;
half of them share one of many system prompts), and measures in processes of their own: the raw parse (each line
decoded as UTF-8 and by msgspec with the body left raw, nothing checked, nothing kept), `validate`, and
`write_chunks`. Processor seconds include the processes that intake starts, but not the object store, which shares the
cores. Peak memory is given for the measuring process and, beside it, for the largest of those that it started: the
system keeps no sum, and there is one of them a core.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from batch_pipeline import ids
from batch_pipeline import settings as configuration
from batch_pipeline.embedded import seaweedfs
from batch_pipeline.intake import ops
from batch_pipeline.ledger import Ledger
from batch_pipeline.models import Model
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore, keys
from batch_pipeline.wire.lines import RequestLine
from tests.fakes.intake_files import CHAT, created
from tests.fakes.small_model import CONTEXT_LENGTH, NAME, write_model

WORDS = (
    "time",
    "person",
    "year",
    "way",
    "thing",
    "man",
    "world",
    "hand",
    "child",
    "eye",
    "woman",
    "place",
    "work",
    "week",
)
SHARING = 40
"""Requests of the file for each system prompt."""
STEPS = ("raw parse", "validate", "write_chunks")


class Measured(msgspec.Struct):
    """What one process used, with those that it started. `result` says what it did."""

    seconds: float
    processor_seconds: float
    own_megabytes: float
    child_megabytes: float
    """Peaks of the process itself, and of the largest that it started."""
    result: str


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--model", type=Path, help="a folder with tokenizer.json; a small one is made by default")
    parser.add_argument("--work", nargs=3, metavar=("STEP", "SETTINGS", "BATCH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*options.work)
        return
    with tempfile.TemporaryDirectory() as name, seaweedfs.s3_server(Path(name) / "s3") as reachable:
        measure(Path(name), reachable, options)


def measure(folder: Path, reachable: configuration.Store, options: argparse.Namespace) -> None:
    """Make the file and a batch of it, and measure each step."""
    source = options.model or write_model(folder / "model")
    settings = Settings(
        store=reachable,
        ledger=configuration.Ledger(url=f"sqlite:///{folder}/ledger.sqlite"),
        intake=configuration.Intake(scratch_dir=f"{folder}/scratch"),
        models={NAME: Model(source=str(source.resolve()), context_length=CONTEXT_LENGTH)},
    )
    file = folder / "settings.json"
    file.write_bytes(msgspec.json.encode(settings))
    data = folder / "input.jsonl"
    with data.open("wb") as out:
        out.writelines(requests(options.requests))
    ledger, store = Ledger.from_settings(settings), ObjectStore.open(settings.store)
    batch_id = ids.new_batch_id()
    store.upload(data, keys.input_file(batch_id))
    created(ledger, store, batch_id)
    ledger.close()
    print(f"{options.requests} requests, {data.stat().st_size / 1e6:.0f} MB")
    print(f"{'step':14} {'seconds':>8} {'ratio':>6} {'cpu s':>8} {'ratio':>6} {'own MB':>7} {'child MB':>8}")
    first: Measured | None = None
    for step in STEPS:
        command = [sys.executable, "-m", "benchmarks.intake", "--work", step, str(file), batch_id]
        measured = msgspec.json.decode(subprocess.check_output(command), type=Measured)
        first = first or measured
        ratio, of_processor = (
            measured.seconds / first.seconds,
            measured.processor_seconds / first.processor_seconds,
        )
        print(
            f"{step:14} {measured.seconds:8.2f} {ratio:6.1f} {measured.processor_seconds:8.2f} {of_processor:6.1f} "
            f"{measured.own_megabytes:7.0f} {measured.child_megabytes:8.0f}  {measured.result}"
        )


def requests(count: int) -> Iterator[bytes]:
    """Yield the lines of the file: the same for the same count."""
    chance = random.Random(7)
    prompts = [text(chance, 60) for _ in range(max(1, count // SHARING))]
    for number in range(count):
        if chance.random() < 0.5:
            messages = [
                {"role": "system", "content": chance.choice(prompts)},
                {"role": "user", "content": text(chance, chance.randint(10, 30))},
            ]
        else:
            messages = [{"role": "user", "content": text(chance, chance.randint(60, 100))}]
        body = {"model": NAME, "messages": messages, "max_tokens": chance.choice([32, 64, 128]), "temperature": 0.2}
        request = {"custom_id": f"request-{number:08d}", "method": "POST", "url": CHAT, "body": body}
        yield json.dumps(request).encode() + b"\n"


def text(chance: random.Random, words: int) -> str:
    """Words that stand for a prompt."""
    return " ".join(chance.choices(WORDS, k=words))


def work(step: str, settings_file: str, batch_id: str) -> None:
    """Do one step and print what it used as JSON."""
    settings = msgspec.json.decode(Path(settings_file).read_bytes(), type=Settings)
    steps: dict[str, Callable[[Settings, str], str]] = {
        "raw parse": raw_parse,
        "validate": validate,
        "write_chunks": write_chunks,
    }
    # What the imports took before is no part of a step.
    started, idle = time.perf_counter(), time.process_time()
    result = steps[step](settings, batch_id)
    seconds = time.perf_counter() - started
    own, started_ones = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = time.process_time() - idle + started_ones.ru_utime + started_ones.ru_stime
    peaks = (own.ru_maxrss / 1024, started_ones.ru_maxrss / 1024)
    print(msgspec.json.encode(Measured(seconds, processor, *peaks, result)).decode())


def raw_parse(settings: Settings, batch_id: str) -> str:
    """Parse each line of the local file."""
    del batch_id
    decoder = msgspec.json.Decoder(RequestLine)
    count = 0
    with (Path(settings.intake.scratch_dir).parent / "input.jsonl").open("rb") as file:
        while line := file.readline(settings.intake.max_line_bytes + 1):
            decoder.decode(line.decode())
            count += 1
    return f"{count} lines"


def validate(settings: Settings, batch_id: str) -> str:
    """The first op."""
    ledger, store = parts(settings)
    found = ops.validate(batch_id, ledger=ledger, store=store, settings=settings)
    return f"{found.total} requests, {found.invalid} invalid"


def write_chunks(settings: Settings, batch_id: str) -> str:
    """The second op."""
    ledger, store = parts(settings)
    result = ops.write_chunks(batch_id, ledger=ledger, store=store, settings=settings)
    return f"{len(result.chunks)} chunks"


def parts(settings: Settings) -> tuple[Ledger, ObjectStore]:
    """Open ledger and store."""
    return Ledger.from_settings(settings), ObjectStore.open(settings.store)


if __name__ == "__main__":
    main()
