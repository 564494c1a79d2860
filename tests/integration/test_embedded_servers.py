"""The embedded servers are the real programs, on loopback, and leave nothing behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import boto3
import psutil
import pytest
import sqlalchemy as sa
from botocore.config import Config
from botocore.exceptions import ClientError

from batch_pipeline import settings as configuration
from batch_pipeline.embedded import postgres, seaweedfs
from batch_pipeline.embedded.ports import LOOPBACK, free_ports
from batch_pipeline.embedded.processes import identify, wait_for_end
from batch_pipeline.errors import OperatorError
from batch_pipeline.store.objects import ObjectStore
from tests.chaos.parts import kill


def processes_mentioning(folder: Path) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]


def test_s3_server_refuses_wrong_keys(s3_server: configuration.Store) -> None:
    stranger = boto3.client(
        "s3",
        endpoint_url=s3_server.endpoint_url,
        region_name="us-east-1",
        aws_access_key_id=s3_server.access_key_id,
        aws_secret_access_key="wrong",
    )
    with pytest.raises(ClientError, match=r"SignatureDoesNotMatch|AccessDenied"):
        stranger.list_buckets()


def test_s3_server_listens_on_loopback_only_and_keeps_data_through_kill(tmp_path: Path) -> None:
    with seaweedfs.s3_server(tmp_path) as reachable:
        ObjectStore.open(reachable).put("kept", b"through a crash")
        [server] = processes_mentioning(tmp_path)
        listening = {c.laddr.ip for c in server.net_connections("inet") if c.status == psutil.CONN_LISTEN}
        assert listening == {LOOPBACK}
        identity = identify(server.pid)
        assert identity is not None
        os.kill(server.pid, signal.SIGKILL)
        assert wait_for_end([identity], 20) == []
    with seaweedfs.s3_server(tmp_path) as reachable:
        assert ObjectStore.open(reachable).get("kept") == b"through a crash"
    assert processes_mentioning(tmp_path) == []


def test_s3_server_that_is_ready_again_after_a_kill_reads_and_writes_at_once(tmp_path: Path) -> None:
    with seaweedfs.s3_server(tmp_path) as reachable:
        client = boto3.client(
            "s3",
            endpoint_url=reachable.endpoint_url,
            region_name=reachable.region,
            aws_access_key_id=reachable.access_key_id,
            aws_secret_access_key=reachable.secret_access_key,
            config=Config(retries={"total_max_attempts": 1}),
        )
        service = seaweedfs.s3_service(reachable, tmp_path / "data", tmp_path, tmp_path)
        for number in range(3):
            client.put_object(Bucket=reachable.bucket, Key=f"key-{number}", Body=b"value")
            kill(service.family())
            service.start()
            service.wait_ready()
            assert client.get_object(Bucket=reachable.bucket, Key=f"key-{number}")["Body"].read() == b"value"
        service.stop()


def test_s3_server_without_keys_is_not_started(tmp_path: Path) -> None:
    open_to_all = configuration.Store(endpoint_url=f"http://{LOOPBACK}:{free_ports(1)[0]}")
    with pytest.raises(OperatorError, match=r"store\.access_key_id and store\.secret_access_key must be set"):
        seaweedfs.s3_service(open_to_all, tmp_path, tmp_path, tmp_path)


def test_postgres_whose_pid_file_is_just_being_written_is_not_ready_yet(tmp_path: Path) -> None:
    server = postgres.PostgresServer(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "postmaster.pid").touch()
    assert server._waits_for() == "the first line of postmaster.pid"


def test_postgres_keeps_committed_rows_through_kill_and_ends_with_its_block(tmp_path: Path) -> None:
    server = postgres.PostgresServer(tmp_path)
    with server as url:
        engine = sa.create_engine(url, poolclass=sa.NullPool)
        with engine.begin() as connection:
            connection.execute(sa.text("CREATE TABLE kept (word text)"))
            connection.execute(sa.text("INSERT INTO kept VALUES ('through a crash')"))
        pid = int((tmp_path / "data" / "postmaster.pid").read_text().split()[0])
        family = [p for p in map(identify, [pid, *(c.pid for c in psutil.Process(pid).children())]) if p is not None]
        os.kill(pid, signal.SIGKILL)
        assert wait_for_end(family, 20) == []
    with server as url, sa.create_engine(url, poolclass=sa.NullPool).connect() as connection:
        assert connection.execute(sa.text("SELECT word FROM kept")).scalar_one() == "through a crash"
    assert processes_mentioning(tmp_path) == []


def test_postgres_that_cannot_start_says_why(tmp_path: Path) -> None:
    with postgres.PostgresServer(tmp_path / "first") as url:
        port = int(url.rpartition(":")[2].partition("/")[0])
        with pytest.raises(OperatorError, match=r"(?s)postgres ended with status 1.*Address already in use"):
            postgres.PostgresServer(tmp_path / "second", port).start()


def test_folder_left_by_a_killed_initdb_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "data.new").mkdir()
    (tmp_path / "data.new" / "PG_VERSION").write_text("18\n")
    with (
        postgres.PostgresServer(tmp_path, durable=False) as url,
        sa.create_engine(url, poolclass=sa.NullPool).connect() as connection,
    ):
        assert connection.execute(sa.text("SELECT 1")).scalar_one() == 1
