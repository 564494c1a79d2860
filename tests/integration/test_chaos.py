"""The short chaos run: fifty kills of everything under the real stack. `make chaos` is the long one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from batch_pipeline.engine import AttachedEngine
from batch_pipeline.intake import drop, ops
from batch_pipeline.ledger import Ledger
from batch_pipeline.results import outbox
from batch_pipeline.results.merge import merge
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore, keys
from batch_pipeline.worker import Worker
from tests.chaos import account
from tests.chaos.__main__ import run
from tests.chaos.files import MODEL, Dropped
from tests.chaos.plan import LONG, SHORT, Part, make_plan
from tests.fakes import answered
from tests.fakes import engine as fake_engine
from tests.fakes.intake_files import intake_settings
from tests.fakes.small_model import NAME, write_model

KILLS = 50


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_fifty_kills_lose_nothing_and_double_nothing_and_no_checkpoint_is_run_again(tmp_path: Path) -> None:
    outcome = run(tmp_path, KILLS, seed=1)
    assert len(outcome.kills) == KILLS
    assert {kill.part for kill in outcome.kills} == set(SHORT)
    whole = outcome.whole
    assert (whole.lost, whole.doubled, whole.unknown, whole.unproved) == ([], [], [], [])
    assert outcome.holds
    # Whatever was asked twice was in flight, or in no checkpoint yet, when something was killed.
    assert outcome.calls.needless == []
    statuses = {name: tally.statuses[0] for name, tally in outcome.files.items()}
    assert {statuses.pop(name) for name in ("notes", "invoices", "tickets", "few")} == {"completed"}
    assert statuses.pop("endless") in {"cancelled", "completed"}
    assert statuses.pop("hurried") in {"expired", "completed"}
    assert not statuses


def test_the_plan_follows_from_the_seed_and_spares_no_part() -> None:
    plan = make_plan(KILLS, 1, SHORT, 2.0)
    assert plan == make_plan(KILLS, 1, SHORT, 2.0)
    assert plan != make_plan(KILLS, 2, SHORT, 2.0)
    assert {kill.part for kill in plan} == set(SHORT)
    assert {kill.part for kill in make_plan(KILLS, 1, LONG, 2.0)} == set(LONG) == set(Part)
    assert {kill.part for kill in plan if kill.sleeps} == {Part.WORKER}


@pytest.fixture
def settings_of_chaos(settings: Settings, tmp_path: Path) -> Settings:
    small = intake_settings(settings, write_model(tmp_path / "model"), tmp_path / "scratch")
    worker = msgspec.structs.replace(small.worker, warm_seconds=0.1, poll_seconds=0.05)
    return msgspec.structs.replace(small, models={MODEL: small.models[NAME]}, worker=worker)


def test_the_count_finds_what_is_lost_doubled_or_unknown_and_what_was_asked_although_checkpointed(
    sqlite_url: str, store: ObjectStore, settings_of_chaos: Settings, tmp_path: Path
) -> None:
    ledger = Ledger.open(sqlite_url)
    parts: dict[str, Any] = {"ledger": ledger, "store": store, "settings": settings_of_chaos}
    file = Dropped("acme", "tiny", 6)  # the first three lines are bad
    store.put(keys.inbox("acme", "tiny"), "\n".join(file.lines()).encode())
    (taken,) = drop.take_drops(**parts, limit=1)
    batch_id = str(taken.batch_id)
    ops.validate(batch_id, **parts, run_id="intake")
    ops.write_chunks(batch_id, **parts, run_id="intake")
    (lease,) = ledger.chunks.lease("killed", MODEL, 1)
    made = answered.answer(batch_id, 4)
    line = made.line.replace(answered.label(4).encode(), file.label(4).encode())
    answered.checkpoint(ledger, store, lease, [msgspec.structs.replace(made, line=line)])
    ledger.chunks.release(lease.ref, "killed")
    with fake_engine.running("--model", MODEL) as fake:
        Worker(**parts, model=MODEL, engine=AttachedEngine(MODEL, fake.url, 60.0)).run()
        assert fake.stats().calls == 2
    merge(batch_id, **parts, run_id="merge")
    outbox.deliver(batch_id, **parts)
    batch = ledger.batches.get(batch_id)

    good = account.tally(file, batch, ledger=ledger, store=store)
    assert (good.requests, good.lost, good.doubled, good.unknown, good.unproved) == (6, [], [], [], [])
    output = keys.outbox("acme", "tiny", "output.jsonl")
    first, *_, last = store.get(output).splitlines()
    stranger = last.replace(file.label(5).encode(), b"stranger")
    store.put(output, b"\n".join([first, first, stranger]))
    bad = account.tally(file, batch, ledger=ledger, store=store)
    assert (bad.lost, bad.doubled) == ([file.label(4), file.label(5)], [file.label(3)])
    assert bad.unknown == ["stranger"]

    *_, anew = (event.at for event in ledger.events.of(batch_id) if event.event == "leased")
    journal = tmp_path / "journal"
    journal.write_text("".join(f"{anew + later} 1 {file.label(4)}\n" for later in (-1.0, -0.5)))
    calls = account.count_calls(journal, [(file, batch)], ledger=ledger, store=store)
    assert (calls.calls, calls.repeated, calls.needless) == (2, 1, [])
    journal.write_text("".join(f"{anew + later} 1 {file.label(4)}\n" for later in (-1.0, 0.5)))
    calls = account.count_calls(journal, [(file, batch)], ledger=ledger, store=store)
    assert (calls.repeated, len(calls.needless)) == (1, 1)
    ledger.close()
