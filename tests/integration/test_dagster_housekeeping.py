"""Housekeeping as a Dagster job, and the partitions of batches that are long over."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster import DagsterRunStatus
from dagster._core.storage.tags import REPOSITORY_LABEL_TAG
from dagster._core.test_utils import create_run_for_test

from batch_pipeline import settings as configuration
from batch_pipeline.housekeeping import partitions_to_delete
from batch_pipeline.ledger import Ledger
from batch_pipeline.settings import CONFIG_VARIABLE, Retention, Settings
from batch_pipeline.store import ObjectStore
from sensors.housekeeping import delete_partitions, delete_runs
from tests.fakes import answered
from tests.fakes.clock import SteppedClock
from tests.fakes.ledger_values import MODEL, finish, result_of, submitted

DAY = 86_400.0
HERE = "__repository__@batch_pipeline"
"""The code location, as Dagster labels its runs."""


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test(temp_dir=str(tmp_path)) as instance:
        yield instance


def _ended(ledger: Ledger, name: str) -> str:
    batch_id = submitted(ledger, name).batch_id
    (lease,) = ledger.chunks.lease("w", MODEL, 1, [batch_id])
    ledger.chunks.commit(lease.ref, result_of(lease))
    return finish(ledger, batch_id).batch_id


def test_old_partitions_go_but_never_one_with_a_run_under_way(instance: dg.DagsterInstance, sqlite_url: str) -> None:
    clock = SteppedClock()
    ledger = Ledger.open(sqlite_url, clock=clock)
    old = [_ended(ledger, f"old-{number}") for number in range(4)]
    clock.advance(31 * DAY)
    new, running = _ended(ledger, "new"), submitted(ledger, "running", window_seconds=3600).batch_id
    keys = [old[0], "not-a-batch", *old[1:], new, running]
    instance.add_dynamic_partitions("batches", keys)
    tags = {"dagster/partition": old[1]}
    busy = create_run_for_test(instance, job_name="merge", status=DagsterRunStatus.STARTED, tags=tags)
    retention = Retention(per_run=2)

    assert delete_partitions(instance, ledger, retention, dry_run=True) == 1
    assert list(instance.get_dynamic_partitions("batches")) == keys
    for _ in range(3):
        delete_partitions(instance, ledger, Retention())
    assert set(instance.get_dynamic_partitions("batches")) == {"not-a-batch", old[1], new, running}

    instance.report_run_canceled(busy)
    assert delete_partitions(instance, ledger, retention) == 1
    assert set(instance.get_dynamic_partitions("batches")) == {"not-a-batch", new, running}


def test_no_partition_goes_while_a_run_of_a_range_is_under_way(instance: dg.DagsterInstance, sqlite_url: str) -> None:
    clock = SteppedClock()
    ledger = Ledger.open(sqlite_url, clock=clock)
    old = _ended(ledger, "old")
    clock.advance(31 * DAY)
    instance.add_dynamic_partitions("batches", [old])
    tags = {"dagster/asset_partition_range_start": "a", "dagster/asset_partition_range_end": "b"}
    create_run_for_test(instance, status=DagsterRunStatus.STARTED, tags=tags)
    assert delete_partitions(instance, ledger, Retention()) == 0
    assert instance.has_dynamic_partition("batches", old)


def test_the_runs_of_a_partition_go_with_it_and_others_once_no_partition_can_be_left_of_what_they_served(
    instance: dg.DagsterInstance, sqlite_url: str
) -> None:
    clock = SteppedClock()
    ledger = Ledger.open(sqlite_url, clock=clock)
    old = _ended(ledger, "old")
    clock.advance(31 * DAY)
    new = _ended(ledger, "new")
    instance.add_dynamic_partitions("batches", [old, new])

    def run(status: DagsterRunStatus = DagsterRunStatus.SUCCESS, **tags: str) -> str:
        return create_run_for_test(instance, status=status, tags={REPOSITORY_LABEL_TAG: HERE, **tags}).run_id

    gone = {run(**{"dagster/partition": old}) for _ in range(2)}
    merge, worker = run(**{"dagster/partition": new}), run()
    under_way = run(DagsterRunStatus.STARTED)
    settings = Settings()

    delete_partitions(instance, ledger, Retention(), dry_run=True)
    assert set(instance.get_run_ids()) == {*gone, merge, worker, under_way}
    assert delete_partitions(instance, ledger, Retention()) == 1
    assert set(instance.get_run_ids()) == {merge, worker, under_way}

    longest_days = settings.retention.partitions_days + settings.intake.max_window_seconds / DAY
    now = datetime.now(UTC).timestamp()
    assert delete_runs(instance, settings, now + (longest_days - 1) * DAY, location=HERE) == 0
    assert delete_runs(instance, settings, now + (longest_days + 1) * DAY, location=HERE, dry_run=True) == 2
    assert delete_runs(instance, settings, now + (longest_days + 1) * DAY, location=HERE) == 2
    assert instance.get_run_ids() == [under_way]


def test_runs_of_others_in_the_same_dagster_and_those_of_usage_reports_stay(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A day whose run has gone would be one that was never reported."""
    monkeypatch.setattr("sensors.housekeeping._PAGE", 2)

    def run(location: str = HERE, job_name: str = "gpu_worker_a", **more: Any) -> str:
        tags = {REPOSITORY_LABEL_TAG: location}
        return create_run_for_test(instance, job_name, status=DagsterRunStatus.SUCCESS, tags=tags, **more).run_id

    worker = run()
    kept = [
        run(location="__repository__@another"),
        run(job_name="report_usage"),
        run(job_name="__ASSET_JOB", asset_selection=frozenset([dg.AssetKey("usage_report")])),
    ]
    other_worker = run()
    years = datetime.now(UTC).timestamp() + 1000 * DAY
    assert delete_runs(instance, Settings(), years, location=None) == 0
    assert set(instance.get_run_ids()) == {worker, other_worker, *kept}
    assert delete_runs(instance, Settings(), years, location=HERE) == 2
    assert set(instance.get_run_ids()) == set(kept)


