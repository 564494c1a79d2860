"""The demo's steps on the real S3 server; the stack itself is played (its own tests run the real one)."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from batch_pipeline.embedded import demo
from batch_pipeline.embedded.demo import Drop, Outbox
from batch_pipeline.embedded.stack import Addresses, Stack
from batch_pipeline.errors import OperatorError
from batch_pipeline.intake import drop as drop_folder
from batch_pipeline.ledger import Ledger
from batch_pipeline.results import outbox
from batch_pipeline.results.status import StatusDocument
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore, keys

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class PlayedStack(Stack):
    """A stack whose parts run as long as the test says, and that notes what is asked of it."""

    def __init__(self, settings: Settings, config_file: Path | None = None) -> None:
        super().__init__(settings, config_file)
        self.pid: int | None = None
        self.asked: list[str] = []
        self.signals_while_stopping: list[signal.Signals] = []

    def running(self) -> dict[str, int | None]:
        return {"seaweedfs": self.pid}

    def up(self, say: Callable[[str], None] = print) -> Addresses:
        say("up")
        self.asked.append("up")
        self.pid = 1
        return self.addresses()

    def down(self, say: Callable[[str], None] = print) -> bool:
        say("down")
        for number in self.signals_while_stopping:
            signal.raise_signal(number)
        self.asked.append("down")
        self.pid = None
        return True


class Silence:
    """A screen that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    @contextmanager
    def progress(self) -> Iterator[Callable[[Sequence[StatusDocument]], None]]:
        yield lambda _: None


@pytest.fixture
def stack(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> PlayedStack:
    """The stack that the demo will use; the model is taken to be there."""
    port = urlsplit(settings.store.endpoint_url or "").port or 0
    embedded = msgspec.structs.replace(settings.embedded, s3_port=port)
    played = PlayedStack(msgspec.structs.replace(settings, embedded=embedded))
    monkeypatch.setattr(demo, "Stack", lambda _settings, _file: played)
    monkeypatch.setattr(demo, "make_models", lambda _settings, _say: None)
    return played


@pytest.fixture
def drop(settings: Settings) -> Drop:
    return demo.find_drops(EXAMPLES, settings)[0]


@pytest.fixture
def ledger(settings: Settings) -> Iterator[Ledger]:
    opened = Ledger.from_settings(settings)
    yield opened
    opened.close()


def test_a_drop_is_told_from_that_of_an_earlier_demo(
    drop: Drop, store: ObjectStore, settings: Settings, ledger: Ledger
) -> None:
    earlier, later = Outbox(store, "earlier", ledger.now()), Outbox(store, "later", ledger.now())
    assert earlier.read(drop) is None
    demo.put(drop, "earlier", store)
    drop_folder.take_drops(ledger=ledger, store=store, settings=settings, limit=10)
    seen = earlier.read(drop)
    assert seen is not None
    assert (seen.status, seen.completion_window) == ("validating", "2h")
    assert later.read(drop) is None


def test_a_refused_file_ends_the_demo_with_the_reason(drop: Drop, store: ObjectStore, ledger: Ledger) -> None:
    outbox.answer_rejected(drop.customer, drop.name, "invalid_option", "not taken because", store=store)
    with pytest.raises(OperatorError, match="not taken because"):
        Outbox(store, "this", 0.0).read(drop)
    assert Outbox(store, "this", ledger.now() + 60).read(drop) is None


def test_a_part_that_ends_is_named_at_once(drop: Drop, store: ObjectStore, stack: PlayedStack) -> None:
    with pytest.raises(OperatorError, match="seaweedfs ended while batches were running; see its log in"):
        demo.follow([drop], Outbox(store, "this", 0.0), stack, lambda _: None)


def test_a_demo_that_takes_too_long_says_what_it_waits_for(drop: Drop, store: ObjectStore, stack: PlayedStack) -> None:
    stack.up()
    expected = f"{drop.customer}/{drop.name}: not taken from the inbox.*the logs are in"
    with pytest.raises(OperatorError, match=expected):
        demo.follow([drop], Outbox(store, "this", 0.0), stack, lambda _: None, limit_seconds=-1)


def test_an_interrupted_demo_stops_what_it_started(
    settings: Settings, stack: PlayedStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "put", interrupt)
    # Somebody is impatient.
    stack.signals_while_stopping = [signal.SIGINT, signal.SIGTERM]
    handlers = [signal.getsignal(number) for number in stack.signals_while_stopping]
    with pytest.raises(KeyboardInterrupt):
        demo.run(settings, None, EXAMPLES, Silence())
    assert stack.asked == ["up", "down"]
    assert [signal.getsignal(number) for number in stack.signals_while_stopping] == handlers


def test_an_interrupted_demo_takes_back_what_it_handed_in(
    drop: Drop, settings: Settings, store: ObjectStore, ledger: Ledger
) -> None:
    demo.put(drop, "this", store)
    demo.put(demo.find_drops(EXAMPLES, settings)[1], "other", store)
    drop_folder.take_drops(ledger=ledger, store=store, settings=settings, limit=10)
    demo.put(drop, "this", store)
    demo.withdraw([drop], "this", ledger=ledger, store=store)
    statuses = {batch.metadata["demo-run"]: batch.status for batch in ledger.batches.recent()}
    assert statuses == {"other": "validating", "this": "cancelling"}
    assert list(store.list("inbox/")) == []


def test_a_stack_that_ran_before_goes_on(
    settings: Settings, stack: PlayedStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OperatorError("the store is away")

    stack.pid = 1
    monkeypatch.setattr(demo, "put", fail)
    with pytest.raises(OperatorError, match="the store is away"):
        demo.run(settings, None, EXAMPLES, Silence())
    assert stack.asked == ["up"]


def test_a_batch_that_did_not_end_as_expected_is_a_problem(
    drop: Drop, store: ObjectStore, settings: Settings, ledger: Ledger
) -> None:
    demo.put(drop, "this", store)
    drop_folder.take_drops(ledger=ledger, store=store, settings=settings, limit=10)
    seen = Outbox(store, "this", 0.0).read(drop)
    assert seen is not None
    good = drop.requests - drop.bad_lines
    counts = msgspec.structs.replace(
        seen.counts, total=drop.requests, completed=good - 1, failed=1, invalid=drop.bad_lines
    )
    ended = msgspec.structs.replace(seen, status="completed", counts=counts)
    assert demo.surprises(drop, ended) == [f"completed: expected {good}, found {good - 1}"]


def test_examples_that_are_not_there_are_named(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"holds no CUSTOMER/NAME\.jsonl"):
        demo.find_drops(tmp_path, settings)


def test_the_inbox_gets_the_file_as_it_is(drop: Drop, store: ObjectStore) -> None:
    demo.put(drop, "this", store)
    assert store.get(keys.inbox(drop.customer, drop.name)) == drop.file.read_bytes()
