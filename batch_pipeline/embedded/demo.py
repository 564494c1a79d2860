"""The demo: the whole way of a batch on this machine, with real parts, from the example files to verified results.

    model ──> stack up ──> drop examples into the inbox ──> follow status.json ──> download, verify, show ──> stack down

It uses the service as a customer would: files go in by S3, with options as metadata, and what happens is read from the
outbox. Whatever it started it stops again, also when it is interrupted, once or more often, and what it handed in it
then cancels. Killed without a chance to do so, it leaves a stack that `batch-pipeline down` ends.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from batch_pipeline.embedded.model import SMOLLM2, make_smollm2
from batch_pipeline.embedded.stack import Addresses, Stack
from batch_pipeline.errors import OperatorError
from batch_pipeline.intake.check import check_file
from batch_pipeline.intake.options import DEFAULT_ENDPOINT
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import BatchStatus
from batch_pipeline.results import collect
from batch_pipeline.results.outbox import STATUS
from batch_pipeline.results.status import ErrorList, StatusDocument
from batch_pipeline.results.verify import verify
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectMissing, ObjectStore, keys

LIMIT_SECONDS = 45 * 60.0
"""A machine of two busy cores needs about 5 minutes, most of them for the engine's start."""
_POLL_SECONDS = 1.0
_RUN_METADATA = "demo-run"
_WINDOW = "2h"
_SAMPLES = 2
_PROBLEMS_SHOWN = 10
_SHOWN_CHARACTERS = 80

Say = Callable[[str], None]
Show = Callable[[Sequence[StatusDocument]], None]


class Screen(Protocol):
    """Where the demo shows what it does."""

    def say(self, line: str) -> None:
        """Print one line."""

    def progress(self) -> AbstractContextManager[Show]:
        """Return what shows the batches' documents while they run."""


class Drop(NamedTuple):
    """An example file and the batch that is expected of it."""

    customer: str
    name: str
    file: Path
    requests: int
    bad_lines: int


class Sample(msgspec.Struct, frozen=True):
    """One answer, for a person to see."""

    custom_id: str
    answer: str


def run(settings: Settings, config_file: Path | None, examples: Path, screen: Screen) -> bool:
    """Run the demo; return whether every batch ended as expected and was verified.

    Raises OperatorError where a part does not work or the time limit passes.
    """
    drops = find_drops(examples, settings)
    make_models(settings, screen.say)
    with _running_stack(settings, config_file, screen.say) as (stack, addresses):
        store, ledger = ObjectStore.open(settings.store), Ledger.from_settings(settings)
        try:
            documents = _hand_in_and_follow(drops, stack, screen, ledger=ledger, store=store)
            copies = Path(settings.embedded.data_dir) / "demo"
            verdicts = [
                _report(drop, document, copies / drop.customer / drop.name, screen.say, ledger=ledger, store=store)
                for drop, document in zip(drops, documents, strict=True)
            ]
        finally:
            ledger.close()
        screen.say(f"\nTo look around: `make up`, then {addresses.dagster} (Dagster) and {addresses.object_store} (S3)")
    return all(verdicts)


def _hand_in_and_follow(
    drops: Sequence[Drop], stack: Stack, screen: Screen, *, ledger: Ledger, store: ObjectStore
) -> list[StatusDocument]:
    token, started_at = secrets.token_hex(4), ledger.now()
    try:
        for drop in drops:
            put(drop, token, store)
            screen.say(f"dropped {drop.file} at s3://{store.bucket}/{keys.inbox(drop.customer, drop.name)}")
        with screen.progress() as show:
            return follow(drops, Outbox(store, token, started_at), stack, show)
    except KeyboardInterrupt:
        withdraw(drops, token, ledger=ledger, store=store)
        raise


