"""Dagster's face, in one process: sensors request runs, runs do what their names say. Real S3, real ledger."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from sqlalchemy.exc import OperationalError

from batch_pipeline import settings as configuration
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import BatchStatus, WorkerState
from batch_pipeline.models import job_name
from batch_pipeline.results.status import current_status
from batch_pipeline.settings import CONFIG_VARIABLE
from batch_pipeline.store import ObjectStore
from tests.fakes.code_location import CodeLocation
from tests.fakes.engine import MODEL, RunningFake, running
from tests.fakes.ledger_values import submitted
from tests.fakes.waiting import wait_until

ASSETS = ("uploads", "request_chunks", "chunk_results", "batch_results")


def _line(custom_id: str, content: str = "hello", **body: Any) -> bytes:
    request = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": "smollm2-135m",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 8,
            **body,
        },
    }
    return json.dumps(request).encode() + b"\n"


@pytest.fixture
def engine() -> Iterator[RunningFake]:
    with running() as fake:
        yield fake


@pytest.fixture
def location(
    engine: RunningFake, settings_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[CodeLocation]:
    with settings_file.open("a", encoding="utf-8") as file:
        file.write("\n[worker]\nwarm_seconds = 0.1\npoll_seconds = 0.05\n")
    monkeypatch.setenv(CONFIG_VARIABLE, str(settings_file))
    monkeypatch.setenv("BATCH_PIPELINE__MODELS__SMOLLM2-135M__ENGINE_URL", engine.url)
    with dg.instance_for_test(temp_dir=str(tmp_path)) as instance:
        yield CodeLocation(configuration.load(), instance)


@pytest.fixture
def parts(location: CodeLocation) -> tuple[Ledger, ObjectStore]:
    return Ledger.from_settings(location.settings), ObjectStore.open(location.settings.store)


def _drop(store: ObjectStore, data: bytes, name: str = "questions", customer: str = "acme") -> None:
    store.put(f"inbox/{customer}/{name}.jsonl", data)


def _run_through(location: CodeLocation) -> str:
    """Bring the one dropped file through all three kinds of runs; return its batch's id."""
    (intake,) = location.tick("drop_folder")
    assert location.execute(intake).success
    (worker,) = location.tick("gpu_workers")
    assert location.execute(worker).success
    (merge,) = location.tick("batch_progress")
    assert location.execute(merge).success
    location.tick("batch_progress")
    return str(intake.partition_key)


def test_a_dropped_file_becomes_results_with_its_lineage(
    location: CodeLocation, parts: tuple[Ledger, ObjectStore]
) -> None:
    ledger, store = parts
    _drop(store, b"".join(_line(f"q{i}") for i in range(5)) + b"{bad\n")
    batch_id = _run_through(location)

    batch = ledger.batches.get(batch_id)
    assert batch.status == BatchStatus.COMPLETED
    assert (batch.total, batch.completed, batch.invalid) == (6, 5, 1)
    for asset in ASSETS:
        assert location.materialized(asset) == {batch_id}, asset
    lines = store.get("outbox/acme/questions/output.jsonl").splitlines()
    assert [json.loads(line)["custom_id"] for line in lines] == [f"q{i}" for i in range(5)]
    assert json.loads(store.get("outbox/acme/questions/status.json"))["status"] == "completed"
    assert store.head("inbox/acme/questions.jsonl") is None


def test_a_batch_costs_dagster_two_runs_and_few_steps_and_events(
    location: CodeLocation, parts: tuple[Ledger, ObjectStore]
) -> None:
    """Counted, so that none is added unseen: each is a row that is written, and ten thousand batches come a day."""
    _drop(parts[1], b"".join(_line(f"q{i}") for i in range(5)))
    batch_id = _run_through(location)
    runs = location.instance.get_runs(dg.RunsFilter(tags={"dagster/partition": batch_id}))
    events = {run.job_name: location.instance.get_records_for_run(run.run_id).records for run in runs}
    steps = {
        job: sum(record.event_log_entry.dagster_event_type == dg.DagsterEventType.STEP_START for record in records)
        for job, records in events.items()
    }
    assert steps == {"intake": 3, "merge": 1}
    assert len(events["intake"]) <= 24
    assert len(events["merge"]) <= 25


