"""How long intake takes and how much memory, against the raw parse of the same file by the fastest exact parser here.

    python -m benchmarks.intake [--requests 200000 ...] [--model FOLDER] [--stages]

Starts a SeaweedFS on loopback with data in a temporary folder, puts a file of requests there (about 640 bytes each;
half of them share one of many system prompts), and measures, in processes of their own: the raw parse (each line
decoded as UTF-8 and by msgspec with the body left raw, nothing checked, nothing kept) on one core and on all at once,
`validate`, and `write_chunks`. Several numbers of requests are measured one after the other, to see how it grows.
Processor seconds include the processes that intake starts, but not the object store, which shares the cores; that is
why `seconds` says less. Peak memory is given for the measuring process and, beside it, for the largest of those that
it started: the system keeps no sum, and there is one of them a core. `--stages` runs the parts of intake again, each
alone, for their processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from benchmarks._intake_stages import Stages
from tests.fakes.intake_files import CHAT, created
from tests.fakes.memory import peak_bytes
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
STEPS = ("validate", "write_chunks")


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
    parser.add_argument("--requests", type=int, nargs="+", default=[200_000])
    parser.add_argument("--stages", action="store_true", help="the parts of intake as well")
    parser.add_argument("--model", type=Path, help="a folder with tokenizer.json; a small one is made by default")
    parser.add_argument("--work", nargs=3, metavar=("STEP", "SETTINGS", "BATCH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*options.work)
        return
    for count in options.requests:
        with tempfile.TemporaryDirectory() as name, seaweedfs.s3_server(Path(name) / "s3") as reachable:
            measure(Path(name), reachable, count, options)


def measure(folder: Path, reachable: configuration.Store, count: int, options: argparse.Namespace) -> None:
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
        out.writelines(requests(count))
    ledger, store = Ledger.from_settings(settings), ObjectStore.open(settings.store)
    batch_id = ids.new_batch_id()
    store.upload(data, keys.input_file(batch_id))
    created(ledger, store, batch_id)
    ledger.close()
    print(f"\n{count} requests, {data.stat().st_size / 1e6:.0f} MB")
    print(f"{'step':14} {'seconds':>8} {'ratio':>6} {'cpu s':>8} {'ratio':>6} {'own MB':>7} {'child MB':>8}")
    parse = child("raw parse 0/1", file, batch_id)
    cores = len(os.sched_getaffinity(0))
    parts = ThreadPoolExecutor(cores).map(lambda part: child(f"raw parse {part}/{cores}", file, batch_id), range(cores))
    all_cores = max(part.seconds for part in parts)
    print(f"raw parse on {cores} cores at once: {all_cores:.2f} s")
    for step, used in (("raw parse", parse), *((name, child(name, file, batch_id)) for name in STEPS)):
        print(
            f"{step:14} {used.seconds:8.2f} {used.seconds / all_cores:6.1f} {used.processor_seconds:8.2f} "
            f"{used.processor_seconds / parse.processor_seconds:6.1f} {used.own_megabytes:7.0f} "
            f"{used.child_megabytes:8.0f}  {used.result}",
            flush=True,
        )
    if options.stages:
        print(f"{'part, alone':28} {'cpu s':>8} {'ratio':>6}")
        for part, seconds in msgspec.json.decode(child("stages", file, batch_id).result, type=dict[str, float]).items():
            print(f"{part:28} {seconds:8.2f} {seconds / parse.processor_seconds:6.1f}")


def child(step: str, settings_file: Path, batch_id: str) -> Measured:
    """Do one step in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.intake", "--work", step, str(settings_file), batch_id]
    return msgspec.json.decode(subprocess.check_output(command), type=Measured)


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
        "validate": validate,
        "write_chunks": write_chunks,
        "stages": stages,
    }
    what, _, part = step.rpartition(" ")
    # What the imports took before is no part of a step.
    started, idle = time.perf_counter(), time.process_time()
    result = raw_parse(settings, part) if what.startswith("raw") else steps[step](settings, batch_id)
    seconds = time.perf_counter() - started
    started_ones = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = time.process_time() - idle + started_ones.ru_utime + started_ones.ru_stime
    peaks = (peak_bytes() / 1024**2, started_ones.ru_maxrss / 1024)
    print(msgspec.json.encode(Measured(seconds, processor, *peaks, result)).decode())


def raw_parse(settings: Settings, part: str) -> str:
    """Parse each line of the local file, or of one part of it (`1/2`: the second half)."""
    decoder = msgspec.json.Decoder(RequestLine)
    path = Path(settings.intake.scratch_dir).parent / "input.jsonl"
    number, parts = map(int, part.split("/"))
    start, end = (path.stat().st_size * edge // parts for edge in (number, number + 1))
    count = 0
    with path.open("rb") as file:
        if start:
            file.seek(start - 1)
            start += len(file.readline()) - 1
        for line in file:
            decoder.decode(line.decode())
            count += 1
            start += len(line)
            if start >= end:
                break
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


def stages(settings: Settings, batch_id: str) -> str:
    """The parts of both ops, each alone."""
    return msgspec.json.encode(Stages(settings, batch_id, *parts(settings)).run()).decode()


def parts(settings: Settings) -> tuple[Ledger, ObjectStore]:
    """Open ledger and store."""
    return Ledger.from_settings(settings), ObjectStore.open(settings.store)


if __name__ == "__main__":
    main()
