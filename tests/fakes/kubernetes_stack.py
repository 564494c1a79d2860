"""The service on Kubernetes, for tests: a cluster (of `tests.fakes.kubernetes`, or a real one), and beside it, on this
machine, Postgres, S3, Dagster's code server and its daemon with the instance file of deploy/, its times shortened.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import dagster as dg
import kubernetes
import sqlalchemy as sa
import yaml

from batch_pipeline import settings as configuration
from batch_pipeline.embedded.ports import LOOPBACK
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch, BatchStatus
from batch_pipeline.models import job_name
from batch_pipeline.results.status import current_status
from batch_pipeline.results.verify import verify
from batch_pipeline.store import ObjectStore
from tests.fakes.engine import MODEL
from tests.fakes.kubernetes import Cluster, Image, Node, running

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAMS = Path(sysconfig.get_path("scripts"))
NAMESPACE = "default"
ORCHESTRATOR = "orchestrator:test"
ENGINE = "engine:test"
_SECONDS = 180.0
_POLL_SECONDS = 0.25
_CONFIGURATION = """
[store]
bucket = "{store.bucket}"
endpoint_url = "{store.endpoint_url}"
access_key_id = "{store.access_key_id}"
secret_access_key = "{store.secret_access_key}"
[ledger]
url = "{ledger}"
[intake]
scratch_dir = "{folder}/scratch"
chunk_requests = 40
[worker]
lease_seconds = 8.0
heartbeat_seconds = 0.5
checkpoint_seconds = 0.5
poll_seconds = 0.2
warm_seconds = 60.0
grace_seconds = 4.0
[scheduling]
total_gpus = 4
sensor_interval_seconds = 3
chunks_per_worker = 100
retry_run_seconds = 1.0
[embedded]
data_dir = "{folder}"
"""
_MODEL = """
[models."{name}"]
source = "{source}"
context_length = 2048
max_in_flight = 8
engine_start_seconds = 60.0
[models."{name}".engine_environment]
FAKE_ENGINE_OPTIONS = "--delay 0.15 --start-seconds 1 --journal {journal}"
[models."{name}".kubernetes]
engine_image = "{image}"
engine_command = ["python", "-m", "tests.fakes.kubernetes.engine"]
priority_class = ""
grace_seconds = 20
start_seconds = {start}
node_selector = {{ {selector} }}
"""


class Stack:
    """What the tests talk to."""

    def __init__(
        self, folder: Path, cluster: Cluster, settings: configuration.Settings, instance: dg.DagsterInstance
    ) -> None:
        self.cluster = cluster
        self.settings = settings
        self.instance = instance
        self.ledger = Ledger.from_settings(settings)
        self.store = ObjectStore.open(settings.store)
        self.journal = folder / "journal.txt"
        client = kubernetes.config.new_client_from_config(str(cluster.kubeconfig))
        self.jobs = kubernetes.client.BatchV1Api(client)
        self.core = kubernetes.client.CoreV1Api(client)

    def calls(self, words: str) -> list[str]:
        """Return the prompts with these words that an engine has received."""
        if not self.journal.exists():
            return []
        return [line for line in self.journal.read_text(encoding="utf-8").splitlines() if words in line]

    def reason(self, batch: Batch) -> str:
        """Return what the batch's status says that it waits for."""
        return current_status(batch.batch_id, ledger=self.ledger, settings=self.settings).reason or ""

    def run_of(self, batch: Batch) -> str | None:
        """Return the run whose worker has a lease on the batch."""
        return next((c.run_id for c in self.ledger.chunks.of(batch.batch_id) if c.state == "leased"), None)

    def runs(self, model: str = MODEL) -> list[dg.DagsterRun]:
        """Return the runs of a model's workers, the newest first."""
        return list(self.instance.get_runs(dg.RunsFilter(job_name=job_name(model))))

    def run(self, run_id: str) -> dg.DagsterRun:
        """Return a run."""
        run = self.instance.get_run_by_id(run_id)
        assert run is not None
        return run

    def pods(self, run_id: str) -> list[Any]:
        """Return the pods of a run."""
        selector = f"dagster/run-id={run_id}"
        return list(self.core.list_namespaced_pod(NAMESPACE, label_selector=selector).items)

    def pod(self, run_id: str) -> Any:
        """Return the only pod of a run."""
        (pod,) = self.pods(run_id)
        return pod

    def begin(self, batch: Batch) -> None:
        """Let Dagster know a batch that did not come by the drop folder."""
        self.instance.add_dynamic_partitions("batches", [batch.batch_id])

    def finish(self, batch: Batch) -> Batch:
        """Wait until the batch is complete, and prove its files."""
        self.wait(
            lambda: self.ledger.batches.get(batch.batch_id).status is BatchStatus.COMPLETED,
            lambda: f"{batch.batch_id} is complete: {self.reason(batch)}",
        )
        proof = verify(batch.batch_id, ledger=self.ledger, store=self.store)
        assert proof.holds, proof.problems
        return self.ledger.batches.get(batch.batch_id)

    def wait(self, condition: Callable[[], bool], what: Callable[[], str] | str) -> None:
        """Wait for a condition; fail with what did not come true."""
        deadline = time.monotonic() + _SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"not true in time: {what if isinstance(what, str) else what()}")
            time.sleep(_POLL_SECONDS)


