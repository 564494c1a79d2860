"""A chaos run: files go in, parts are killed after a plan, and in the end every line and every call is counted."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
from sqlalchemy.exc import InterfaceError, OperationalError

from batch_pipeline.embedded.processes import Identity, send
from batch_pipeline.errors import StoreError
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch
from batch_pipeline.results.status import StatusDocument
from batch_pipeline.store import ObjectMissing, ObjectStore, keys
from tests.chaos import account, parts
from tests.chaos.account import Calls, Done, Tally
from tests.chaos.files import Dropped
from tests.chaos.parts import Parts
from tests.chaos.plan import Kill, Part

_POLL_SECONDS = 0.25
_CALLS_SECONDS = 10.0
_OUTAGES = (StoreError, OperationalError, InterfaceError)
_T = TypeVar("_T")
Say = Callable[[str], None]


class Outcome(msgspec.Struct, frozen=True):
    """What a run came to."""

    kills: list[Done]
    files: dict[str, Tally]
    calls: Calls
    seconds: float

    @property
    def whole(self) -> Tally:
        """All files together."""
        return account.total(list(self.files.values()))

    @property
    def holds(self) -> bool:
        """Whether every request of every file has exactly one line, and `verify` says so too."""
        whole = self.whole
        return not (whole.lost or whole.doubled or whole.unknown or whole.unproved)


class Chaos:
    """One run in a folder of its own."""

    def __init__(self, folder: Path, files: Sequence[Dropped], plan: Sequence[Kill], say: Say) -> None:
        self._parts = Parts(folder)
        self._folder = folder
        self._files = files
        self._plan = plan
        self._say = say
        self._store = ObjectStore.open(self._parts.settings.store)
        self._away: dict[Part, Future[float]] = {}
        """Servers that are being started again, and when they were."""
        self._made: list[tuple[Kill, float, Future[float]]] = []
        self._asleep: set[Identity] = set()

    def run(self, limit_seconds: float) -> Outcome:
        """Start everything, drop the files, kill, wait for the end of every batch, count.

        Raises TimeoutError where a batch has not ended within `limit_seconds` after the last kill.
        """
        began_at = time.monotonic()
        with self._parts.running(), ThreadPoolExecutor(len(self._plan) or 1) as menders:
            self._say(f"everything runs after {time.monotonic() - began_at:.0f} s")
            ledger = Ledger.from_settings(self._parts.settings)
            try:
                for file in self._files:
                    self._put(keys.inbox(file.customer, file.name), file, _content(file))
                self._kill_all(menders)
                self._say(f"all kills are made after {time.monotonic() - began_at:.0f} s; waiting for the batches")
                batches = self._wait_for_ends(ledger, limit_seconds)
                files = list(zip(self._files, batches, strict=True))
                tallies = {
                    file.name: account.tally(file, batch, ledger=ledger, store=self._store) for file, batch in files
                }
                calls = account.count_calls(self._folder / "journal", files, ledger=ledger, store=self._store)
            finally:
                ledger.close()
        kills = [Done(kill.part, kill.sleeps, at, back.result()) for kill, at, back in self._made]
        return Outcome(kills, tallies, calls, time.monotonic() - began_at)

    def _kill_all(self, menders: ThreadPoolExecutor) -> None:
        cancels = [file for file in self._files if file.cancel_after is not None]
        for number, kill in enumerate(self._plan):
            for file in cancels:
                if file.cancel_after is not None and number == int(file.cancel_after * len(self._plan)):
                    self._say(f"{file.customer} cancels {file.name}")
                    self._put(keys.inbox_cancel(file.customer, file.name), file, b"")
            time.sleep(kill.pause_seconds)
            if kill.part in self._away:
                self._away[kill.part].result()
            if kill.part in (Part.WORKER, Part.ENGINE):
                self._wait_for_calls()
            self._make(number, kill, menders)
        for _, _, back in self._made:
            back.result()

    def _wait_for_calls(self) -> None:
        """Let engines get new requests first, so that a busy machine does not spend its kills on idle workers.

        Not for long: there may be nothing to run, because of what was killed before.
        """
        journal = self._folder / "journal"
        size, gives_up_at = journal.stat().st_size, time.monotonic() + _CALLS_SECONDS
        while journal.stat().st_size == size and time.monotonic() < gives_up_at:
            time.sleep(_POLL_SECONDS)

    def _make(self, number: int, kill: Kill, menders: ThreadPoolExecutor) -> None:
        ask = self._parts.victim
        victim = _wait(
            lambda: ask(kill.part, kill.pick, self._asleep) or None, 120.0, f"there is no {kill.part} to kill"
        )
        at = time.time()
        how = "stop" if kill.sleeps else "kill"
        self._say(f"{number + 1:3} {how} {kill.part} ({len(victim)} processes, pid {victim[0].pid}) at {at:.1f}")
        if kill.sleeps:
            send(victim[0], signal.SIGSTOP)
            self._asleep.add(victim[0])
            back = menders.submit(self._wake, victim[0])
        else:
            parts.kill(victim)
            back = menders.submit(self._mend, kill)
            self._away[kill.part] = back
        self._made.append((kill, at, back))

    def _wake(self, worker: Identity) -> float:
        time.sleep(parts.LEASE_SECONDS + 2.0)
        send(worker, signal.SIGCONT)
        self._asleep.discard(worker)
        return time.time()

    def _mend(self, kill: Kill) -> float:
        if kill.part not in (Part.WORKER, Part.ENGINE):
            time.sleep(kill.down_seconds)
            self._parts.start_again(kill.part)
        return time.time()

    def _put(self, key: str, file: Dropped, data: bytes) -> None:
        """Drop an object, again and again while the store is away."""
        path = self._folder / "dropped"
        path.write_bytes(data)
        options = {"completion-window": file.window}

        def put() -> bool:
            self._store.upload(path, key, options)
            return True

        _wait(lambda: _or_none(put), 120.0, f"{key} cannot be dropped")

    def _wait_for_ends(self, ledger: Ledger, limit_seconds: float) -> list[Batch]:
        """Wait until the outbox shows the end of every file's batch; return those batches."""

        def ended() -> list[Batch] | None:
            batches = []
            for file in self._files:
                batch = ledger.batches.newest_named(file.customer, file.name)
                if batch is None or not batch.status.is_final or not self._is_shown(file, batch):
                    return None
                batches.append(batch)
            return batches

        return _wait(lambda: _or_none(ended), limit_seconds, "not every batch has ended")

    def _is_shown(self, file: Dropped, batch: Batch) -> bool:
        try:
            data = self._store.get(keys.outbox(file.customer, file.name, "status.json"))
        except ObjectMissing:
            return False
        return msgspec.json.decode(data, type=StatusDocument).status == batch.status


def _content(file: Dropped) -> bytes:
    return "".join(f"{line}\n" for line in file.lines()).encode()


def _or_none(ask: Callable[[], _T | None]) -> _T | None:
    try:
        return ask()
    except _OUTAGES:
        return None


def _wait(ask: Callable[[], _T | None], limit_seconds: float, complaint: str) -> _T:
    gives_up_at = time.monotonic() + limit_seconds
    while (found := ask()) is None:
        if time.monotonic() > gives_up_at:
            raise TimeoutError(f"{complaint} after {limit_seconds:.0f} s")
        time.sleep(_POLL_SECONDS)
    return found
