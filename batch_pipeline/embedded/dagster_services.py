"""Dagster's three services on loopback: the code server, the webserver and the daemon.

The code server loads `batch_pipeline.definitions` once; the webserver and the daemon ask it over gRPC, and the
processes of runs are its children. Their instance (runs, events, schedules: SQLite) lives in one folder, DAGSTER_HOME.
"""

from __future__ import annotations

import socket
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from batch_pipeline.embedded.dagster_client import DagsterClient
from batch_pipeline.embedded.ports import LOOPBACK
from batch_pipeline.embedded.processes import Service
from batch_pipeline.errors import OperatorError
from batch_pipeline.settings import Settings

DEFINITIONS = "batch_pipeline.definitions"
LOCATION = "batch_pipeline"
_OTHER_RUNS = 2
"""Housekeeping and reports: a run of each."""
_BACKFILL_RUNS = 2
_RUNS_FROM_THE_UI = 4
"""More than of backfills, which have both tags where they are launched in the UI: some are left beside them."""
_HEARTBEAT_SECONDS = 600
"""For so long the process that has loaded the code waits for a sign of the code server that started it. On a busy
machine Dagster's own 30 s pass without one; the process then ends, and nothing starts another.
"""
_TIMEOUTS = {
    # Dagster's own minute is too short for a tick that copies files of many gigabytes inside the store,
    "DAGSTER_SENSOR_GRPC_TIMEOUT_SECONDS": "600",
    # and for a busy machine to start a run.
    "DAGSTER_GRPC_TIMEOUT_SECONDS": "180",
}

_INSTANCE = """\
# Written by `batch-pipeline up` at each start: changes made here are lost.
telemetry:
  enabled: false
nux:
  enabled: false

# A pool is a model; its limit is the model's pool_limit. With granularity `run` a run that waits for its pool stays
# QUEUED and costs nothing, and its place is free as soon as the run has ended; with `op` its process would spin, and a
# killed run would keep its place until the daemon frees it.
concurrency:
  pools:
    granularity: run
    default_limit: 1
  # Each kind of run has places of its own, so that a flood of one never keeps the others from theirs.
  runs:
    max_concurrent_runs: {max_concurrent_runs}
    tag_concurrency_limits:
      - {{key: batch_pipeline/stage, value: intake, limit: {runs_at_once}}}
      - {{key: batch_pipeline/stage, value: merge, limit: {runs_at_once}}}
      - {{key: batch_pipeline/stage, value: worker, limit: {total_gpus}}}
      # What operators launch may wait for workers for hours. A key without a value counts every run that has the key.
      - {{key: dagster/backfill, limit: {backfills}}}
      - {{key: dagster/from_ui, limit: {from_ui}}}
run_queue:
  dequeue_interval_seconds: 1

run_monitoring:
  enabled: true
  poll_interval_seconds: 5
  free_slots_after_run_end_seconds: 5
  start_timeout_seconds: 180
  cancel_timeout_seconds: {cancel_timeout_seconds}
  max_resume_run_attempts: 0

# Sensors in parallel, so that a slow one does not hold up the others.
sensors:
  use_threads: true
  num_workers: 4
backfills:
  use_threads: true
  num_workers: 2

retention:
  schedule:
    purge_after_days: 7
  sensor:
    purge_after_days:
      skipped: 1
      started: 1
      success: 7
      failure: 7
"""

_WORKSPACE = """\
# Written by `batch-pipeline up` at each start: changes made here are lost.
load_from:
  - grpc_server:
      host: {host}
      port: {port}
      location_name: {location}
"""


def prepare_home(settings: Settings, home: Path) -> Path:
    """Write `dagster.yaml` and `workspace.yaml` into DAGSTER_HOME; return the workspace file.

    Both are replaced in one step each: killed before or after, a service finds the old or the new one, whole.
    """
    home.mkdir(parents=True, exist_ok=True)
    instance = _INSTANCE.format(
        max_concurrent_runs=_runs_at_most(settings),
        runs_at_once=settings.scheduling.runs_at_once,
        total_gpus=settings.scheduling.total_gpus,
        backfills=_BACKFILL_RUNS,
        from_ui=_RUNS_FROM_THE_UI,
        cancel_timeout_seconds=int(settings.worker.grace_seconds) + 60,
    )
    _replace(home / "dagster.yaml", instance)
    workspace = home / "workspace.yaml"
    _replace(workspace, _WORKSPACE.format(host=LOOPBACK, port=settings.embedded.code_server_port, location=LOCATION))
    return workspace


def _runs_at_most(settings: Settings) -> int:
    """Return how many runs may be in progress: the sum of all kinds, each of which is used up only by its own."""
    pools = sum(model.pool_limit for model in settings.models.values())
    workers = max(settings.scheduling.total_gpus, pools)
    return workers + 2 * settings.scheduling.runs_at_once + _BACKFILL_RUNS + _RUNS_FROM_THE_UI + _OTHER_RUNS


def webserver_url(settings: Settings) -> str:
    """Return the address of the Dagster UI."""
    return f"http://{LOOPBACK}:{settings.embedded.dagster_port}"


def dagster_services(
    settings: Settings,
    home: Path,
    run_dir: Path,
    log_dir: Path,
    *,
    environment: Mapping[str, str],
    definitions: str = DEFINITIONS,
) -> tuple[Service, Service, Service]:
    """Return the code server, the webserver and the daemon, in the order in which to start them.

    `environment` is passed on to each, and by the code server to the runs.
    """
    port, ui_port = settings.embedded.code_server_port, settings.embedded.dagster_port
    workspace = str(home / "workspace.yaml")
    client = DagsterClient(webserver_url(settings))
    variables = {**environment, "DAGSTER_HOME": str(home), **_TIMEOUTS}
    code_server = Service(
        name="dagster-code-server",
        command=_program(
            *("dagster", "code-server", "start", "-m", definitions, "-h", LOOPBACK, "-p", str(port)),
            *("--heartbeat-ttl", str(_HEARTBEAT_SECONDS)),
        ),
        environment=variables,
        run_dir=run_dir,
        log_dir=log_dir,
        probe=lambda: _waits_for_port(port),
        ready_seconds=180.0,
    )
    webserver = Service(
        name="dagster-webserver",
        command=_program("dagster-webserver", "-h", LOOPBACK, "-p", str(ui_port), "-w", workspace),
        environment=variables,
        run_dir=run_dir,
        log_dir=log_dir,
        probe=lambda: _waits_for_webserver(client),
        ready_seconds=120.0,
    )
    daemon = Service(
        name="dagster-daemon",
        command=_program("dagster-daemon", "run", "-w", workspace),
        environment=variables,
        run_dir=run_dir,
        log_dir=log_dir,
        probe=lambda: _waits_for_daemon(client, daemon.started_at),
        ready_seconds=120.0,
    )
    return code_server, webserver, daemon


def _program(name: str, *words: str) -> list[str]:
    """Return the command of one of Dagster's programs, beside the Python that runs us."""
    return [str(Path(sysconfig.get_path("scripts")) / name), *words]


def _waits_for_port(port: int) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(2)
        return None if probe.connect_ex((LOOPBACK, port)) == 0 else f"port {port}"


def _waits_for_webserver(client: DagsterClient) -> str | None:
    try:
        client.version()
    except OperatorError as error:
        return str(error)
    return None


def _waits_for_daemon(client: DagsterClient, since: float) -> str | None:
    sick = client.sick_daemons(since)
    return f"a heartbeat of {', '.join(sick)}" if sick else None


def _replace(file: Path, text: str) -> None:
    new = file.with_name(file.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(file)
