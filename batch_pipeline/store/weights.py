"""Fetches a model's weights from S3 into a folder, once.

    python -m batch_pipeline.store.weights s3://BUCKET/FOLDER /weights/NAME [--only-tokenizer]

The init container of pods whose weights are not in a claim already. Credentials and address are boto3's own (AWS_...).

A folder that is complete says so in a file of its own; nothing is asked of the store then. Files are fetched into a
folder beside it, which takes the folder's name once all are there. Killed at any moment, the next one goes on with the
files that were whole; several at once (pods on one volume) wait for the first.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import boto3
import msgspec
from boto3.exceptions import Boto3Error
from botocore.exceptions import BotoCoreError, ClientError

from batch_pipeline.errors import OperatorError, StoreError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_COMPLETE = ".complete.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""What a tokenizer does not need."""


class _Complete(msgspec.Struct, frozen=True):
    """What a complete folder holds."""

    url: str
    files: dict[str, int]
    """Bytes of each."""
    only_tokenizer: bool = False


def fetch(client: S3Client, url: str, folder: Path, *, only_tokenizer: bool = False) -> int:
    """Make `folder` hold the files below `url`; return how many were fetched, 0 where it was complete.

    Raises OperatorError where the folder holds something else or there is nothing at the address, StoreError where the
    store cannot be used.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder.with_name(f".{folder.name}.lock")):
        if _is_complete(folder, url, only_tokenizer):
            return 0
        try:
            return _fetch_all(client, url, folder, only_tokenizer)
        except (BotoCoreError, Boto3Error, ClientError) as error:
            raise StoreError(f"{url} cannot be fetched: {error}") from error


def _is_complete(folder: Path, url: str, only_tokenizer: bool) -> bool:
    try:
        complete = msgspec.json.decode((folder / _COMPLETE).read_bytes(), type=_Complete)
    except FileNotFoundError:
        if folder.exists() and any(folder.iterdir()):
            raise OperatorError(f"{folder} has files that were not fetched: use another folder, or empty it") from None
        return False
    if complete.url != url:
        raise OperatorError(f"{folder} holds {complete.url}, not {url}: give the new weights a folder of their own")
    if complete.only_tokenizer and not only_tokenizer:
        raise OperatorError(f"{folder} holds the tokenizer alone: give the weights another folder")
    return True


def _fetch_all(client: S3Client, url: str, folder: Path, only_tokenizer: bool) -> int:
    bucket, prefix = _place(url)
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(exist_ok=True)
    files: dict[str, int] = {}
    for key, size in _list(client, bucket, prefix):
        name = key.removeprefix(prefix)
        if name.endswith("/") or (only_tokenizer and name.endswith(_WEIGHTS)):
            continue
        target = partial / name
        if not target.resolve().is_relative_to(partial.resolve()):
            raise OperatorError(f"{url} has an object with a name that leads out of its folder: {name!r}")
        files[name] = size
        _fetch_one(client, bucket, key, size, target)
    if not files:
        raise OperatorError(f"{url}: there is nothing at this address")
    (partial / _COMPLETE).write_bytes(msgspec.json.encode(_Complete(url, files, only_tokenizer)))
    os.sync()
    if folder.exists():  # an empty one, as Kubernetes makes for a mount
        folder.rmdir()
    partial.rename(folder)
    return len(files)


def _fetch_one(client: S3Client, bucket: str, key: str, size: int, target: Path) -> None:
    """Fetch one object, unless it is there. It gets its name when it is whole."""
    if target.is_file() and target.stat().st_size == size:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    client.download_file(bucket, key, str(part))
    if part.stat().st_size != size:
        raise OperatorError(f"s3://{bucket}/{key} has changed while it was fetched: start again")
    part.rename(target)


def _list(client: S3Client, bucket: str, prefix: str) -> Iterator[tuple[str, int]]:
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for found in page.get("Contents", []):
            yield found["Key"], found["Size"]


def _place(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    if parts.scheme != "s3" or not parts.netloc or not parts.path.strip("/"):
        raise OperatorError(f"{url} is not s3://BUCKET/FOLDER")
    return parts.netloc, parts.path.strip("/") + "/"


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Wait until nobody else fetches into the folder; a lock that its holder's death gives back."""
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Fetch as the command line says; return the exit status."""
    parser = argparse.ArgumentParser(prog="batch_pipeline.store.weights", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only-tokenizer", action="store_true", help="all but the weights themselves")
    options = parser.parse_args()
    try:
        count = fetch(boto3.client("s3"), options.url, options.folder, only_tokenizer=options.only_tokenizer)
    except (OperatorError, StoreError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{options.folder} is complete: {count or 'nothing'} fetched")
    return 0


if __name__ == "__main__":
    sys.exit(main())
