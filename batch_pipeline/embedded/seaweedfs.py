"""SeaweedFS's S3 server on loopback: the embedded object store.

One process (`weed mini`) with keys of its own, telemetry off, and a bucket. It keeps what it acknowledged through a
kill -9, but does not fsync: not safe against power loss. Its other ports need no keys, hence loopback only.
"""

from __future__ import annotations

import shutil
import sysconfig
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from batch_pipeline import settings as configuration
from batch_pipeline.embedded.ports import LOOPBACK, free_ports, reserve
from batch_pipeline.embedded.processes import Service
from batch_pipeline.errors import OperatorError
from batch_pipeline.store import keys

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

MEMORY_LIMIT = "256MiB"
"""Without a limit the server grows to 2 GB under load; it is a goal of Go's collector and not a wall."""
_HTTP_OK = 200


def weed_binary() -> Path:
    """Return the server's program. Raises OperatorError where the `embedded` extra is not installed."""
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    found = beside if beside.is_file() else shutil.which("weed")
    if found is None:
        raise OperatorError("SeaweedFS is not installed: install batch-pipeline with the extra `embedded`")
    return Path(found)


def s3_service(store: configuration.Store, data_dir: Path, run_dir: Path, log_dir: Path) -> Service:
    """Return the service that serves `store` (a loopback endpoint with a port and two keys) from `data_dir`.

    It is ready when the keys open the bucket and an object can be written and read there. Raises OperatorError where
    `store` cannot be served by it.
    """
    port = urlsplit(store.endpoint_url or "").port
    if port is None:
        raise OperatorError(f"store.endpoint_url must be http://{LOOPBACK}:PORT, not {store.endpoint_url}")
    if not store.access_key_id or not store.secret_access_key:
        raise OperatorError(
            "store.access_key_id and store.secret_access_key must be set: without keys anyone may write"
        )
    data_dir.mkdir(parents=True, exist_ok=True)
    reserve(port)
    return Service(
        name="seaweedfs",
        command=_command(store.bucket, port, data_dir.absolute(), run_dir.absolute()),
        environment={
            "AWS_ACCESS_KEY_ID": store.access_key_id,
            "AWS_SECRET_ACCESS_KEY": store.secret_access_key,
            "GOMEMLIMIT": MEMORY_LIMIT,
        },
        run_dir=run_dir,
        log_dir=log_dir,
        probe=lambda: _waits_for(store),
    )


@contextmanager
def s3_server(folder: Path, bucket: str = "batch-pipeline") -> Iterator[configuration.Store]:
    """Run a server of one's own on a free port, with data, log and pid file below `folder`; yield how to reach it."""
    store = configuration.Store(
        bucket=bucket,
        endpoint_url=f"http://{LOOPBACK}:{free_ports(1)[0]}",
        access_key_id="test-access-key",
        secret_access_key="test-secret-key",  # noqa: S106
    )
    service = s3_service(store, folder / "data", folder, folder)
    try:
        service.start()
        service.wait_ready()
        yield store
    finally:
        service.stop()


def _command(bucket: str, s3_port: int, data_dir: Path, socket_dir: Path) -> list[str]:
    master, volume, filer, admin = free_ports(4)
    return [
        str(weed_binary()),
        "-logtostderr=true",
        "mini",
        f"-dir={data_dir}",
        f"-ip={LOOPBACK}",
        f"-ip.bind={LOOPBACK}",
        f"-s3.port={s3_port}",
        f"-master.port={master}",
        f"-volume.port={volume}",
        f"-filer.port={filer}",
        f"-admin.port={admin}",
        "-master.telemetry=false",
        "-webdav=false",
        "-admin.ui=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.autoCreateBucket=false",
        "-s3.allowDeleteBucketNotEmpty=false",
        f"-s3.localSocket={socket_dir / 's3.sock'}",
        f"-filer.localSocket={socket_dir / 'filer.sock'}",
        f"-bucket={bucket}",
    ]


def _waits_for(store: configuration.Store) -> str | None:
    try:
        with urllib.request.urlopen(f"{store.endpoint_url}/readyz", timeout=2) as answer:  # noqa: S310
            if answer.status != _HTTP_OK:
                return f"/readyz, which answers {answer.status}"
    except (urllib.error.URLError, OSError) as error:
        return f"/readyz ({error})"
    client = boto3.client(
        "s3",
        endpoint_url=store.endpoint_url,
        region_name=store.region,
        aws_access_key_id=store.access_key_id,
        aws_secret_access_key=store.secret_access_key,
        config=Config(connect_timeout=2, read_timeout=5, retries={"total_max_attempts": 1}),
    )
    try:
        names = {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}
        if store.bucket not in names:
            return f"the bucket {store.bucket}"
        _write_and_read(client, store.bucket)
    except (BotoCoreError, ClientError) as error:
        return f"its first answers ({error})"
    finally:
        client.close()
    return None


def _write_and_read(client: S3Client, bucket: str) -> None:
    """Use a small object. For a while after a start the server lists its buckets and cannot read what is in them.

    Killed in between, the object is left; the next start writes it again.
    """
    key = keys.probe("start")
    client.put_object(Bucket=bucket, Key=key, Body=b"ready")
    client.get_object(Bucket=bucket, Key=key)["Body"].read()
    client.delete_object(Bucket=bucket, Key=key)
