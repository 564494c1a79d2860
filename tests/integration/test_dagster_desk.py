"""The operator's desk: what a batch's partition shows, its lineage, launches that run again, checks and alarms."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import msgspec
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus
from dagster._core.loader import LoadingContextForTest
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecordStatus

from batch_pipeline import alarms
from batch_pipeline import settings as configuration
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.alarms import AlarmKind
from batch_pipeline.ledger.records import BatchStatus
from batch_pipeline.results.audit import audit
from batch_pipeline.settings import CONFIG_VARIABLE
from batch_pipeline.store import ObjectStore
from sensors.alarms import Seen, raise_run_failed
from sensors.progress import observations
from tests.fakes.code_location import CodeLocation
from tests.fakes.engine import running
from tests.fakes.ledger_values import result_of

ASSETS = ("uploads", "request_chunks", "chunk_results", "batch_results")
MODEL = "smollm2-135m"


def line(custom_id: str, **body: Any) -> bytes:
    request = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, **body},
    }
    return json.dumps(request).encode() + b"\n"


class Desk:
    """A code location with its parts."""

    def __init__(self, location: CodeLocation) -> None:
        self.location = location
        self.instance = location.instance
        self.ledger = Ledger.from_settings(location.settings)
        self.store = ObjectStore.open(location.settings.store)

    def take_in(self, name: str, data: bytes) -> str:
        """Drop a file, and run its intake."""
        self.store.put(f"inbox/acme/{name}.jsonl", data)
        (intake,) = self.location.tick("drop_folder")
        assert self.location.execute(intake).success
        return str(intake.partition_key)

    def work(self) -> None:
        """Run one worker until there is nothing left."""
        (worker,) = self.location.tick("gpu_workers")
        assert self.location.execute(worker).success

    def event(self, asset: str, batch_id: str) -> dg.AssetMaterialization:
        """Return the newest event of a batch's asset."""
        key = dg.AssetKey(asset)
        filters = dg.EventRecordsFilter(
            dg.DagsterEventType.ASSET_MATERIALIZATION, asset_key=key, asset_partitions=[batch_id]
        )
        (record,) = self.instance.get_event_records(filters, limit=1)
        assert record.asset_materialization is not None
        return record.asset_materialization

    def stale(self, asset: str, batch_id: str, definitions: dg.Definitions | None = None) -> list[str]:
        """Return why Dagster thinks that a batch's asset is out of date."""
        graph = (definitions or self.location.definitions).resolve_asset_graph()
        resolver = CachingStaleStatusResolver(self.instance, graph, LoadingContextForTest(self.instance))
        key = dg.AssetKey(asset)
        causes = [cause.reason for cause in resolver.get_stale_causes(key, batch_id)]
        status = resolver.get_status(key, batch_id)
        assert (status == StaleStatus.STALE) == bool(causes)
        return causes

    def checks(self, asset: str, batch_id: str) -> dict[str, bool]:
        """Return the newest verdict of each check on a batch's asset."""
        filters = dg.EventRecordsFilter(dg.DagsterEventType.ASSET_CHECK_EVALUATION)
        verdicts: dict[str, bool] = {}
        for record in reversed(self.instance.get_event_records(filters, limit=1000)):
            dagster_event = record.event_log_entry.dagster_event
            assert dagster_event is not None
            found = dagster_event.asset_check_evaluation_data
            if found.asset_key == dg.AssetKey(asset) and found.partition in (batch_id, None):
                verdicts[found.check_name] = found.passed
        return verdicts

    def evaluated(self, run: dg.ExecuteInProcessResult) -> list[tuple[str, str]]:
        """Return partition and name of each check that a run has evaluated."""
        return sorted((one.partition or "", one.check_name) for one in run.get_asset_check_evaluations())

    def workers_check(self) -> bool:
        """Return what Dagster shows of the check that is about all models: its newest record, which has a verdict."""
        check = dg.AssetCheckKey(dg.AssetKey("chunk_results"), "every_model_has_workers")
        (newest,) = self.instance.event_log_storage.get_asset_check_execution_history(check, limit=1)
        assert newest.status != AssetCheckExecutionRecordStatus.PLANNED
        return newest.status == AssetCheckExecutionRecordStatus.SUCCEEDED

    def on_time(self, batch_id: str) -> bool:
        """Return what Dagster has as the newest verdict on whether a batch is in time."""
        check = dg.AssetCheckKey(dg.AssetKey("chunk_results"), "on_time")
        history = self.instance.event_log_storage.get_asset_check_execution_history(check, limit=20)
        newest = next(record for record in history if record.partition == batch_id)
        return newest.status == AssetCheckExecutionRecordStatus.SUCCEEDED


