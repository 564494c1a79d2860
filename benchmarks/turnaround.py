"""How long ten requests take from the drop folder to their results, with a warm worker, and where the time goes.

    python -m benchmarks.turnaround [--batches 3]

Starts the whole embedded stack (as `make up` does) in a temporary folder, with the tests' fake engine in the place of
vLLM, which answers at once: what is left is the service's own. Batches are dropped one after the other; the first, for
which the worker starts, is not counted. The parts are told apart by the times that the ledger and Dagster keep.
"Processor" is that of all of the stack's processes while the batch was under way, with its two runs and the worker.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import dagster as dg
import psutil

from batch_pipeline import settings as configuration
from batch_pipeline.embedded.ports import free_ports
from batch_pipeline.embedded.stack import Stack
from batch_pipeline.ledger import Ledger
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore
from tests.fakes import engine

MODEL = "smollm2-135m"
REPOSITORY = Path(__file__).resolve().parent.parent
PARTS = (
    ("waits for the sensor of the drop folder", "dropped", "created"),
    ("waits in Dagster's queue", "created", "intake launched"),
    ("intake's process starts", "intake launched", "intake began"),
    ("intake", "intake began", "in_progress"),
    ("waits for the worker", "in_progress", "leased"),
    ("engine, and commit", "leased", "finalizing"),
    ("waits for the sensor of merges", "finalizing", "merge requested"),
    ("waits in Dagster's queue", "merge requested", "merge launched"),
    ("merge's process starts", "merge launched", "merge began"),
    ("merge", "merge began", "completed"),
    ("the outbox shows it", "completed", "shown"),
)
"""What is between two moments."""
_WAIT_SECONDS = 300.0


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, engine.running() as fake:
        file = configured(Path(folder), fake.url)
        settings = configuration.load(file)
        with up(settings, file) as stack:
            measured = [measure(settings, stack, f"batch-{number}") for number in range(options.batches + 1)][1:]
    print("| part | seconds |\n| --- | --- |")
    for part, begin, end in PARTS:
        print(f"| {part} | {_shown([moments[end] - moments[begin] for moments, _ in measured])} |")
    print(
        f"| **dropped to shown** | **{_shown([moments['shown'] - moments['dropped'] for moments, _ in measured])}** |"
    )
    print(f"| processor | {_shown([spent for _, spent in measured])} |")


def configured(folder: Path, engine_url: str) -> Path:
    """Write the configuration of a stack of its own."""
    s3, dagster_port, code, api = free_ports(4)
    file = folder / "batch-pipeline.toml"
    file.write_text(
        f"""
[store]
bucket = "batch-pipeline"
endpoint_url = "http://127.0.0.1:{s3}"
access_key_id = "key"
secret_access_key = "secret"
[ledger]
url = "sqlite:///{folder}/ledger.sqlite"
[api]
port = {api}
[embedded]
data_dir = "{folder}/data"
s3_port = {s3}
dagster_port = {dagster_port}
code_server_port = {code}
[worker]
warm_seconds = 3600
[models.{MODEL}]
source = "{REPOSITORY / "var" / "models" / MODEL}"
context_length = 2048
engine_url = "{engine_url}"
prices = {{ input_per_million = 0.10, output_per_million = 0.20 }}
""",
        encoding="utf-8",
    )
    return file


@contextmanager
def up(settings: Settings, file: Path) -> Iterator[Stack]:
    """Run the stack until the block ends."""
    stack = Stack(settings, file)
    stack.up(lambda _: None)
    try:
        yield stack
    finally:
        stack.down(lambda _: None)


def measure(settings: Settings, stack: Stack, name: str) -> tuple[dict[str, float], float]:
    """Drop ten requests; return when what happened (UTC seconds), and the processor seconds meanwhile."""
    ledger, store = Ledger.from_settings(settings), ObjectStore.open(settings.store)
    before = _processor_seconds(stack)
    moments = {"dropped": time.time()}
    store.put(f"inbox/acme/{name}.jsonl", b"".join(_line(number) for number in range(10)))

    def is_shown() -> bool:
        status = f"outbox/acme/{name}/status.json"
        return store.head(status) is not None and json.loads(store.get(status))["status"] == "completed"

    until(is_shown)
    moments["shown"] = time.time()
    spent = _processor_seconds(stack) - before
    batch = ledger.batches.newest_named("acme", name)
    assert batch is not None
    for event in ledger.events.of(batch.batch_id):
        moments.setdefault(event.event, event.at)
    with dg.DagsterInstance.from_config(str(Path(settings.embedded.data_dir) / "dagster")) as instance:
        for job in ("intake", "merge"):
            wanted = dg.RunsFilter(job_name=job, tags={"dagster/partition": batch.batch_id})
            [record] = instance.get_run_records(wanted)
            moments[f"{job} requested"] = record.create_timestamp.timestamp()
            launched = instance.get_records_for_run(
                record.dagster_run.run_id, of_type=dg.DagsterEventType.PIPELINE_STARTING
            ).records
            moments[f"{job} launched"] = launched[0].timestamp
            assert record.start_time is not None
            moments[f"{job} began"] = record.start_time
    ledger.close()
    return moments, spent


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens in other processes. Raises TimeoutError."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the batch did not end in time; is its worker there?")
        time.sleep(0.05)


def _line(number: int) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"question {number}"}], "max_tokens": 8}
    request = {"custom_id": f"q{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(request).encode() + b"\n"


def _processor_seconds(stack: Stack) -> float:
    """Return the processor seconds of the stack's processes so far, also of children that have ended."""
    roots = [psutil.Process(pid) for pid in stack.running().values() if pid is not None]
    family = {process for root in roots for process in [root, *root.children(recursive=True)]}
    return sum(sum(process.cpu_times()[:4]) for process in family)


def _shown(values: list[float]) -> str:
    return f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    main()