@contextmanager
def stack(folder: Path, store: configuration.Store, postgres: str) -> Iterator[Stack]:
    """Start everything, and end it again. `postgres` is the URL of a server's maintenance database."""
    with ExitStack() as stops:
        config = folder / "batch-pipeline.toml"
        databases = {name: _database(postgres, name) for name in ("kubernetes_ledger", "kubernetes_dagster")}
        config.write_text(_configuration(folder, store, databases["kubernetes_ledger"]), encoding="utf-8")
        home = folder / "dagster"
        address = urlsplit(postgres)
        environment = {
            "PATH": f"{PROGRAMS}:{os.defpath}",
            "HOME": str(folder),
            "PYTHONPATH": str(REPOSITORY),
            "DAGSTER_HOME": str(home),
            configuration.CONFIG_VARIABLE: str(config),
            "DAGSTER_PG_HOST": LOOPBACK,
            "DAGSTER_PG_USERNAME": "postgres",
            "DAGSTER_PG_PASSWORD": "none",
            "DAGSTER_PG_DB": "kubernetes_dagster",
            "DAGSTER_K8S_NAMESPACE": NAMESPACE,
        }
        in_pods = {name: environment[name] for name in ("PATH", "HOME", "PYTHONPATH")}
        images = {name: Image(environment=in_pods) for name in (ORCHESTRATOR, ENGINE)}
        nodes = [Node(f"gpu-{number}", gpus=1) for number in range(3)]
        cluster = stops.enter_context(running(folder, images, nodes))
        _make_objects(cluster, {key: value for key, value in environment.items() if key not in in_pods})
        home.mkdir()
        _write_home(home, address.port or 5432, cluster.kubeconfig)
        ours = {key: environment[key] for key in environment if key.startswith(("DAGSTER_PG", "DAGSTER_K8S"))}
        stops.enter_context(mock.patch.dict(os.environ, ours))
        instance = stops.enter_context(dg.DagsterInstance.from_config(str(home)))
        _start_services(stops, folder, home, environment)
        settings = configuration.load(config, environment={})
        yield Stack(folder, cluster, settings, instance)


def _configuration(folder: Path, store: configuration.Store, ledger: str) -> str:
    text = _CONFIGURATION.format(store=store, ledger=ledger, folder=folder)
    models = {MODEL: (ENGINE, ""), "unplaceable": (ENGINE, 'gpu = "none-such"'), "unpullable": ("no-such:1", "")}
    source = REPOSITORY / "var" / "models" / MODEL
    for name, (image, selector) in models.items():
        text += _MODEL.format(
            name=name,
            source=source,
            image=image,
            selector=selector,
            journal=folder / "journal.txt",
            start=120 if name == MODEL else 25,
        )
    return text


def _database(server: str, name: str) -> str:
    engine = sa.create_engine(server, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection:
        connection.execute(sa.text(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    return server.rpartition("/")[0] + f"/{name}"


def _make_objects(cluster: Cluster, environment: Mapping[str, str]) -> None:
    """Make the config map and the secrets that the launcher's configuration names."""
    client = kubernetes.client.CoreV1Api(kubernetes.config.new_client_from_config(str(cluster.kubeconfig)))
    named = {"metadata": {"name": "batch-pipeline-environment"}, "data": dict(environment)}
    client.create_namespaced_config_map(NAMESPACE, named)
    for name, data in {
        "batch-pipeline": {},
        "dagster-postgresql-secret": {"postgresql-password": environment["DAGSTER_PG_PASSWORD"]},
    }.items():
        client.create_namespaced_secret(NAMESPACE, {"metadata": {"name": name}, "stringData": data})


def _write_home(home: Path, postgres_port: int, kubeconfig: Path) -> None:
    """Write the instance file of deploy/ with what differs here: where things are, and shorter times."""
    instance = yaml.safe_load((REPOSITORY / "deploy" / "dagster.yaml").read_text(encoding="utf-8"))
    instance["storage"]["postgres"]["postgres_db"]["port"] = postgres_port
    instance["local_artifact_storage"]["config"]["base_dir"] = str(home)
    del instance["compute_logs"]
    instance["run_launcher"]["config"] |= {
        "dagster_home": str(home),
        "load_incluster_config": False,
        "kubeconfig_file": str(kubeconfig),
    }
    instance["run_monitoring"] |= {
        "poll_interval_seconds": 2,
        "free_slots_after_run_end_seconds": 1,
        "start_timeout_seconds": 180,
        "cancel_timeout_seconds": 60,
    }
    (home / "dagster.yaml").write_text(yaml.safe_dump(instance), encoding="utf-8")


def _start_services(stops: ExitStack, folder: Path, home: Path, environment: Mapping[str, str]) -> None:
    """Start the code server and the daemon; the server's image is what runs are started from."""
    socket = str(folder / "code.sock")
    server = ["code-server", "start", "-m", "batch_pipeline.definitions", "-s", socket]
    workspace = home / "workspace.yaml"
    location = {"grpc_server": {"socket": socket, "location_name": "batch_pipeline"}}
    workspace.write_text(yaml.safe_dump({"load_from": [location]}), encoding="utf-8")
    code = {**environment, "DAGSTER_CURRENT_IMAGE": ORCHESTRATOR}
    _start(stops, folder, code, "dagster", *server)
    deadline = time.monotonic() + _SECONDS
    while not Path(socket).exists():
        assert time.monotonic() < deadline, (folder / "dagster.log").read_text(encoding="utf-8")
        time.sleep(_POLL_SECONDS)
    _start(stops, folder, environment, "dagster-daemon", "run", "-w", str(workspace))


def _start(stops: ExitStack, folder: Path, environment: Mapping[str, str], program: str, *words: str) -> None:
    log = stops.enter_context((folder / f"{program}.log").open("wb"))
    command = [sys.executable, str(PROGRAMS / program), *words]
    process = subprocess.Popen(command, env=dict(environment), stdout=log, stderr=log, cwd=folder)
    stops.callback(_stop, process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
