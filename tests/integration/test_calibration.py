"""Calibration on an engine that does most with a known number of requests at once: beforehand, and while working."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from batch_pipeline.cli.program import run
from batch_pipeline.ledger import Ledger
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore
from batch_pipeline.worker import calibrating, tuning
from batch_pipeline.worker.calibrations import LimitBy
from tests.fakes import engine as fake_engine
from tests.fakes.batches import chat_request, make_batch
from tests.fakes.workers import attached, lines_of, make_worker, quick

BEST = 8
# Slow enough that what this machine does beside it does not matter.
ENGINE = ("--delay", "0.05", "--spread", "0", "--best", str(BEST))


def test_what_calibrate_has_found_is_what_workers_use_unless_it_is_configured(
    sqlite_url: str,
    store: ObjectStore,
    settings: Settings,
    settings_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with fake_engine.running(*ENGINE) as fake:
        text = settings_file.read_text().replace(
            "context_length = 2048", f'context_length = 2048\nengine_url = "{fake.url}"'
        )
        settings_file.write_text(text)
        assert run(["--config", str(settings_file), "calibrate", fake_engine.MODEL, "--seconds", "0.2"]) == 0
        said = capsys.readouterr().out
        ledger = Ledger.open(sqlite_url)
        batch = make_batch(ledger, store, [[chat_request(index, f"say {index}") for index in range(30)]])
        report = make_worker(ledger, store, quick(settings, model={"max_in_flight": None}), attached(fake.url)).run()
        assert (report.in_flight_by, report.requests) == (LimitBy.CALIBRATED, 30)
        assert f"{report.in_flight} at once are best: engine {fake_engine.VERSION} on " in said
        assert BEST / 2 < report.in_flight < BEST * 2
        assert len(lines_of(ledger, store, batch.batch_id)) == 30
        report = make_worker(ledger, store, quick(settings, model={"max_in_flight": 5}), attached(fake.url)).run()
        assert (report.in_flight, report.in_flight_by) == (5, LimitBy.CONFIGURED)


def test_a_worker_calibrates_while_it_works_and_every_request_has_its_result_once(
    sqlite_url: str, store: ObjectStore, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "_LEAST_SECONDS", 0.2)
    monkeypatch.setattr(tuning, "_LOOK_SECONDS", 0.02)
    asked = quick(settings, model={"max_in_flight": None, "calibrate": True})
    ledger = Ledger.open(sqlite_url)
    with fake_engine.running(*ENGINE) as fake:
        chunks = [[chat_request(100 * number + index, "say") for index in range(100)] for number in range(8)]
        batch = make_batch(ledger, store, chunks)
        report = make_worker(ledger, store, asked, attached(fake.url)).run()
        assert report.in_flight_by is LimitBy.CALIBRATED
        assert BEST / 2 < report.in_flight < BEST * 2
        assert (report.requests, fake.stats().calls) == (800, 800)
    assert len(lines_of(ledger, store, batch.batch_id)) == 800


def test_a_batchs_own_requests_are_never_found_in_the_prefix_cache_as_a_whole(
    sqlite_url: str, store: ObjectStore
) -> None:
    ledger = Ledger.open(sqlite_url)
    batch = make_batch(ledger, store, [[chat_request(index, f"say {index}") for index in range(3)]])
    workload = calibrating.of_batch(batch.batch_id, fake_engine.MODEL, ledger, store)
    bodies = [msgspec.json.decode(next(workload.bodies)) for _ in range(9)]
    assert [body["messages"][0]["content"] for body in bodies] == ["say 0", "say 1", "say 2"] * 3
    salts = [body["cache_salt"] for body in bodies]
    assert len({salts[0], salts[3], salts[6]}) == 3
    assert salts[0] == salts[1] == salts[2]


def test_a_model_of_an_unknown_name_is_refused(settings_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--config", str(settings_file), "calibrate", "unknown"]) == 1
    assert "no model 'unknown'" in capsys.readouterr().err