def withdraw(drops: Sequence[Drop], token: str, *, ledger: Ledger, store: ObjectStore) -> None:
    """Take back what this demo handed in, so that the next one need not run it: files that wait, batches that run."""
    for drop in drops:
        store.delete(keys.inbox(drop.customer, drop.name))
    still_open = [status for status in BatchStatus if not status.is_final]
    for batch in ledger.batches.recent(statuses=still_open, limit=1000):
        if batch.metadata.get(_RUN_METADATA) == token:
            ledger.batches.cancel(batch.batch_id, actor="demo")


def make_models(settings: Settings, say: Say) -> None:
    """Make the small model where it is missing. Raises OperatorError where another model of the catalogue is."""
    for name, model in settings.models.items():
        folder = Path(model.source)
        if model.engine_url is not None or folder.is_dir():
            continue
        if folder.name != SMOLLM2:
            raise OperatorError(f"the model {name} is not at {folder}: put it there, or correct models.{name}.source")
        make_smollm2(folder.parent, say)


def find_drops(examples: Path, settings: Settings) -> list[Drop]:
    """Return the files CUSTOMER/NAME.jsonl below `examples`, with the bad lines that validation finds in each.

    Raises OperatorError where there are none.
    """
    drops = []
    for file in sorted(examples.glob("*/*.jsonl")):
        report = check_file(file, DEFAULT_ENDPOINT, settings)
        bad = sum(1 for _ in report)
        drops.append(Drop(file.parent.name, file.stem, file, report.total, bad))
    if not drops:
        raise OperatorError(f"{examples} holds no CUSTOMER/NAME.jsonl; run the demo in the repository's folder")
    return drops


def put(drop: Drop, token: str, store: ObjectStore) -> None:
    """Put a file into the inbox as a customer does: one upload, with the options as the object's metadata."""
    options = {"completion-window": _WINDOW, "on-invalid": "skip", f"metadata-{_RUN_METADATA}": token}
    store.upload(drop.file, keys.inbox(drop.customer, drop.name), options)


class Outbox(NamedTuple):
    """What the outbox says of this demo's drops: `token` tells its batches from those of an earlier one."""

    store: ObjectStore
    token: str
    started_at: float
    """UTC seconds: older answers are not for this demo."""

    def read(self, drop: Drop) -> StatusDocument | None:
        """Return the status of this very drop; None before it was taken. Raises OperatorError where it was refused."""
        try:
            data = self.store.get(keys.outbox(drop.customer, drop.name, STATUS))
        except ObjectMissing:
            return None
        answer = msgspec.json.decode(data, type=_Answer)
        if answer.id is None and answer.as_of >= self.started_at:
            said = "; ".join(error.message for error in answer.errors.data) if answer.errors else "no reason given"
            raise OperatorError(f"{drop.file} was not taken: {said}")
        is_ours = answer.id is not None and answer.metadata.get(_RUN_METADATA) == self.token
        return msgspec.json.decode(data, type=StatusDocument) if is_ours else None


class _Answer(msgspec.Struct):
    """What a status of a batch and the answer to a refused file have in common."""

    id: str | None
    as_of: float
    errors: ErrorList | None = None
    metadata: dict[str, str] = {}


def follow(
    drops: Sequence[Drop], outbox: Outbox, stack: Stack, show: Show, limit_seconds: float = LIMIT_SECONDS
) -> list[StatusDocument]:
    """Read each batch's status.json until all are final; return the last documents, in the order of the drops.

    Raises OperatorError where a file was refused, a part of the stack has ended, or the limit has passed.
    """
    ends_at = time.monotonic() + limit_seconds
    logs = stack.addresses().logs
    while True:
        found = [outbox.read(drop) for drop in drops]
        taken = [document for document in found if document is not None]
        show(taken)
        if len(taken) == len(drops) and all(BatchStatus(document.status).is_final for document in taken):
            return taken
        dead = [name for name, pid in stack.running().items() if pid is None]
        if dead:
            raise OperatorError(f"{', '.join(dead)} ended while batches were running; see its log in {logs}")
        if time.monotonic() > ends_at:
            left = "; ".join(map(_left, drops, found))
            raise OperatorError(f"not done after {limit_seconds / 60:.0f} minutes ({left}); the logs are in {logs}")
        time.sleep(_POLL_SECONDS)