def test_a_run_loads_nothing_that_only_others_need() -> None:
    """Each run is a process of its own, and most of what it costs is what it imports."""
    heavy = "{'aiohttp', 'polars', 'kubernetes', 'fastapi', 'tokenizers', 'transformers', 'torch', 'vllm'}"
    code = f"import sys, batch_pipeline.definitions; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_every_result_file_is_proved_by_checks(location: CodeLocation, parts: tuple[Ledger, ObjectStore]) -> None:
    _drop(parts[1], _line("a"))
    (intake,) = location.tick("drop_folder")
    location.execute(intake)
    (worker,) = location.tick("gpu_workers")
    location.execute(worker)
    (merge,) = location.tick("batch_progress")
    result = location.execute(merge)
    checks = {check.check_name: check.passed for check in result.get_asset_check_evaluations()}
    of_files = {"exactly_one_result": True, "nothing_unknown": True, "manifest_agrees": True}
    assert checks == {**of_files, "no_chunk_given_up": True, "requests_answered": True, "on_time": True}


def test_a_worker_outlives_an_outage_of_dagsters_database_and_the_merge_shows_its_chunks(
    location: CodeLocation, parts: tuple[Ledger, ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> dg.AssetMaterialization:
        raise OperationalError("INSERT", {}, Exception("database is locked"))

    _drop(parts[1], _line("a"))
    (intake,) = location.tick("drop_folder")
    location.execute(intake)
    (launch,) = location.tick("gpu_workers")
    with monkeypatch.context() as patched:
        patched.setattr("assets.gpu_workers.chunk_results_event", away)
        assert location.execute(launch).success
    assert location.materialized("chunk_results") == set()
    (merge,) = location.tick("batch_progress")
    assert location.execute(merge).success
    assert location.materialized("chunk_results") == {str(intake.partition_key)}


def test_launching_any_asset_again_changes_nothing(location: CodeLocation, parts: tuple[Ledger, ObjectStore]) -> None:
    ledger, store = parts
    _drop(store, _line("a") + _line("b"))
    batch_id = _run_through(location)
    before = ledger.batches.get(batch_id)
    output = store.get(str(before.output_key))
    for asset in ASSETS[1:]:
        assert location.launch(asset, batch_id).success
    assert location.launch("batch_results", batch_id, rebuild=True).success
    assert ledger.batches.get(batch_id) == before
    assert store.get(str(before.output_key)) == output


def test_two_ticks_before_the_run_starts_request_one_intake(
    location: CodeLocation, parts: tuple[Ledger, ObjectStore]
) -> None:
    _drop(parts[1], _line("a"))
    assert len(location.tick("drop_folder")) == 1
    assert location.tick("drop_folder") == []


def test_a_run_that_never_came_is_requested_again(
    location: CodeLocation, parts: tuple[Ledger, ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sensors.runs.LONGEST_PAUSE_SECONDS", 0.0)
    _drop(parts[1], _line("a"))
    (first,) = location.tick("drop_folder")
    (second,) = location.tick("drop_folder")
    assert first.partition_key == second.partition_key
    assert first.run_key != second.run_key


def test_a_run_that_was_created_and_never_queued_is_forgotten_after_a_while(
    location: CodeLocation, parts: tuple[Ledger, ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon creates a run and then queues it; where the second fails, nothing in Dagster ever ends that run."""
    monkeypatch.setattr("sensors.runs.LONGEST_PAUSE_SECONDS", 0.0)
    _drop(parts[1], _line("a"))
    (request,) = location.tick("drop_folder")
    location.instance.create_run_for_job(
        location.definitions.resolve_job_def("intake"), tags={"dagster/partition": str(request.partition_key)}
    )
    assert location.tick("drop_folder") == [], "it may be queued any moment"
    monkeypatch.setattr("sensors.runs.BORN_SECONDS", 0.0)
    (again,) = location.tick("drop_folder")
    assert again.partition_key == request.partition_key


def test_a_worker_that_was_created_and_never_queued_does_not_keep_its_place(
    location: CodeLocation, parts: tuple[Ledger, ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    _drop(parts[1], _line("a"))
    (intake,) = location.tick("drop_folder")
    location.execute(intake)
    location.instance.create_run_for_job(location.definitions.resolve_job_def("gpu_worker_smollm2_135m"))
    assert location.tick("gpu_workers") == []
    monkeypatch.setattr("sensors.runs.BORN_SECONDS", 0.0)
    assert len(location.tick("gpu_workers")) == 1


def test_workers_whose_process_dies_at_once_are_not_launched_every_few_seconds(
    location: CodeLocation, parts: tuple[Ledger, ObjectStore]
) -> None:
    """Killed before they can tell the ledger anything, as by a container without enough memory."""
    _drop(parts[1], _line("a"))
    (intake,) = location.tick("drop_folder")
    location.execute(intake)
    job = location.definitions.resolve_job_def("gpu_worker_smollm2_135m")
    location.instance.report_run_failed(location.instance.create_run_for_job(job))
    assert len(location.tick("gpu_workers")) == 1, "one may have been preempted"
    location.instance.report_run_failed(location.instance.create_run_for_job(job))
    assert location.tick("gpu_workers") == []


def test_many_files_are_taken_in_bounded_ticks(
    location: CodeLocation, parts: tuple[Ledger, ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = location.settings.scheduling.sensor_batch
    places = location.settings.scheduling.runs_at_once
    for number in range(limit + 5):
        _drop(parts[1], _line("a"), name=f"file-{number:03d}")
    assert len(location.tick("drop_folder")) == 2 * places
    assert len([*parts[1].list("inbox/")]) == 5
    assert len(location.tick("drop_folder")) == 2 * places
    assert [*parts[1].list("inbox/")] == []
    assert len(parts[0].batches.recent(limit=1000)) == limit + 5


def test_a_flood_of_one_customer_keeps_no_other_from_its_run(
    location: CodeLocation, parts: tuple[Ledger, ObjectStore]
) -> None:
    for number in range(20):
        _drop(parts[1], _line("a"), customer="flood", name=f"file-{number:03d}")
    job = location.definitions.resolve_job_def("intake")
    for request in location.tick("drop_folder"):
        tags = {**request.tags, "dagster/partition": str(request.partition_key)}
        location.instance.create_run_for_job(job, tags=tags, status=dg.DagsterRunStatus.STARTED)
    _drop(parts[1], _line("a"), customer="quiet", name="single")
    assert location.tick("drop_folder") == [], "every place is taken, and as many wait"
    first, second, *_ = location.instance.get_runs()
    for run in (first, second):
        location.instance.report_run_canceled(run)
    requested = location.tick("drop_folder")
    assert [request.tags["batch_pipeline/customer"] for request in requested] == ["quiet", "flood"]


def test_a_batch_that_is_not_done_is_not_merged(location: CodeLocation, parts: tuple[Ledger, ObjectStore]) -> None:
    ledger, store = parts
    _drop(store, _line("a"))
    (intake,) = location.tick("drop_folder")
    location.execute(intake)
    with pytest.raises(dg.Failure, match="chunks"):
        location.launch("batch_results", str(intake.partition_key))
    assert ledger.batches.get(str(intake.partition_key)).status == BatchStatus.IN_PROGRESS
    assert location.materialized("chunk_results") == set(), "its chunks are still to run"


def test_pools_have_the_limits_of_the_catalogue(location: CodeLocation) -> None:
    location.tick("gpu_workers")
    limits = {pool.name: pool.limit for pool in location.instance.event_log_storage.get_pool_limits()}
    assert limits["smollm2-135m"] == location.settings.models["smollm2-135m"].pool_limit


@pytest.fixture
def two_models(settings_file: Path, engine: RunningFake) -> None:
    """Another model beside the usual one, and a single GPU for both."""
    with settings_file.open("a", encoding="utf-8") as file:
        file.write(f'\n[models.other]\nsource = "/none"\ncontext_length = 2048\nengine_url = "{engine.url}"\n')
        file.write("[scheduling]\ntotal_gpus = 1\nturn = 1.0\nloading_seconds = 0.05\n")


@pytest.mark.usefixtures("two_models")
def test_a_gpu_that_a_worker_was_asked_to_leave_goes_to_the_model_that_waits_for_it(
    location: CodeLocation, parts: tuple[Ledger, ObjectStore]
) -> None:
    ledger, _ = parts
    submitted(ledger, "long", [MODEL] * 40, "acme")
    submitted(ledger, "short", ["other"], "initech")
    (first,) = location.tick("gpu_workers")
    assert first.job_name == job_name(MODEL), "it has more to do, and neither was served before"
    run = location.instance.create_run_for_job(
        location.definitions.resolve_job_def(str(first.job_name)), status=dg.DagsterRunStatus.STARTED
    )
    ledger.workers.register("w", MODEL, run.run_id, "here")
    ledger.workers.set_state("w", WorkerState.READY)

    def is_asked() -> bool:
        assert location.tick("gpu_workers") == []
        return ledger.workers.of_runs([run.run_id])[run.run_id].leave

    wait_until(is_asked, "it has had its turn")
    ledger.workers.set_state("w", WorkerState.STOPPED)
    location.instance.report_run_canceled(run)
    (second,) = location.tick("gpu_workers")
    assert second.job_name == job_name("other")


@pytest.fixture
def dedicating(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four GPUs, of which one worker takes all the backlog there is, and two may be for single batches."""
    for name, value in {
        "MODELS__SMOLLM2-135M__POOL_LIMIT": "4",
        "MODELS__SMOLLM2-135M__TOKENS_PER_SECOND": "1.0",
        "SCHEDULING__TOTAL_GPUS": "4",
        "SCHEDULING__DEDICATED_WORKERS_AT_MOST": "2",
        "INTAKE__CHUNK_REQUESTS": "2",
    }.items():
        monkeypatch.setenv(f"BATCH_PIPELINE__{name}", value)
    # Two ticks may come at one moment here.
    monkeypatch.setattr("batch_pipeline.ledger.model_queues.KEPT_SECONDS", 0.0)


@pytest.mark.usefixtures("dedicating")
def test_a_batch_that_would_end_too_late_gets_a_worker_of_its_own_once(
    location: CodeLocation, parts: tuple[Ledger, ObjectStore]
) -> None:
    ledger, store = parts
    _drop(store, b"".join(_line(f"q{number}") for number in range(8)))
    (intake,) = location.tick("drop_folder")
    location.execute(intake)
    (general,) = location.tick("gpu_workers")
    assert "batch_pipeline/dedicated_to" not in general.tags
    (backlog,) = ledger.backlog()
    # A worker needs a second for each token: two thirds of that are left, beside the loading.
    seconds = location.settings.scheduling.loading_seconds + backlog.pending_tokens / 1.5
    with ledger._database.write() as tx:
        tx.connection.exec_driver_sql(f"UPDATE batches SET deadline_at = {tx.now + seconds}")
    _, dedicated = location.tick("gpu_workers")
    batch_id = str(intake.partition_key)
    assert dedicated.tags["batch_pipeline/dedicated_to"] == batch_id
    assert dedicated.run_config == {"ops": {"run_chunks_smollm2_135m": {"config": {"batches": [batch_id]}}}}
    job = location.definitions.resolve_job_def(str(dedicated.job_name))
    location.instance.create_run_for_job(
        job, run_config=dedicated.run_config, tags=dict(dedicated.tags), status=dg.DagsterRunStatus.STARTED
    )
    (other,) = location.tick("gpu_workers")
    assert "batch_pipeline/dedicated_to" not in other.tags, (
        "others wait too, and the dedicated worker does nothing for them"
    )


def test_no_worker_is_launched_without_backlog_nor_beyond_the_pool(
    location: CodeLocation, parts: tuple[Ledger, ObjectStore]
) -> None:
    assert location.tick("gpu_workers") == []
    _drop(parts[1], _line("a"))
    (intake,) = location.tick("drop_folder")
    location.execute(intake)
    assert len(location.tick("gpu_workers")) == 1


def test_workers_are_asked_to_leave_when_live_traffic_needs_their_gpus_and_none_is_launched(
    location: CodeLocation, parts: tuple[Ledger, ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, store = parts
    _drop(store, _line("a"))
    (intake,) = location.tick("drop_folder")
    location.execute(intake)
    job = location.definitions.resolve_job_def("gpu_worker_smollm2_135m")
    run = location.instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED)
    ledger.workers.register("w1", "smollm2-135m", run.run_id, "here")
    ledger.workers.set_state("w1", WorkerState.READY)
    assert location.tick("gpu_workers") == []
    assert not ledger.workers.heartbeat("w1").leave
    monkeypatch.setenv("BATCH_PIPELINE__LIVE__SCHEDULE", '[{hours = "00:00-24:00", gpus = 1}]')
    at_day = CodeLocation(configuration.load(), location.instance)
    assert at_day.tick("gpu_workers") == []
    assert ledger.workers.heartbeat("w1").leave
    location.instance.report_run_canceled(run)
    ledger.workers.set_state("w1", WorkerState.STOPPED)
    assert at_day.tick("gpu_workers") == []
    waiting = current_status(str(intake.partition_key), ledger=ledger, settings=location.settings)
    assert "live traffic needs 1 of 1 GPUs" in str(waiting.reason)
    assert len(location.tick("gpu_workers")) == 1


def test_a_worker_waits_as_a_queued_run_in_the_pool_of_its_model(location: CodeLocation) -> None:
    job = location.definitions.resolve_job_def("gpu_worker_smollm2_135m")
    (node,) = job.nodes
    assert node.definition.pool == "smollm2-135m"  # type: ignore[attr-defined]
    assert "dagster-k8s/config" in job.tags


def test_every_definition_loads_as_the_code_server_loads_it(location: CodeLocation) -> None:
    location.repository.load_all_definitions()
    dg.Definitions.validate_loadable(location.definitions)
