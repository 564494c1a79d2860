"""The service on Kubernetes, for tests: a cluster, and beside it, on this machine, Postgres, S3, Dagster's code server
and its daemon with the instance file of deploy/, its times shortened. Pods get what they need as they do from deploy/:
by config maps, secrets and volumes.
"""

from __future__ import annotations

import os
import socket
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
import msgspec
import yaml

from batch_pipeline import settings as configuration
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch, BatchStatus
from batch_pipeline.models import job_name
from batch_pipeline.results.status import current_status
from batch_pipeline.results.verify import verify
from batch_pipeline.store import ObjectStore
from tests.fakes.clusters import Cluster
from tests.fakes.databases import new_database
from tests.fakes.engine import MODEL
from tests.fakes.relay import relayed, served

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAMS = Path(sysconfig.get_path("scripts"))
CONFIGURED = "/etc/batch-pipeline"
_WEIGHTS = f"weights/{MODEL}"
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
scratch_dir = "/scratch"
chunk_requests = 40
[worker]
lease_seconds = 6.0
heartbeat_seconds = 0.5
checkpoint_seconds = 0.5
poll_seconds = 0.2
warm_seconds = 60.0
grace_seconds = 4.0
[scheduling]
total_gpus = 4
sensor_interval_seconds = 3
chunks_per_worker = 2
retry_run_seconds = 1.0
[embedded]
data_dir = "{folder}"
[runs]
intake_cpu = "100m"
intake_memory = "1Gi"
merge_cpu = "100m"
merge_memory = "1Gi"
scratch = "1Gi"
"""
_MODEL = """
[models."{name}"]
source = "/models/smollm2-135m"
context_length = 2048
max_in_flight = 8
engine_start_seconds = 60.0
[models."{name}".engine_environment]
FAKE_ENGINE_OPTIONS = "--delay 0.15 --start-seconds 1 --journal {journal}"
[models."{name}".kubernetes]
gpu_resource = "{cluster.gpu_resource}"
engine_image = "{image}"
engine_command = ["python", "-m", "tests.fakes.engine_image"]
model_volume_claim = "{cluster.claim}"
weights_url = "{weights}"
weights_image = "{cluster.image}"
weights_secret = "weights"
priority_class = ""
grace_seconds = 20
start_seconds = {start}
cpu = "100m"
memory = "512Mi"
worker_cpu = "100m"
worker_memory = "1Gi"
node_selector = {{ {selector} }}
"""


class Journal:
    """The prompts that engines have received, as they tell them over a connection each."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def keep(self, connection: socket.socket) -> None:
        """Keep what one engine says, until it has ended."""
        with connection.makefile(encoding="utf-8") as said:
            self.lines += (line.rstrip("\n") for line in said)


