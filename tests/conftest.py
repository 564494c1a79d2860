"""Real parts for the tests: started at first use, once a session, on free loopback ports, with data in tmp folders."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from batch_pipeline import settings as configuration
from batch_pipeline.embedded import postgres, seaweedfs
from batch_pipeline.ledger import Ledger
from batch_pipeline.store import ObjectStore
from batch_pipeline.store.client import make_client
from tests.fakes.databases import new_database

REPOSITORY = Path(__file__).resolve().parent.parent
MODEL = "smollm2-135m"

# How long an example takes is the machine's affair: hypothesis fails a test for one that takes 200 ms, as any may where
# other processes have the processor.
hypothesis_settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
hypothesis_settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of tests/integration/test_kubernetes_runs.py: docs/kubernetes.md says how they are used."""
    group = parser.getgroup("kubernetes", "a cluster to run the tests of the Kubernetes path on")
    group.addoption("--kubeconfig", type=Path, help="of that cluster; default: a small one of this machine's own")
    group.addoption("--kubernetes-image", default="batch-pipeline:test", help="with the service and these tests")
    group.addoption("--kubernetes-host", default="127.0.0.1", help="an address of this machine that pods reach")
    group.addoption("--kubernetes-gpu", default="nvidia.com/gpu", help="the resource that nodes offer as GPUs")
    group.addoption("--kubernetes-namespace", default="batch-pipeline-test", help="made, and deleted afterwards")


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[configuration.Store]:
    """A SeaweedFS of this session; yields how to reach it. Tests use `store_settings`, with a bucket of its own."""
    with seaweedfs.s3_server(tmp_path_factory.mktemp("s3")) as reachable:
        yield reachable


@pytest.fixture
def store_settings(s3_server: configuration.Store) -> Iterator[configuration.Store]:
    """The session's S3 server with a fresh, empty bucket for this test."""
    fresh = msgspec.structs.replace(s3_server, bucket=f"test-{secrets.token_hex(6)}")
    client = make_client(fresh)
    client.create_bucket(Bucket=fresh.bucket)
    yield fresh
    # Each bucket has volumes of its own, and the server has room for those of some 70 buckets.
    filled = ObjectStore(client, fresh.bucket)
    filled.delete_all(info.key for info in filled.list(""))
    client.delete_bucket(Bucket=fresh.bucket)


@pytest.fixture
def store(store_settings: configuration.Store) -> ObjectStore:
    """An object store with an empty bucket."""
    return ObjectStore.open(store_settings)


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Postgres of this session; yields the URL of its maintenance database. Tests use `postgres_url`."""
    with postgres.PostgresServer(tmp_path_factory.mktemp("postgres"), durable=False) as url:
        yield url


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """The URL of a fresh, empty Postgres database for this test."""
    name = f"test_{secrets.token_hex(6)}"
    yield new_database(postgres_server, name)
    engine = sa.create_engine(postgres_server, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection:
        connection.execute(sa.text(f"DROP DATABASE {name} WITH (FORCE)"))


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of a fresh SQLite database for this test."""
    return f"sqlite:///{tmp_path / 'ledger.sqlite'}"


@pytest.fixture(params=["sqlite", "postgres"])
def ledger_url(request: pytest.FixtureRequest) -> str:
    """The URL of a fresh, empty ledger database: the test runs once on SQLite and once on Postgres."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    """An empty ledger: the test runs once on SQLite and once on Postgres."""
    opened = Ledger.open(ledger_url)
    yield opened
    opened.close()


@pytest.fixture
def settings_file(tmp_path: Path, store_settings: configuration.Store) -> Path:
    """A configuration for this test alone: own bucket, SQLite ledger and folders; the real small model."""
    file = tmp_path / "batch-pipeline.toml"
    file.write_text(
        f"""
[store]
bucket = "{store_settings.bucket}"
endpoint_url = "{store_settings.endpoint_url}"
access_key_id = "{store_settings.access_key_id}"
secret_access_key = "{store_settings.secret_access_key}"

[models.{MODEL}]
source = "{REPOSITORY / "var" / "models" / MODEL}"
context_length = 2048
engine_arguments = ["--dtype", "float32", "--enforce-eager"]
prices = {{ input_per_million = 0.10, output_per_million = 0.20 }}

[models.{MODEL}.engine_environment]
VLLM_CPU_KVCACHE_SPACE = "2"
HF_HUB_OFFLINE = "1"
VLLM_NO_USAGE_STATS = "1"
DO_NOT_TRACK = "1"
""",
        encoding="utf-8",
    )
    return file


@pytest.fixture
def settings(settings_file: Path) -> configuration.Settings:
    """What `settings_file` says, untouched by this machine's environment."""
    return configuration.load(settings_file, environment={})
