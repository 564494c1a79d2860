"""The object store on the real S3 server: what the invariants rest on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import pytest

from batch_pipeline import settings as configuration
from batch_pipeline.embedded.ports import LOOPBACK, free_ports
from batch_pipeline.errors import StoreError
from batch_pipeline.store import ObjectInfo, ObjectMissing, ObjectStore, PreconditionFailed, objects
from batch_pipeline.store.multipart import MIN_PART_BYTES, PART_BYTES

RACERS, ROUNDS = 8, 3
"""Few rounds, since SeaweedFS makes the losers of a race wait for whole seconds."""


def race(attempt: Callable[[int], object]) -> list[int]:
    """Run `attempt` with 0, 1, ... at the same moment; return those that met no PreconditionFailed."""
    barrier = threading.Barrier(RACERS)

    def run(racer: int) -> int | None:
        barrier.wait()
        try:
            attempt(racer)
        except PreconditionFailed:
            return None
        return racer

    with ThreadPoolExecutor(RACERS) as pool:
        return [winner for winner in pool.map(run, range(RACERS)) if winner is not None]


def test_of_racing_puts_if_absent_one_wins_and_its_bytes_are_kept(store: ObjectStore) -> None:
    def put(key: str, racer: int) -> None:
        store.put(key, bytes([racer]), if_absent=True)

    for number in range(ROUNDS):
        key = f"race/{number}"
        [winner] = race(partial(put, key))
        assert store.get(key) == bytes([winner])


def test_of_racing_puts_if_match_one_wins_and_its_bytes_are_kept(store: ObjectStore) -> None:
    def put(number: int, etag: str, racer: int) -> None:
        store.put("counter", bytes([number, racer]), if_match=etag)

    etag = store.put("counter", b"start")
    for number in range(ROUNDS):
        [winner] = race(partial(put, number, etag))
        data, etag = store.get_with_etag("counter")
        assert data == bytes([number, winner])


def test_put_if_match_of_a_missing_object_writes_nothing(store: ObjectStore) -> None:
    with pytest.raises((PreconditionFailed, ObjectMissing)):
        store.put("absent", b"data", if_match='"d41d8cd98f00b204e9800998ecf8427e"')
    assert store.head("absent") is None


def test_copy_takes_the_bytes_that_were_looked_at(store: ObjectStore) -> None:
    store.put("inbox/file", b"first")
    seen = store.head("inbox/file")
    assert seen is not None
    store.copy(seen, "taken/file")
    assert store.get("taken/file") == b"first"


def test_copy_of_an_overwritten_source_is_refused_and_writes_nothing(store: ObjectStore) -> None:
    store.put("inbox/file", b"first")
    seen = store.head("inbox/file")
    assert seen is not None
    store.put("inbox/file", b"other")
    with pytest.raises(PreconditionFailed):
        store.copy(seen, "taken/file")
    assert store.head("taken/file") is None


def test_copy_of_a_deleted_source_says_that_it_is_missing(store: ObjectStore) -> None:
    store.put("inbox/file", b"first")
    seen = store.head("inbox/file")
    assert seen is not None
    store.delete("inbox/file")
    with pytest.raises(ObjectMissing, match="inbox/file"):
        store.copy(seen, "taken/file")


def test_copy_leaves_the_customers_metadata_behind(store: ObjectStore, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"data")
    store.upload(file, "inbox/file", {"completion-window": "24h"})
    seen = store.head("inbox/file")
    assert seen is not None
    assert seen.metadata == {"completion-window": "24h"}
    store.copy(seen, "taken/file")
    taken = store.head("taken/file")
    assert taken is not None
    assert taken.metadata == {}


def test_ranges_are_exact_also_past_the_end(store: ObjectStore) -> None:
    store.put("digits", b"0123456789")
    assert store.get_range("digits", 0, 1) == b"0"
    assert store.get_range("digits", 3, 4) == b"3456"
    assert store.get_range("digits", 8, 100) == b"89"
    with pytest.raises(StoreError, match="reading digits"):
        store.get_range("digits", 10, 1)


def test_iterate_yields_the_whole_object_in_bounded_pieces(store: ObjectStore) -> None:
    data = bytes(range(256)) * 1000
    store.put("object", data)
    pieces = list(store.iterate("object", 10_000))
    assert b"".join(pieces) == data
    assert max(map(len, pieces)) <= 10_000


def test_upload_and_download_of_a_file_larger_than_a_part(store: ObjectStore, tmp_path: Path) -> None:
    data = b"0123456789abcdef" * (2 * PART_BYTES // 16) + b"rest"
    (tmp_path / "up").write_bytes(data)
    store.upload(tmp_path / "up", "large")
    store.download("large", tmp_path / "down")
    assert (tmp_path / "down").read_bytes() == data


def test_missing_keys(store: ObjectStore, tmp_path: Path) -> None:
    assert store.head("absent") is None
    assert list(store.list("absent/")) == []
    store.delete("absent")
    for read in (
        lambda: store.get("absent"),
        lambda: store.get_range("absent", 0, 1),
        lambda: list(store.iterate("absent")),
        lambda: store.download("absent", tmp_path / "file"),
    ):
        with pytest.raises(ObjectMissing, match="absent: no such object"):
            read()
    assert list(tmp_path.iterdir()) == []


def test_list_yields_every_object_below_a_prefix_over_several_pages(store: ObjectStore) -> None:
    names = {f"folder/{number:03d}" for number in range(25)}
    for name in names:
        store.put(name, name.encode())
    store.put("folder-beside", b"")
    listed = list(store.list("folder/", page=10))
    assert {info.key for info in listed} == names
    assert [info.size for info in listed] == [len("folder/000")] * 25
    first = store.head("folder/000")
    assert first is not None
    assert next(info for info in listed if info.key == first.key).etag == first.etag


def test_multipart_writer_joins_bytes_and_copied_ranges_in_order(store: ObjectStore) -> None:
    source = b"s" * (2 * MIN_PART_BYTES)
    store.put("source", source)
    head, tail = b"h" * MIN_PART_BYTES, b"tail"
    with store.multipart("joined") as writer:
        writer.write(head)
        writer.copy_part("source", 1, MIN_PART_BYTES)
        writer.copy_part("source", 0, MIN_PART_BYTES)
        writer.write(tail)
        assert store.head("joined") is None
    expected = head + source[1 : 1 + MIN_PART_BYTES] + source[:MIN_PART_BYTES] + tail
    assert writer.size == len(expected)
    assert store.get("joined") == expected


def test_multipart_writer_refuses_a_copy_after_too_few_bytes(store: ObjectStore) -> None:
    store.put("source", b"s" * MIN_PART_BYTES)
    with store.multipart("joined") as writer:
        writer.write(b"few")
        assert not writer.can_copy
        assert writer.missing_to_copy == MIN_PART_BYTES - 3
        with pytest.raises(ValueError, match="5242877 bytes have to be written"):
            writer.copy_part("source", 0, MIN_PART_BYTES)
    assert store.get("joined") == b"few"


def test_multipart_writer_of_nothing_makes_an_empty_object(store: ObjectStore) -> None:
    with store.multipart("empty"):
        pass
    assert store.get("empty") == b""


def test_multipart_writer_that_fails_leaves_nothing(store: ObjectStore) -> None:
    def fail_half_way() -> None:
        with store.multipart("broken") as writer:
            writer.write(b"x" * PART_BYTES)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert store.head("broken") is None


def test_multipart_copy_of_an_overwritten_source_is_refused(store: ObjectStore) -> None:
    _, old = store.put("source", b"a" * MIN_PART_BYTES), store.head("source")
    assert isinstance(old, ObjectInfo)
    store.put("source", b"b" * MIN_PART_BYTES)
    with pytest.raises(PreconditionFailed), store.multipart("joined") as writer:
        writer.copy_part("source", 0, MIN_PART_BYTES, if_match=old.etag)
    assert store.head("joined") is None


def test_a_large_object_is_copied_in_parts_only_as_it_was_looked_at(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "MAX_COPY_BYTES", MIN_PART_BYTES)
    monkeypatch.setattr(objects, "COPY_PART_BYTES", MIN_PART_BYTES)
    data = bytes(range(256)) * (9 * MIN_PART_BYTES // 512) + b"end"
    store.put("large", data)
    info = store.head("large")
    assert info is not None
    store.copy(info, "copy")
    assert store.get("copy") == data
    store.put("large", data[::-1])
    with pytest.raises(PreconditionFailed):
        store.copy(info, "other")
    assert store.head("other") is None


def test_server_that_is_down_is_one_clear_error(store_settings: configuration.Store) -> None:
    gone = msgspec.structs.replace(store_settings, endpoint_url=f"http://{LOOPBACK}:{free_ports(1)[0]}")
    with pytest.raises(StoreError, match="writing key: the object store cannot be reached"):
        ObjectStore.open(gone).put("key", b"data")


def test_wrong_secret_and_missing_bucket_are_named(store_settings: configuration.Store, tmp_path: Path) -> None:
    wrong = msgspec.structs.replace(store_settings, secret_access_key="wrong")
    file = tmp_path / "file"
    file.write_bytes(b"bytes")
    with pytest.raises(StoreError, match="uploading key: the object store answered SignatureDoesNotMatch"):
        ObjectStore.open(wrong).upload(file, "key")
    with pytest.raises(StoreError, match="writing key: not possible in S3: Parameter validation failed"):
        ObjectStore.open(msgspec.structs.replace(store_settings, bucket="")).put("key", b"")
    with pytest.raises(StoreError, match="reading key: the object store answered SignatureDoesNotMatch"):
        ObjectStore.open(wrong).get("key")
    with pytest.raises(StoreError, match="writing key: the object store answered NoSuchBucket"):
        ObjectStore.open(msgspec.structs.replace(store_settings, bucket="no-such-bucket")).put("key", b"")