@pytest.fixture
def desk(settings_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Desk]:
    with settings_file.open("a", encoding="utf-8") as file:
        file.write("\n[worker]\nwarm_seconds = 0.1\npoll_seconds = 0.05\n[intake]\nchunk_requests = 4\n")
    monkeypatch.setenv(CONFIG_VARIABLE, str(settings_file))
    with running() as engine, dg.instance_for_test(temp_dir=str(tmp_path)) as instance:
        monkeypatch.setenv("BATCH_PIPELINE__MODELS__SMOLLM2-135M__ENGINE_URL", engine.url)
        opened = Desk(CodeLocation(configuration.load(), instance))
        yield opened
        opened.ledger.close()


def test_a_partition_tells_what_became_of_its_batch_and_where_it_came_from(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = desk.take_in("questions", b"".join(line(f"q{i}") for i in range(10)) + b"{bad\n" + line("n", n=99))
    desk.work()
    (merge,) = desk.location.tick("batch_progress")
    assert desk.location.execute(merge).success

    shown = {name: entry.value for name, entry in desk.event("batch_results", batch_id).metadata.items()}
    assert (shown["customer"], shown["status"], shown["name"]) == ("acme", "completed", "questions")
    assert shown["progress"] == "12 of 12 requests (100%)"
    assert (shown["requests_completed"], shown["requests_invalid"], shown["output_tokens"] > 0) == (10, 2, True)
    assert shown["cost_usd"] > 0
    assert shown["requests_per_second"] > 0
    head, _, picture = shown["time_line_of_chunks"].partition("base64,")
    assert head == "![time line of chunks](data:image/png;"
    assert base64.b64decode(picture.removesuffix(")")).startswith(b"\x89PNG")
    errors = [record.data["code"] for record in shown["top_errors"].records]
    assert sorted(errors) == ["invalid_json_line", "invalid_request"]
    assert f"s3://{desk.location.settings.store.bucket}/batches/{batch_id}/final/output.jsonl" in shown["files"]
    batch = desk.ledger.batches.get(batch_id)
    assert shown["upload_sha256"] == batch.input_sha256
    assert shown["intake_run"] == batch.intake_run_id
    first = shown["chunks"].records[0].data
    assert (first["state"], first["attempt"], first["engine"]) == ("committed", 1, "0.32.0")
    assert shown["worker_runs"] == [first["run"]]

    trail = audit(batch_id, ledger=desk.ledger, store=desk.store)
    for asset in ("uploads", "chunk_results", "batch_results"):
        tags = desk.event(asset, batch_id).tags or {}
        assert trail.data_versions[asset] == tags["dagster/data_version"], asset
    assert [(attempt.chunk, attempt.attempt, str(attempt.ended)) for attempt in trail.attempts] == [
        (number, 1, "committed") for number in range(3)
    ]
    assert {attempt.run_id for attempt in trail.attempts} == {first["run"]}
    assert desk.checks("request_chunks", batch_id) == {"every_line_accounted_for": True, "lines_valid": False}
    assert desk.checks("chunk_results", batch_id) == {
        "no_chunk_given_up": True,
        "requests_answered": True,
        "on_time": True,
    }

    for asset in ASSETS:
        assert desk.stale(asset, batch_id) == [], asset
    for asset in ASSETS[1:]:
        assert desk.location.launch(asset, batch_id).success
    for asset in ASSETS:
        assert desk.stale(asset, batch_id) == [], f"{asset} after everything was launched again"
    _other_bytes_and_other_models_are_stale(desk, batch_id)


def _other_bytes_and_other_models_are_stale(desk: Desk, batch_id: str) -> None:
    from batch_pipeline.definitions import make_definitions

    settings = desk.location.settings
    mended = msgspec.structs.replace(settings.models[MODEL], version="mended")
    other = make_definitions(msgspec.structs.replace(settings, models={MODEL: mended}))
    assert desk.stale("chunk_results", batch_id, other) == ["has a new code version"]
    assert desk.stale("request_chunks", batch_id, other) == []
    changed = dg.AssetObservation("uploads", partition=batch_id, tags={"dagster/data_version": "other bytes"})
    desk.instance.report_runless_asset_event(changed)
    assert desk.stale("request_chunks", batch_id) == ["has a new dependency data version"]


def test_what_is_committed_runs_again_only_where_it_is_asked_for_and_the_batch_is_in_progress(desk: Desk) -> None:
    batch_id = desk.take_in("again", b"".join(line(f"q{i}") for i in range(8)))
    first, _ = desk.ledger.chunks.lease("slow worker", MODEL, 2)
    desk.ledger.chunks.release(first.ref, "it gave way")
    anew = {"run_again": True, "wait_minutes": 0.0001}
    with pytest.raises(dg.Failure, match="still open"):
        desk.location.launch("chunk_results", batch_id, **anew)
    (lane,) = desk.ledger.batches.lanes(batch_id)
    assert (lane.pending, lane.leased) == (2, 0), "the chunk that was being run is to be run again"
    desk.work()
    (merge,) = desk.location.tick("batch_progress")
    with pytest.raises(Exception, match="as a new batch"):
        desk.location.launch("chunk_results", batch_id, run_again=True)
    assert desk.location.execute(merge).success
    before = desk.ledger.batches.get(batch_id)
    with pytest.raises(dg.Failure, match="its results are final and never change"):
        desk.location.launch("chunk_results", batch_id, run_again=True)
    assert desk.ledger.batches.get(batch_id) == before
    assert before.status == BatchStatus.COMPLETED


def test_progress_is_observed_in_steps_and_a_batch_at_risk_fails_its_check(desk: Desk) -> None:
    batch_id = desk.take_in("slow", b"".join(line(f"q{i}") for i in range(8)))
    parts = desk.location.parts()
    assert observations(parts) == []
    (lease, *_) = desk.ledger.chunks.lease("w", MODEL, 1)
    from tests.fakes.ledger_values import part_of

    desk.ledger.chunks.checkpoint(lease.ref, part_of(lease, 1, completed=3, failed=1))
    desk.location.tick("batch_observations")
    assert observations(parts) == [], "the step is shown"
    filters = dg.EventRecordsFilter(dg.DagsterEventType.ASSET_OBSERVATION, asset_key=dg.AssetKey("chunk_results"))
    (record,) = desk.instance.get_event_records(filters, limit=10)
    assert record.asset_observation is not None
    assert record.asset_observation.partition == batch_id
    assert record.asset_observation.metadata["progress"].value == "4 of 8 requests (50%)"

    with desk.ledger._database.write() as tx:  # the time to its deadline has passed but for an hour
        tx.connection.exec_driver_sql(
            "UPDATE batches SET in_progress_at = in_progress_at - 86400, deadline_at = deadline_at - 82800"
        )
    desk.location.tick("alarms")
    desk.location.tick("alarms")
    assert desk.on_time(batch_id) is False
    (alarm,) = desk.ledger.alarms.recent()
    assert (alarm.kind, alarm.subject) == (AlarmKind.BATCH_AT_RISK, batch_id)

    for hours, on_time in ((60, True), (-60, False)):
        with desk.ledger._database.write() as tx:
            tx.connection.exec_driver_sql(f"UPDATE batches SET deadline_at = deadline_at + {hours * 3600}")
        desk.location.tick("alarms")
        assert desk.on_time(batch_id) is on_time, "as often as it changes"


def test_a_model_with_work_and_no_worker_fails_its_check_until_one_is_there(desk: Desk) -> None:
    desk.take_in("waiting", line("a"))
    settings = msgspec.structs.replace(desk.location.settings.alarms, workerless_seconds=0.001)
    alone = alarms.workerless(desk.ledger, 60.0)
    assert alone == [MODEL]
    since = alarms.look_at_models(desk.ledger, {}, alone, settings)
    alarms.look_at_models(desk.ledger, {MODEL: since[MODEL] - 1.0}, alone, settings)
    (alarm,) = desk.ledger.alarms.recent(only_current=True)
    assert (alarm.kind, alarm.subject) == (AlarmKind.MODEL_WITHOUT_WORKERS, MODEL)
    desk.work()
    alone = alarms.workerless(desk.ledger, 60.0)
    assert alone == []
    alarms.look_at_models(desk.ledger, since, alone, settings)
    assert desk.ledger.alarms.recent(only_current=True) == []


def test_failed_runs_are_alarms_and_a_single_lost_worker_is_none(desk: Desk) -> None:
    intake = desk.location.definitions.resolve_job_def("intake")
    run = desk.instance.create_run_for_job(intake, tags={"dagster/partition": "batch_1"})
    assert raise_run_failed(desk.ledger, run, "the store\nis away")
    assert not raise_run_failed(desk.ledger, run, "the store is away")
    (alarm,) = desk.ledger.alarms.recent()
    assert alarm.text == f"run {run.run_id} (intake of batch_1) failed: the store is away"
    worker = desk.location.definitions.resolve_job_def("gpu_worker_smollm2_135m")
    sensor = desk.location.repository.get_sensor_def("failed_runs")
    assert isinstance(sensor, dg.RunStatusSensorDefinition)
    for expected in (1, 2):
        run = desk.instance.create_run_for_job(worker)
        failure = desk.instance.report_run_failed(run)
        desk.location.react("failed_runs", desk.instance.get_run_by_id(run.run_id), failure)
        assert len(desk.ledger.alarms.recent()) == expected


def test_every_field_that_a_launch_can_set_is_explained(desk: Desk) -> None:
    def unexplained(where: str, config: Any) -> list[str]:
        fields = getattr(config, "fields", {})
        found = [f"{where}.{name}" for name, field in fields.items() if not field.description]
        return found + [
            bad for name, field in fields.items() for bad in unexplained(f"{where}.{name}", field.config_type)
        ]

    seen = set()
    for job in desk.location.repository.get_all_jobs():
        for node in job.all_node_defs:
            config = node.config_schema.as_field().config_type if isinstance(node, dg.OpDefinition) else None
            assert unexplained(node.name, config) == []
            seen.update({f"{node.name}.{name}" for name in getattr(config, "fields", {})})
        service = job.resource_defs.get("service")
        assert service is None or unexplained("service", service.config_schema.as_field().config_type) == []
    assert {"chunk_results.run_again", "batch_results.rebuild", "tidy_up.dry_run"} <= seen
    assert "run_chunks_smollm2_135m.batches" in seen


def test_a_launch_with_a_wrong_value_says_which_field_and_changes_nothing(desk: Desk) -> None:
    batch_id = desk.take_in("waiting", line("a"))
    before = desk.ledger.batches.get(batch_id)
    for field, value in (
        ("wait_minutes", 0),
        ("priority", "high"),
        ("priority", 1001),
        ("run_agan", True),
        ("run_again_model_version", "1"),
    ):
        with pytest.raises(Exception, match=field):
            desk.location.launch("chunk_results", batch_id, **{field: value})
    assert desk.ledger.batches.get(batch_id) == before
    with pytest.raises(dg.Failure) as refused:
        desk.location.launch("chunk_results", batch_id, wait_minutes=0)
    assert refused.value.description == (
        "the config of this launch cannot be used, and nothing was changed: wait_minutes is 0.0: input should be "
        "greater than 0"
    )
    assert refused.value.allow_retries is False


def test_only_results_of_the_named_version_run_again(desk: Desk) -> None:
    batch_id = desk.take_in("two-chunks", b"".join(line(f"q{i}") for i in range(8)))
    first, _ = desk.ledger.chunks.lease("w", MODEL, 2)
    desk.ledger.chunks.commit(first.ref, result_of(first))
    anew = {"run_again": True, "wait_minutes": 0.0001}
    for version, pending in (("another", 1), ("1", 2)):
        with pytest.raises(dg.Failure, match="still open"):
            desk.location.launch("chunk_results", batch_id, run_again_model_version=version, **anew)
        (lane,) = desk.ledger.batches.lanes(batch_id)
        assert lane.pending == pending, version


def test_a_backfill_passes_over_batches_that_are_over_or_unknown_and_names_them(desk: Desk, capfd: Any) -> None:
    first, over, last = (desk.take_in(name, line(name)) for name in ("first", "over", "last"))
    desk.ledger.batches.cancel(over)
    desk.work()
    desk.instance.add_dynamic_partitions("batches", ["slip"])
    for _ in range(3):
        for merge in desk.location.tick("batch_progress"):
            desk.location.execute(merge)
    assert desk.ledger.batches.get(over).status == BatchStatus.CANCELLED
    keys = desk.instance.get_dynamic_partitions("batches")
    assert set(keys) == {first, over, last, "slip"}
    run = desk.location.backfill("chunk_results", keys)
    shown = {event.partition for event in run.asset_materializations_for_node("chunk_results")}
    assert shown == {first, last}
    assert f"2 of 4 batches were skipped, see above why: {over}, slip" in capfd.readouterr().err
    with pytest.raises(dg.Failure, match="its results are final and never change"):
        desk.location.backfill("chunk_results", keys, run_again=True)
    with desk.ledger._database.write() as tx:  # housekeeping has been there
        tx.connection.exec_driver_sql(
            f"UPDATE batches SET archived_at = ended_at, files_removed_at = ended_at WHERE batch_id = '{first}'"
        )
    run = desk.location.backfill("chunk_results", keys)
    assert [event.partition for event in run.asset_materializations_for_node("chunk_results")] == [last]
    assert "3 of 4 batches were skipped" in capfd.readouterr().err
    with pytest.raises(dg.Failure, match="were removed"):
        desk.location.launch("chunk_results", first)


@pytest.mark.parametrize("asset", ASSETS[1:])
def test_a_partition_that_is_no_batch_fails_with_one_sentence(desk: Desk, asset: str) -> None:
    desk.instance.add_dynamic_partitions("batches", ["slip"])
    with pytest.raises(dg.Failure) as failed:
        desk.location.launch(asset, "slip")
    assert failed.value.description == "no batch slip. The key of a partition is a batch's id: this one is none"
    assert failed.value.allow_retries is False


def test_a_launch_of_chunk_results_tells_its_checks(desk: Desk) -> None:
    one, two = (desk.take_in(name, line(name)) for name in ("one", "two"))
    desk.work()
    of_batch = ("no_chunk_given_up", "on_time", "requests_answered")
    of_all = ("", "every_model_has_workers")
    run = desk.location.launch("chunk_results", one)
    assert desk.evaluated(run) == [of_all, *((one, name) for name in of_batch)]
    assert desk.on_time(one) is True
    assert desk.workers_check() is True
    run = desk.location.backfill("chunk_results", desk.instance.get_dynamic_partitions("batches"))
    assert desk.evaluated(run) == [of_all, *sorted((batch, name) for batch in (one, two) for name in of_batch)]


def test_checks_of_batches_by_hand_evaluate_what_was_selected_and_ask_for_a_partition(desk: Desk) -> None:
    batch_id = desk.take_in("one", line("a"))
    run = desk.location.check("chunk_results", "on_time", batch_id=batch_id)
    assert desk.evaluated(run) == [(batch_id, "on_time")]
    run = desk.location.check("request_chunks", "lines_valid", batch_id=batch_id)
    assert desk.evaluated(run) == [(batch_id, "lines_valid")]
    for asset, check in (("chunk_results", "on_time"), ("request_chunks", "lines_valid")):
        with pytest.raises(dg.Failure, match="this run has no partition: launch their asset for a batch"):
            desk.location.check(asset, check)


def test_by_hand_a_model_without_a_worker_is_a_fault_when_it_is_one_for_the_sensor(desk: Desk) -> None:
    def looked_at(*, by_hand: bool) -> bool:
        if by_hand:
            desk.location.check("chunk_results", "every_model_has_workers")
        else:
            desk.location.tick("alarms", goes_on=True)
        return desk.workers_check()

    desk.take_in("waiting", line("a"))
    assert looked_at(by_hand=True) is True, "it has not waited for long"
    assert looked_at(by_hand=False) is True
    long_ago = desk.ledger.now() - desk.location.settings.alarms.workerless_seconds - 1
    desk.location.cursors["alarms"] = msgspec.json.encode(Seen({MODEL: long_ago})).decode()
    assert looked_at(by_hand=False) is False
    assert looked_at(by_hand=True) is False
    desk.work()
    assert desk.workers_check() is False, "nobody has looked since"
    assert looked_at(by_hand=False) is True
    assert looked_at(by_hand=True) is True


def test_the_sensor_says_no_more_of_models_than_has_changed_in_dagster(desk: Desk) -> None:
    check = dg.AssetCheckKey(dg.AssetKey("chunk_results"), "every_model_has_workers")

    def evaluations() -> int:
        return len(desk.instance.event_log_storage.get_asset_check_execution_history(check, limit=20))

    for _ in range(3):
        desk.location.tick("alarms", goes_on=True)
    assert evaluations() == 1
    desk.location.check("chunk_results", "every_model_has_workers")
    desk.location.tick("alarms", goes_on=True)
    assert evaluations() == 2