class Stack:
    """What the tests talk to."""

    def __init__(
        self, cluster: Cluster, settings: configuration.Settings, instance: dg.DagsterInstance, journal: Journal
    ) -> None:
        self.cluster = cluster
        self.settings = settings
        self.instance = instance
        self.journal = journal
        self.ledger = Ledger.from_settings(settings)
        self.store = ObjectStore.open(settings.store)
        client = kubernetes.config.new_client_from_config(str(cluster.kubeconfig))
        self.jobs = kubernetes.client.BatchV1Api(client)
        self.core = kubernetes.client.CoreV1Api(client)

    def calls(self, words: str) -> list[str]:
        """Return the prompts with these words that an engine has received."""
        return [line for line in [*self.journal.lines] if words in line]

    def reason(self, batch: Batch) -> str:
        """Return what the batch's status says that it waits for."""
        return current_status(batch.batch_id, ledger=self.ledger, settings=self.settings).reason or ""

    def runs_on(self, batch: Batch) -> set[str]:
        """Return the runs whose workers have leases on the batch."""
        return {c.run_id for c in self.ledger.chunks.of(batch.batch_id) if c.state == "leased" and c.run_id}

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
        return list(self.core.list_namespaced_pod(self.cluster.namespace, label_selector=selector).items)

    def pod(self, run_id: str) -> Any:
        """Return the only pod of a run."""
        (pod,) = self.pods(run_id)
        return pod

    def begin(self, batch: Batch) -> None:
        """Let Dagster know a batch that did not come by the drop folder."""
        self.instance.add_dynamic_partitions("batches", [batch.batch_id])

    def has_run(self, batch: Batch) -> bool:
        """Whether all that was to run of the batch has run, be it merged or not."""
        return all(chunk.state == "committed" for chunk in self.ledger.chunks.of(batch.batch_id))

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
def stack(folder: Path, store: configuration.Store, postgres: str, cluster: Cluster) -> Iterator[Stack]:
    """Start everything, and end it again. `postgres` is the URL of a server's maintenance database.

    Everybody uses the addresses that pods can reach: one Dagster instance is handed to all of them.
    """
    with ExitStack() as stops:
        journal = Journal()
        port = stops.enter_context(served(cluster.host, journal.keep))
        postgres = stops.enter_context(relayed(postgres, cluster.host))
        endpoint = stops.enter_context(relayed(store.endpoint_url or "", cluster.host))
        store = msgspec.structs.replace(store, endpoint_url=endpoint)
        ledger, dagster = (new_database(postgres, name) for name in ("kubernetes_ledger", "kubernetes_dagster"))
        home, config = folder / "dagster", folder / "batch-pipeline.toml"
        home.mkdir()
        here, there = (
            _configuration(where, cluster, store, ledger, f"tcp://{cluster.host}:{port}")
            for where in (str(folder), "/tmp/batch-pipeline")  # noqa: S108 - the pod's own
        )
        config.write_text(here, encoding="utf-8")
        _make_objects(cluster, _dagster_environment(dagster, cluster), there, store)
        if not cluster.claim:
            _put_weights(ObjectStore.open(store))
        _write_home(home, urlsplit(dagster).port or 5432, cluster.kubeconfig)
        environment = {
            "PATH": f"{PROGRAMS}:{os.defpath}",
            "HOME": str(folder),
            "PYTHONPATH": str(REPOSITORY),
            "DAGSTER_HOME": str(home),
            configuration.CONFIG_VARIABLE: str(config),
            **_dagster_environment(dagster, cluster),
        }
        stops.enter_context(mock.patch.dict(os.environ, _dagster_environment(dagster, cluster)))
        instance = stops.enter_context(dg.DagsterInstance.from_config(str(home)))
        _start_services(stops, folder, home, {**environment, "DAGSTER_CURRENT_IMAGE": cluster.image})
        settings = configuration.load(config, environment={})
        yield Stack(cluster, settings, instance, journal)


def _configuration(folder: str, cluster: Cluster, store: configuration.Store, ledger: str, journal: str) -> str:
    text = _CONFIGURATION.format(store=store, ledger=ledger, folder=folder)
    models = {
        MODEL: (cluster.image, ""),
        "unplaceable": (cluster.image, 'gpu = "none-such"'),
        "unpullable": ("localhost/no-such:1", ""),
    }
    for name, (image, selector) in models.items():
        text += _MODEL.format(
            name=name,
            cluster=cluster,
            image=image,
            selector=selector,
            journal=journal,
            weights="" if cluster.claim else f"s3://{store.bucket}/{_WEIGHTS}",
            start=120 if name == MODEL else 25,
        )
    return text


def _dagster_environment(database: str, cluster: Cluster) -> dict[str, str]:
    """Return what every process with a Dagster instance has in its environment."""
    address = urlsplit(database)
    return {
        "DAGSTER_PG_HOST": address.hostname or "",
        "DAGSTER_PG_USERNAME": address.username or "",
        "DAGSTER_PG_PASSWORD": "none",
        "DAGSTER_PG_DB": address.path.removeprefix("/"),
        "DAGSTER_K8S_NAMESPACE": cluster.namespace,
    }


