"""Weights are fetched once, whatever happens meanwhile. On the real S3 server."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from batch_pipeline import settings as configuration
from batch_pipeline.errors import OperatorError, StoreError
from batch_pipeline.store import ObjectStore
from batch_pipeline.store.client import make_client
from batch_pipeline.store.weights import fetch

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "model-1.safetensors": bytes(3_000_000),
    "deep/er.txt": b"x",
}


@pytest.fixture
def url(store: ObjectStore) -> str:
    for name, data in FILES.items():
        store.put(f"weights/small/{name}", data)
    store.put("weights/small-other/config.json", b"not ours")
    return f"s3://{store.bucket}/weights/small"


@pytest.fixture
def client(store_settings: configuration.Store) -> Any:
    return make_client(store_settings)


def held(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file() and f.name[0] != "."}


def test_weights_that_are_complete_are_not_asked_for_again(client: Any, url: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "small"
    assert fetch(client, url, folder) == len(FILES)
    assert held(folder) == FILES
    assert fetch(None, url, folder) == 0  # type: ignore[arg-type]


def test_a_killed_fetch_goes_on_with_what_was_whole(client: Any, url: str, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()  # as Kubernetes does for a mount
    fetched: list[str] = []

    class Dying:
        def __getattr__(self, name: str) -> Any:
            return getattr(client, name)

        def download_file(self, bucket: str, key: str, target: str) -> None:
            if len(fetched) == 2:
                Path(target).write_bytes(b"half")
                raise KeyboardInterrupt
            fetched.append(key)
            client.download_file(bucket, key, target)

    with pytest.raises(KeyboardInterrupt):
        fetch(Dying(), url, folder)  # type: ignore[arg-type]
    assert held(folder) == {}, "nobody takes it for complete"
    fetched.clear()
    fetch(Dying(), url, folder)  # type: ignore[arg-type]
    assert len(fetched) == len(FILES) - 2
    assert held(folder) == FILES


def test_of_several_at_once_one_fetches(client: Any, url: str, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(lambda _: fetch(client, url, tmp_path / "small"), range(4)))
    assert sorted(counts) == [0, 0, 0, len(FILES)]
    assert held(tmp_path / "small") == FILES


def test_a_folder_with_other_weights_is_left_as_it_is(client: Any, url: str, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    fetch(client, url, folder)
    with pytest.raises(OperatorError, match="holds s3://"):
        fetch(client, f"{url}-other", folder)
    (tmp_path / "by-hand").mkdir()
    (tmp_path / "by-hand" / "config.json").touch()
    with pytest.raises(OperatorError, match="not fetched"):
        fetch(client, url, tmp_path / "by-hand")


def test_a_wrong_address_is_said(client: Any, url: str, tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="nothing at this address"):
        fetch(client, f"{url}/nowhere", tmp_path / "a")
    with pytest.raises(StoreError, match="cannot be fetched"):
        fetch(client, "s3://no-such-bucket-here/x", tmp_path / "b")


def test_intake_needs_no_weights(store_settings: configuration.Store, url: str, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    command = [sys.executable, "-m", "batch_pipeline.store.weights", url, str(folder), "--only-tokenizer"]
    environment = {
        **os.environ,
        "AWS_ENDPOINT_URL": str(store_settings.endpoint_url),
        "AWS_ACCESS_KEY_ID": str(store_settings.access_key_id),
        "AWS_SECRET_ACCESS_KEY": str(store_settings.secret_access_key),
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    subprocess.run(command, env=environment, check=True, timeout=60)
    assert held(folder) == {name: data for name, data in FILES.items() if not name.endswith(".safetensors")}