def test_which_partitions_may_go_is_a_pure_choice() -> None:
    def chosen(at_most: int, per_run: int = 5) -> list[str]:
        ends = {"a": 30.5 * DAY, "c": 10.0 * DAY, "d": 0.5 * DAY, "e": 0.25 * DAY}
        retention = Retention(partitions_at_most=at_most, per_run=per_run)
        return partitions_to_delete(["a", "b", "c", "d", "e"], ends, retention, now=31.0 * DAY)

    assert chosen(at_most=5) == ["e", "d"], "what ended first goes first"
    assert chosen(at_most=5, per_run=1) == ["e"]
    assert chosen(at_most=4) == ["e", "d"], "those that are due make room enough"
    assert chosen(at_most=2) == ["e", "d", "c"]
    assert chosen(at_most=0) == ["e", "d", "c", "a"], "b has not ended"


def test_partitions_beyond_what_dagster_bears_go_before_their_time(
    instance: dg.DagsterInstance, sqlite_url: str
) -> None:
    ledger = Ledger.open(sqlite_url, clock=SteppedClock())
    ended = [_ended(ledger, f"ended-{number}") for number in range(3)]
    open_ones = [submitted(ledger, f"open-{number}").batch_id for number in range(2)]
    instance.add_dynamic_partitions("batches", [*open_ones, *ended])
    tags = {"dagster/partition": ended[0]}
    create_run_for_test(instance, job_name="merge", status=DagsterRunStatus.STARTED, tags=tags)
    assert delete_partitions(instance, ledger, Retention(partitions_at_most=3)) == 1
    assert set(instance.get_dynamic_partitions("batches")) == {*open_ones, ended[0], ended[2]}


def test_the_job_runs_and_has_a_schedule(
    instance: dg.DagsterInstance, settings_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with settings_file.open("a", encoding="utf-8") as file:
        file.write("\n[retention]\nledger_minutes = 0.0001\n")
    monkeypatch.setenv(CONFIG_VARIABLE, str(settings_file))
    from batch_pipeline.definitions import make_definitions

    settings = configuration.load()
    ledger, store = Ledger.from_settings(settings), ObjectStore.open(settings.store)
    batch = answered.create(ledger, store, [])
    assert batch.archived_at is None
    definitions = make_definitions(settings)
    repository = definitions.get_repository_def()
    schedule = repository.get_schedule_def("housekeeping")
    assert (schedule.cron_schedule, schedule.job_name) == ("*/30 * * * *", "housekeeping")
    result = definitions.resolve_job_def("housekeeping").execute_in_process(instance=instance)
    assert result.success