def _make_objects(cluster: Cluster, shared: Mapping[str, str], config: str, store: configuration.Store) -> None:
    """Make what the instance file of deploy/ and the model catalogue name."""
    client = kubernetes.client.CoreV1Api(kubernetes.config.new_client_from_config(str(cluster.kubeconfig)))
    client.create_namespaced_service_account(cluster.namespace, {"metadata": {"name": "batch-pipeline-run"}})
    for name, data in {
        "batch-pipeline": {"batch-pipeline.toml": config},
        "batch-pipeline-environment": {
            **shared,
            configuration.CONFIG_VARIABLE: f"{CONFIGURED}/batch-pipeline.toml",
        },
    }.items():
        client.create_namespaced_config_map(cluster.namespace, {"metadata": {"name": name}, "data": data})
    for name, data in {
        "batch-pipeline": {},
        "dagster-postgresql-secret": {"postgresql-password": shared["DAGSTER_PG_PASSWORD"]},
        "weights": {
            "AWS_ENDPOINT_URL": store.endpoint_url or "",
            "AWS_ACCESS_KEY_ID": store.access_key_id or "",
            "AWS_SECRET_ACCESS_KEY": store.secret_access_key or "",
        },
    }.items():
        client.create_namespaced_secret(cluster.namespace, {"metadata": {"name": name}, "stringData": data})


def _put_weights(store: ObjectStore) -> None:
    """Put what intake and the fake engine need of a model where pods fetch it from: all but the weights themselves."""
    for file in (REPOSITORY / "var" / "models" / MODEL).iterdir():
        if file.suffix != ".safetensors":
            store.put(f"{_WEIGHTS}/{file.name}", file.read_bytes())


def _write_home(home: Path, postgres_port: int, kubeconfig: Path) -> None:
    """Write the instance file of deploy/ with what differs here: where things are, and shorter times."""
    instance = yaml.safe_load((REPOSITORY / "deploy" / "dagster.yaml").read_text(encoding="utf-8"))
    instance["storage"]["postgres"]["postgres_db"]["port"] = postgres_port
    # Pods are handed this very path, and may write there too.
    artifacts = str(home / "artifacts")
    instance["local_artifact_storage"]["config"]["base_dir"] = artifacts
    instance["compute_logs"] = {
        "module": "dagster._core.storage.noop_compute_log_manager",
        "class": "NoOpComputeLogManager",
    }
    launcher = instance["run_launcher"]["config"]
    launcher |= {"load_incluster_config": False, "kubeconfig_file": str(kubeconfig)}
    launcher["volumes"].append({"name": "artifacts", "empty_dir": {}})
    launcher["volume_mounts"].append({"name": "artifacts", "mount_path": artifacts})
    instance["run_monitoring"] |= {
        "poll_interval_seconds": 2,
        "free_slots_after_run_end_seconds": 1,
        "start_timeout_seconds": 180,
        "cancel_timeout_seconds": 60,
    }
    (home / "dagster.yaml").write_text(yaml.safe_dump(instance), encoding="utf-8")


def _start_services(stops: ExitStack, folder: Path, home: Path, environment: Mapping[str, str]) -> None:
    """Start the code server and the daemon; the server's image is what runs are started from."""
    address = str(folder / "code.sock")
    server = ["code-server", "start", "-m", "batch_pipeline.definitions", "-s", address]
    workspace = home / "workspace.yaml"
    location = {"grpc_server": {"socket": address, "location_name": "batch_pipeline"}}
    workspace.write_text(yaml.safe_dump({"load_from": [location]}), encoding="utf-8")
    _start(stops, folder, environment, "dagster", *server)
    deadline = time.monotonic() + _SECONDS
    while not Path(address).exists():
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
