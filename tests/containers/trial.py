"""A batch through the service in containers: API, code location, daemon, webserver, and the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import yaml

from batch_pipeline.embedded.ports import LOOPBACK, free_ports
from batch_pipeline.embedded.postgres import PostgresServer
from batch_pipeline.embedded.seaweedfs import s3_server
from deploy import objects
from tests.containers.image import ROOT, Engine
from tests.fakes import engine as fake_engine

MODEL = "tiny"
HOME = "/opt/dagster/dagster_home"
CONFIGURED = "/etc/batch-pipeline"
REQUESTS = 40
_START_SECONDS = 120.0
_BATCH_SECONDS = 900.0
_STOP_SECONDS = 30
_LOCKED = (
    *("--network", "host", "--read-only", "--read-only-tmpfs=false", "--tmpfs", "/tmp:rw,mode=1777"),  # noqa: S108
    *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
    *("--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096"),
)


class TrialError(Exception):
    """What does not work, in one line."""


class Trial:
    """One run of everything, with data below `folder`."""

    def __init__(self, engine: Engine, image: str, folder: Path, say: Callable[[str], None]) -> None:
        self._engine, self._image, self._folder, self._say = engine, image, folder, say
        self._api, self._code, self._ui = free_ports(3)
        self._environment: dict[str, str] = {}

    def run(self) -> None:
        """Start what the service needs, then the service, hand in a batch and verify it. Raises TrialError."""
        self._check_image()
        with ExitStack() as stack:
            postgres = stack.enter_context(PostgresServer(self._folder / "postgres", durable=False))
            store = stack.enter_context(s3_server(self._folder / "store"))
            fake = stack.enter_context(fake_engine.running("--model", MODEL))
            self._configure(postgres, fake.url, store)
            self._command("batch-pipeline", "config")
            self._command("batch-pipeline", "doctor")
            self._say("doctor: nothing must be mended")
            for name, words, is_ready in self._services():
                stack.enter_context(self._service(name, words, is_ready))
            self._batch()

    def _check_image(self) -> None:
        user = self._command("id", "--user").strip()
        self._expect(user == "10001", f"it runs as user {user}")
        program = "import importlib.util as u, sys; print([m for m in sys.argv[1:] if u.find_spec(m)])"
        there = self._command("python", "-c", program, "torch", "vllm", "transformers", "pip", "pytest").strip()
        self._expect(there == "[]", f"it has {there}")
        self._say("image: not root, without torch, vllm, transformers, pip")

    def _configure(self, postgres: str, engine_url: str, store: Any) -> None:
        """Write what config maps and secrets hold on a cluster."""
        with psycopg.connect(postgres.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute("CREATE DATABASE dagster")
            connection.execute("CREATE DATABASE batch_pipeline")
            port = connection.info.port
        configuration = self._folder / "configuration"
        configuration.mkdir(parents=True)
        shutil.copytree(ROOT / "var" / "models" / "tiny-random", self._folder / "models" / MODEL)
        (configuration / "batch-pipeline.toml").write_text(
            f'[store]\nendpoint_url = ""\n[worker]\nwarm_seconds = 1.0\n'
            f'[models.{MODEL}]\nsource = "/models/{MODEL}"\ncontext_length = 2048\n',
            encoding="utf-8",
        )
        instance = yaml.safe_load((objects.DEPLOY / "dagster.yaml").read_text(encoding="utf-8"))
        del instance["run_launcher"]
        instance["storage"]["postgres"]["postgres_db"]["port"] = port
        (configuration / "dagster.yaml").write_text(yaml.safe_dump(instance), encoding="utf-8")
        server = {"host": LOOPBACK, "port": self._code, "location_name": "batch-pipeline"}
        workspace = yaml.safe_dump({"load_from": [{"grpc_server": server}]})
        (configuration / "workspace.yaml").write_text(workspace, encoding="utf-8")
        [shared] = [one["data"] for one in objects.read(objects.BASE / "environment.yaml")]
        self._environment = {
            **shared,
            "KUBERNETES_SERVICE_HOST": LOOPBACK,  # as in every container there
            "AWS_ENDPOINT_URL_S3": store.endpoint_url,
            "AWS_ACCESS_KEY_ID": store.access_key_id,
            "AWS_SECRET_ACCESS_KEY": store.secret_access_key,
            "BATCH_PIPELINE__LEDGER__URL": f"{postgres.removesuffix('postgres')}batch_pipeline",
            "BATCH_PIPELINE__WORKER__ENGINE_URL": engine_url,
            "DAGSTER_PG_HOST": LOOPBACK,
            "DAGSTER_PG_USERNAME": "postgres",
            "DAGSTER_PG_PASSWORD": "not-asked-for",
            "DAGSTER_PG_DB": "dagster",
        }

    def _services(self) -> Iterator[tuple[str, list[str], Callable[[], bool]]]:
        """Yield each process as the manifests and the chart start it, and how it is found to be ready."""
        api = ["batch-pipeline", "serve", "--host", LOOPBACK, "--port", str(self._api)]
        yield "api", api, lambda: self._answers(f"http://{LOOPBACK}:{self._api}/readyz")
        code = [
            "dagster",
            "api",
            "grpc",
            "-h",
            LOOPBACK,
            "-p",
            str(self._code),
            "--module-name",
            "batch_pipeline.definitions",
        ]
        healthy = ("dagster", "api", "grpc-health-check", "-p", str(self._code))
        yield "code-location", code, lambda: self._succeeds("code-location", *healthy)
        workspace = f"-w {CONFIGURED}/workspace.yaml"
        ui = ["/bin/bash", "-c", f"dagster-webserver -h {LOOPBACK} -p {self._ui} {workspace}"]
        yield "webserver", ui, lambda: self._answers(f"http://{LOOPBACK}:{self._ui}/server_info")
        daemon = ["/bin/bash", "-c", f"dagster-daemon run {workspace}"]
        yield "daemon", daemon, lambda: self._succeeds("daemon", "dagster-daemon", "liveness-check")

    @contextmanager
    def _service(self, name: str, words: list[str], is_ready: Callable[[], bool]) -> Iterator[None]:
        container, began = self._named(name), time.monotonic()
        self._engine("run", "--detach", "--name", container, *self._options(), self._image, *words)
        try:
            self._wait(is_ready, _START_SECONDS, f"{name} does not get ready")
            self._say(f"{name}: ready in {time.monotonic() - began:.0f} s")
            yield
        except BaseException:
            subprocess.run([*self._engine.command, "logs", "--tail", "40", container], check=False)
            raise
        finally:
            self._engine("stop", "--time", str(_STOP_SECONDS), container)
            code = self._engine("inspect", "--format", "{{.State.ExitCode}}", container).strip()
            self._engine("rm", "--force", container)
            self._say(f"{name}: left with exit status {code}")

    def _batch(self) -> None:
        """Hand in a file by the command line, wait until it is over, and verify it; see its run's logs in the store."""
        file = self._folder / "configuration" / "requests.jsonl"
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        lines = [
            {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            for number in range(REQUESTS)
        ]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        began = time.monotonic()
        submitted = self._command("batch-pipeline", "submit", f"{CONFIGURED}/{file.name}", "--customer", "acme")
        batch = submitted.split()[-1]
        self._wait(lambda: self._status(batch)["status"] == "completed", _BATCH_SECONDS, "the batch is not completed")
        self._say(f"batch: {REQUESTS} requests completed in {time.monotonic() - began:.0f} s")
        self._say(f"verify: {self._command('batch-pipeline', 'verify', batch).strip().splitlines()[-1]}")

    def _status(self, batch: str) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self._command("batch-pipeline", "status", batch, "--json"))
        return status

    def _options(self) -> list[str]:
        variables = [word for key, value in self._environment.items() for word in ("--env", f"{key}={value}")]
        if not variables:
            return [*_LOCKED]
        mounts = {"configuration": CONFIGURED, "models": "/models"}
        volumes = [word for here, there in mounts.items() for word in ("-v", f"{self._folder / here}:{there}:ro")]
        instance = f"{self._folder / 'configuration' / 'dagster.yaml'}:{HOME}/dagster.yaml:ro"
        return [*_LOCKED, *variables, *volumes, "-v", instance]

    def _command(self, *words: str) -> str:
        """Run a command in a container of its own and return what it prints."""
        command = [*self._engine.command, "run", "--rm", *self._options(), self._image, *words]
        ran = subprocess.run(command, check=False, capture_output=True, text=True)
        self._expect(ran.returncode == 0, f"{' '.join(words)} ({ran.returncode}): {(ran.stderr or ran.stdout)[-800:]}")
        return ran.stdout

    def _succeeds(self, service: str, *words: str) -> bool:
        """Whether a command in a service's container ends well: what the kubelet's exec probe asks."""
        command = [*self._engine.command, "exec", self._named(service), *words]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

    def _named(self, service: str) -> str:
        return f"batch-pipeline-{service}-{self._api}"

    @staticmethod
    def _answers(url: str) -> bool:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - of our own making
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    @staticmethod
    def _wait(condition: Callable[[], bool], seconds: float, problem: str) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise TrialError(f"{problem} within {seconds:.0f} s")
            time.sleep(1.0)

    @staticmethod
    def _expect(holds: bool, otherwise: str) -> None:
        if not holds:
            raise TrialError(otherwise)