def _left(drop: Drop, document: StatusDocument | None) -> str:
    state = "not taken from the inbox" if document is None else document.reason or document.status
    return f"{drop.customer}/{drop.name}: {state}"


def samples(output: Path, count: int = _SAMPLES) -> Iterator[Sample]:
    """Yield the first answers of an output file of chat completions."""
    with output.open("rb") as lines:
        for _, line in zip(range(count), lines, strict=False):
            parsed = msgspec.json.decode(line, type=_OutputLine)
            text = " ".join(parsed.response.body.choices[0].message.content.split())
            yield Sample(parsed.custom_id, text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…")


class _Message(msgspec.Struct):
    content: str


class _Choice(msgspec.Struct):
    message: _Message


class _Body(msgspec.Struct):
    choices: list[_Choice]


class _Response(msgspec.Struct):
    body: _Body


class _OutputLine(msgspec.Struct):
    custom_id: str
    response: _Response


@contextmanager
def _running_stack(settings: Settings, config_file: Path | None, say: Say) -> Iterator[tuple[Stack, Addresses]]:
    """Start the stack, and stop it afterwards unless it ran before."""
    stack = Stack(settings, config_file)
    ran_before = all(stack.running().values())
    addresses = stack.up(say)
    try:
        yield stack, addresses
    finally:
        if not ran_before:
            with _undisturbed():
                stack.down(say)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Let no further Ctrl-C or SIGTERM cut the stopping short: it would leave half of the stack running.

    Stopping is bounded in time by itself.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _report(
    drop: Drop, document: StatusDocument, folder: Path, say: Say, *, ledger: Ledger, store: ObjectStore
) -> bool:
    """Download and verify one batch and say how it went; return whether it went as expected."""
    batch = ledger.batches.get(document.id)
    collected = collect.collect(batch, folder, store, overwrite=True)
    proof = verify(batch.batch_id, ledger=ledger, store=store)
    counts = document.counts
    say(f"\n{drop.customer}/{drop.name}  {batch.batch_id}  {document.status}")
    say(f"  requests  {counts.total}: {counts.completed} completed, {counts.failed} failed, {counts.invalid} invalid")
    if collected.output is not None:
        for sample in samples(collected.output):
            say(f"  answer    {sample.custom_id}: {sample.answer}")
    for error in document.errors.data if document.errors else []:
        say(f"  bad line  {error.line}: {error.code}: {error.message}")
    for key in (document.files.output, document.files.errors, document.files.manifest):
        if key is not None:
            say(f"  result    s3://{store.bucket}/{key}")
    say(f"  copies    {folder}")
    say(f"  tokens    {batch.input_tokens} in ({batch.cached_tokens} of them cached), {batch.output_tokens} out")
    if document.cost is not None:
        say(f"  price     {document.cost:.6f} USD, at the batch discount")
    problems = [*surprises(drop, document), *proof.problems[:_PROBLEMS_SHOWN]]
    say("  verified  exactly one result for each request" if proof.holds else "  NOT VERIFIED")
    for problem in problems:
        say(f"  PROBLEM   {problem}")
    return not problems


def surprises(drop: Drop, document: StatusDocument) -> list[str]:
    """Return how a batch ended otherwise than expected, one sentence each."""
    counts = document.counts
    good = drop.requests - drop.bad_lines
    expected = {"status": "completed", "requests": drop.requests, "completed": good, "invalid": drop.bad_lines}
    found = {
        "status": document.status,
        "requests": counts.total,
        "completed": counts.completed,
        "invalid": counts.invalid,
    }
    return [
        f"{what}: expected {expected[what]}, found {found[what]}" for what in expected if found[what] != expected[what]
    ]
