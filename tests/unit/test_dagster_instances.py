"""Dagster accepts the instance files, embedded and at scale, and reads in them what we mean."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import msgspec
import pytest
import yaml
from dagster._core.instance.config import ConcurrencyConfig, PoolGranularity, dagster_instance_config
from dagster._core.remote_origin import RegisteredCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin
from dagster._core.storage.tags import BACKFILL_ID_TAG
from dagster._daemon.run_coordinator.queued_run_coordinator_daemon import QueuedRunCoordinatorDaemon

from assets.partitions import STAGE_TAG
from batch_pipeline.embedded.dagster_services import DEFINITIONS, prepare_home
from batch_pipeline.models import Model
from batch_pipeline.settings import CONFIG_VARIABLE, Scheduling, Settings

FROM_UI = "dagster/from_ui"
"""What the UI gives every launch, backfill and re-execution (ui-core, launchpad/uiExecutionTags.tsx)."""
STAGES = ("worker", "intake", "merge")
DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def test_code_location_loads_as_the_code_server_loads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, str(DEPLOY.parent / "batch-pipeline.toml"))
    importlib.import_module(DEFINITIONS).defs.get_repository_def().load_all_definitions()


def test_embedded_instance_has_a_place_for_every_worker_and_some_more(tmp_path: Path) -> None:
    models = {name: Model(source="weights", context_length=1, pool_limit=3) for name in ("a", "b")}
    workspace = prepare_home(msgspec.structs.replace(Settings(), models=models), tmp_path)
    config, _ = dagster_instance_config(str(tmp_path))
    pools = ConcurrencyConfig.from_concurrency_settings(config["concurrency"], None).pool_config
    assert (pools.pool_granularity, pools.default_pool_limit) == (PoolGranularity.RUN, 1)
    assert config["concurrency"]["runs"]["max_concurrent_runs"] >= 6 + 2
    assert config["telemetry"] == {"enabled": False}
    assert config["run_monitoring"]["enabled"] is True
    [location] = yaml.safe_load(workspace.read_text(encoding="utf-8"))["load_from"]
    assert location["grpc_server"]["host"] == "127.0.0.1"


def test_instance_at_scale_is_valid_and_agrees_with_the_embedded_one(tmp_path: Path) -> None:
    scale, _ = dagster_instance_config(str(DEPLOY))
    prepare_home(Settings(), tmp_path)
    embedded, _ = dagster_instance_config(str(tmp_path))
    assert scale["concurrency"]["pools"] == embedded["concurrency"]["pools"]
    for field in ("enabled", "poll_interval_seconds", "free_slots_after_run_end_seconds", "max_resume_run_attempts"):
        assert scale["run_monitoring"][field] == embedded["run_monitoring"][field]
    assert scale["telemetry"] == embedded["telemetry"]


@dg.job
def something() -> None:
    """A run in the queue."""


class Queue:
    """The queue of the embedded instance, as Dagster's daemon reads it."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.instance = instance
        self.config = instance.get_concurrency_config()

    def add(self, tags: dict[str, str], runs: int = 1) -> set[str]:
        """Queue runs; returns their ids."""
        code = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("batch_pipeline"), "__repository__")
        origin = RemoteJobOrigin(code, "something")
        made = [
            self.instance.create_run_for_job(
                something, status=dg.DagsterRunStatus.QUEUED, remote_job_origin=origin, tags=tags
            )
            for _ in range(runs)
        ]
        return {run.run_id for run in made}

    def begin(self) -> set[str]:
        """Let the daemon choose, and begin what it has chosen: none of it ends. Returns their ids."""
        daemon = QueuedRunCoordinatorDaemon(interval_seconds=1)
        chosen = daemon._get_runs_to_dequeue(self.instance, self.config, None)
        for run in chosen:
            started = dg.DagsterEvent(event_type_value=dg.DagsterEventType.PIPELINE_START.value, job_name=run.job_name)
            self.instance.report_dagster_event(started, run_id=run.run_id)
        return {run.run_id for run in chosen}


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    prepare_home(Settings(), tmp_path)
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        yield Queue(instance)


@pytest.mark.parametrize(
    "tags",
    [{FROM_UI: "true"}, {BACKFILL_ID_TAG: "abc"}, {BACKFILL_ID_TAG: "abc", FROM_UI: "true"}],
    ids=["launched in the UI", "backfill by the API", "backfill launched in the UI"],
)
def test_what_operators_launch_keeps_no_worker_intake_or_merge_waiting(queue: Queue, tags: dict[str, str]) -> None:
    waiting = queue.add(tags, runs=50)
    begun = queue.begin()
    assert 0 < len(begun) < len(waiting), "they have places of their own, and no more"
    assert queue.begin() == set()
    for stage in STAGES:
        wanted = queue.add({STAGE_TAG: stage})
        assert queue.begin() == wanted, stage


def test_with_every_place_of_operators_taken_all_workers_intakes_and_merges_have_theirs(queue: Queue) -> None:
    queue.add({FROM_UI: "true"}, runs=50)
    queue.add({BACKFILL_ID_TAG: "abc"}, runs=50)
    queue.begin()
    scheduling = Settings().scheduling
    places = {"worker": scheduling.total_gpus, "intake": scheduling.runs_at_once, "merge": scheduling.runs_at_once}
    wanted = {run_id for stage, runs in places.items() for run_id in queue.add({STAGE_TAG: stage}, runs)}
    assert queue.begin() == wanted
    other = queue.add({})
    assert queue.begin() == other, "housekeeping, reports"


def test_a_backfill_in_the_ui_leaves_a_place_for_a_single_launch(queue: Queue) -> None:
    queue.add({BACKFILL_ID_TAG: "abc", FROM_UI: "true"}, runs=50)
    queue.begin()
    single = queue.add({FROM_UI: "true"})
    assert queue.begin() == single


@pytest.mark.parametrize("at_scale", [False, True], ids=["embedded", "at scale"])
def test_there_are_places_for_all_kinds_of_runs_at_once(tmp_path: Path, *, at_scale: bool) -> None:
    prepare_home(msgspec.structs.replace(Settings(), scheduling=Scheduling(total_gpus=9, runs_at_once=7)), tmp_path)
    config, _ = dagster_instance_config(str(DEPLOY if at_scale else tmp_path))
    runs = config["concurrency"]["runs"]
    limits = {(limit["key"], limit.get("value")): limit["limit"] for limit in runs["tag_concurrency_limits"]}
    assert limits.keys() == {*((STAGE_TAG, stage) for stage in STAGES), (BACKFILL_ID_TAG, None), (FROM_UI, None)}
    assert runs["max_concurrent_runs"] > sum(limits.values()), "and some for housekeeping and reports"
