"""Files that were made to break what reads them: each is refused or reported, at a cost that was bounded before.

Memory is that of a process of its own which does only this, above what it has after its imports.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path

import msgspec
import pytest

from batch_pipeline.errors import StoreError
from batch_pipeline.intake import drop
from batch_pipeline.intake.chunks import write_chunks
from batch_pipeline.intake.validate import validate
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import BatchStatus
from batch_pipeline.results.merge import merge
from batch_pipeline.results.verify import verify
from batch_pipeline.settings import Settings
from batch_pipeline.settings import Store as StoreSettings
from batch_pipeline.store import ObjectStore, keys
from batch_pipeline.store.client import make_client
from tests.fakes.intake_files import intake_settings, request_line, uploaded
from tests.fakes.small_model import write_model

REPOSITORY = Path(__file__).resolve().parents[2]
MEBIBYTE = 1024 * 1024
LINE_BYTES = 4 * MEBIBYTE
BIG = 64 * LINE_BYTES
_CHECK = """
import json, sys
from pathlib import Path
from batch_pipeline.intake.check import check_file
from batch_pipeline.settings import Settings
from tests.fakes.memory import peak_bytes
from tests.fakes.small_model import small_settings
def reset():
    Path("/proc/self/clear_refs").write_text("5")
settings = small_settings(Path(sys.argv[1]))
warm = Path(sys.argv[1]) / "warm.jsonl"
warm.write_bytes(sys.argv[2].encode() + b"\\n")
list(check_file(warm, "/v1/chat/completions", settings))
reset()
before = peak_bytes()
found = check_file(sys.stdin.buffer, "/v1/chat/completions", settings)
codes, first = {}, []
for problem in found:
    codes[problem.code] = codes.get(problem.code, 0) + 1
    if len(first) < 5:
        first.append([problem.line, problem.code, problem.message])
print(json.dumps({"total": found.total, "invalid": found.invalid, "codes": codes, "first": first,
                  "errors": [error.code for error in found.errors], "bytes": peak_bytes() - before}))
"""


class Report(msgspec.Struct):
    """What the child process found, and how many bytes of memory it took for it."""

    total: int
    invalid: int
    codes: dict[str, int]
    first: list[tuple[int, str, str]]
    errors: list[str]
    bytes: int


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model."""
    return write_model(tmp_path_factory.mktemp("model"))


def measured(model: Path, pieces: Iterator[bytes]) -> Report:
    """Check a stream in a process of its own."""
    command = [sys.executable, "-c", _CHECK, str(model), request_line(0).decode()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for piece in pieces:
            child.stdin.write(piece)
        child.stdin.close()
        out = child.stdout.read()
    assert child.returncode == 0
    return msgspec.json.decode(out, type=Report)


def long_line() -> Iterator[bytes]:
    """A line of 256 MiB between two good ones."""
    yield request_line(1) + b"\n" + request_line(2)[:-2]
    yield from repeat(b"x" * MEBIBYTE, BIG // MEBIBYTE)
    yield b'"}\n' + request_line(3) + b"\n"


def endless_line() -> Iterator[bytes]:
    """A line that has not ended when the file does."""
    yield request_line(1) + b"\n" + request_line(2)[:-2]
    yield from repeat(b"x" * MEBIBYTE, BIG // MEBIBYTE)


def long_lines() -> Iterator[bytes]:
    """Hundreds of lines just above the limit."""
    line = request_line(2, user="x" * (LINE_BYTES + 1)) + b"\n"
    yield from repeat(line, 40)


def blank_lines() -> Iterator[bytes]:
    """Twenty million blank lines of all kinds before a good one."""
    yield from repeat(b"\n" * MEBIBYTE, 16)
    yield from repeat(b" \r\n" * MEBIBYTE, 4)
    yield request_line(1) + b"\n"


def bad_lines() -> Iterator[bytes]:
    """A million lines of which none can be run."""
    yield from repeat(b"{\n" * 1000, 1000)


def bad_bodies() -> Iterator[bytes]:
    """A hundred thousand requests that have to be read to their ends, and read again to say what is wrong."""
    line = request_line(1, temperature=99, user="x" * 200, metadata={"a": [1, 2]}) + b"\n"
    yield from repeat(line * 100, 1000)


def deep() -> Iterator[bytes]:
    """JSON of two million levels."""
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        levels = 3 * MEBIBYTE // len(opening)
        yield b'{"custom_id":"a","method":"POST","url":"x","body":' + opening * levels + closing * 10 + b"}\n"


def wide() -> Iterator[bytes]:
    """Objects and lists of hundreds of thousands of members, where they are skipped and where they are looked at."""
    names = {f"k{number}": 1 for number in range(150_000)}
    yield request_line(1, metadata=list(range(300_000))) + b"\n"
    yield request_line(2, **names) + b"\n"
    yield request_line(3, logit_bias=names) + b"\n"
    yield request_line(4, stop=["x"] * 300_000) + b"\n"
    yield json.dumps({**names, "custom_id": "e"}).encode() + b"\n"


def numbers() -> Iterator[bytes]:
    """Numbers of millions of digits, in fields that are numbers and elsewhere."""
    digits = b"9" * (2 * MEBIBYTE)
    for field in (b"seed", b"max_tokens", b"temperature", b"metadata"):
        for number in (digits, digits + b".5", b"1e" + digits, b"-" + digits):
            yield request_line(1)[:-2] + b',"%s":%s}}\n' % (field, number)


def keys_twice() -> Iterator[bytes]:
    """The same keys, hundreds of thousands of times."""
    yield b"{" + b'"custom_id":"a",' * 200_000 + request_line(1)[1:] + b"\n"
    yield request_line(2)[:-2] + b',"seed":1' * 300_000 + b"}}\n"
    yield request_line(3)[:-2] + b',"x":1' * 300_000 + b"}}\n"


def compressed() -> Iterator[bytes]:
    """A gigabyte of requests, as gzip makes it of nearly nothing."""
    yield gzip.compress(gzip.compress((request_line(1) + b"\n") * 1_000_000))
    yield gzip.compress(b"\0" * (256 * MEBIBYTE))


def encoded(encoding: str) -> Callable[[], Iterator[bytes]]:
    """Requests in another encoding."""

    def pieces() -> Iterator[bytes]:
        yield (request_line(1) + "\u00e9".encode() + b"\n").decode().encode(encoding) * 20_000

    return pieces


def binary() -> Iterator[bytes]:
    """NUL bytes, with and without line feeds, and all bytes that there are."""
    yield b"\0" * (32 * MEBIBYTE) + b"\n" + b"\0\n" * 100_000 + bytes(range(256)) * 10_000


CASES: list[tuple[Callable[[], Iterator[bytes]], int, tuple[int, int], set[str] | None]] = [
    (long_line, 16 * LINE_BYTES, (3, 1), {"line_too_long"}),
    (endless_line, 16 * LINE_BYTES, (2, 1), {"line_too_long"}),
    (long_lines, 16 * LINE_BYTES, (40, 40), {"line_too_long"}),
    (blank_lines, 128 * MEBIBYTE, (1, 0), set()),
    (bad_lines, 192 * MEBIBYTE, (1_000_000, 1_000_000), {"invalid_json_line"}),
    (bad_bodies, 128 * MEBIBYTE, (100_000, 100_000), {"invalid_request"}),
    (deep, 16 * LINE_BYTES, (2, 2), {"invalid_json_line"}),
    (wide, 256 * MEBIBYTE, (5, 2), {"invalid_request"}),
    (numbers, 256 * MEBIBYTE, (16, 0), None),
    (keys_twice, 256 * MEBIBYTE, (3, 0), None),
    (compressed, 64 * MEBIBYTE, (0, 0), {"invalid_json_line"}),
    (encoded("utf-16"), 128 * MEBIBYTE, (0, 0), {"invalid_json_line"}),
    (encoded("utf-32"), 128 * MEBIBYTE, (0, 0), {"invalid_json_line"}),
    (encoded("latin-1"), 128 * MEBIBYTE, (20_000, 20_000), {"invalid_json_line"}),
    (binary, 256 * MEBIBYTE, (0, 0), {"invalid_json_line", "line_too_long"}),
]
"""The file; the most memory that it may take; requests and invalid ones, 0 where they are not known;
the codes given, None where a line may as well run.
"""


@pytest.mark.parametrize(
    ("pieces", "most", "counts", "codes"), CASES, ids=[str(number) for number in range(len(CASES))]
)
def test_a_hostile_file_is_reported_in_bounded_memory(
    pieces: Callable[[], Iterator[bytes]],
    most: int,
    counts: tuple[int, int],
    codes: set[str] | None,
    model: Path,
) -> None:
    report = measured(model, pieces())
    assert report.bytes < most
    assert report.invalid == sum(report.codes.values())
    assert counts[0] in (0, report.total)
    if codes is not None:
        assert set(report.codes) == codes
        assert counts[0] == 0 or counts[1] == report.invalid
    assert all(len(message) < 400 and message.isprintable() for _, _, message in report.first)


def test_all_bad_lines_are_in_the_error_file_and_fifty_in_the_status(
    sqlite_url: str, store: ObjectStore, settings: Settings, model: Path, tmp_path: Path
) -> None:
    ledger = Ledger.open(sqlite_url)
    small = intake_settings(settings, model, tmp_path / "scratch")
    count = 200_000
    batch = uploaded(ledger, store, b"{\n" * count)
    for step in (validate, write_chunks):
        step(batch.batch_id, ledger=ledger, store=store, settings=small)
    assert len(ledger.batches.get(batch.batch_id).errors) == 50
    merge(batch.batch_id, ledger=ledger, store=store, settings=small, run_id=None)
    final = ledger.batches.get(batch.batch_id)
    assert (final.status, final.total, final.invalid) == (BatchStatus.FAILED, count, count)
    lines = store.get(str(final.error_key)).splitlines()
    assert len(lines) == count
    assert [json.loads(lines[index])["error"]["line"] for index in (0, 1, count - 1)] == [1, 2, count]
    assert verify(batch.batch_id, ledger=ledger, store=store).holds
    ledger.close()


HOSTILE_KEYS = [
    *("../escape.jsonl", "acme/../../escape.jsonl", "acme/..jsonl", "acme/.hidden.jsonl"),
    *(
        "acme/a b.jsonl",
        "acme/\u202egpj.jsonl",
        "acme/x\x1b[2J.jsonl",
        "acme/x\n.jsonl",
        "acme/" + "x" * 300 + ".jsonl",
    ),
    *(
        "ACME/x.jsonl",
        "a/b/c.jsonl",
        "-acme/x.jsonl",
        "acme/x.jsonl.gz",
        "x.jsonl",
        "\u0430cme/x.jsonl",
        "acme/x'--.jsonl",
    ),
]


@pytest.mark.parametrize("key", HOSTILE_KEYS, ids=range(len(HOSTILE_KEYS)))
def test_a_name_leads_nowhere_but_to_an_answer(
    key: str, sqlite_url: str, store: ObjectStore, settings: Settings
) -> None:
    ledger = Ledger.open(sqlite_url)
    try:
        store.put(f"{keys.INBOX}{key}", request_line(1) + b"\n")
    except StoreError:
        return  # the store itself takes no such key
    taken = drop.take_drops(ledger=ledger, store=store, settings=settings, limit=10)
    assert [(one.batch_id, one.code) for one in taken] in ([(None, "invalid_name")], [])
    found = [info.key for info in store.list("")]
    assert all(
        name.startswith((keys.INBOX, keys.REJECTED, f"{keys.OUTBOX}acme/", f"{keys.OUTBOX}a/")) for name in found
    )
    assert all(name.isascii() and name.isprintable() for name in found if name.startswith(keys.OUTBOX))
    assert ledger.batches.recent() == []
    ledger.close()


@pytest.mark.parametrize(
    "metadata",
    [
        {"priority": "-5"},
        {"customer": "bolt"},
        {"completion-window": "24h\u00a0"},
        {"completion-window": "9" * 1000 + "h"},
        {"completion-window": "-1h"},
        {"endpoint": "http://10.0.0.1/"},
        {"endpoint": "/v1/files"},
        {"on-invalid": "skip; drop"},
        {"metadata-x": "y" * 600},
        {"metadata-" + "k" * 65: "y"},
        {f"metadata-{number}": "y" for number in range(17)},
    ],
    ids=range(11),
)
def test_options_are_what_they_may_be_or_the_file_is_answered(
    metadata: dict[str, str], sqlite_url: str, store: ObjectStore, settings: Settings, tmp_path: Path
) -> None:
    ledger = Ledger.open(sqlite_url)
    file = tmp_path / "x.jsonl"
    file.write_bytes(request_line(1) + b"\n")
    try:
        store.upload(file, keys.inbox("acme", "x"), {name: value.strip("\u00a0") for name, value in metadata.items()})
    except StoreError:
        return  # the store itself takes no such option
    taken = drop.take_drops(ledger=ledger, store=store, settings=settings, limit=10)
    if metadata == {"completion-window": "24h\u00a0"}:
        assert taken[0].batch_id is not None
    else:
        assert [(one.batch_id, one.code) for one in taken] == [(None, "invalid_option")]
        answer = json.loads(store.get(keys.outbox("acme", "x", "status.json")))
        assert answer["errors"]["data"][0]["message"].isprintable()
        assert len(answer["errors"]["data"][0]["message"]) < 400
    ledger.close()


def test_compressed_bytes_are_never_unpacked(
    sqlite_url: str, store_settings: StoreSettings, settings: Settings, model: Path, tmp_path: Path
) -> None:
    ledger, store = Ledger.open(sqlite_url), ObjectStore.open(store_settings)
    data = gzip.compress((request_line(1) + b"\n") * 100_000)
    make_client(store_settings).put_object(
        Bucket=store.bucket, Key=keys.inbox("acme", "x"), Body=data, ContentEncoding="gzip"
    )
    (taken,) = drop.take_drops(ledger=ledger, store=store, settings=settings, limit=10)
    small = intake_settings(settings, model, tmp_path / "scratch")
    for step in (validate, write_chunks):
        step(str(taken.batch_id), ledger=ledger, store=store, settings=small)
    batch = ledger.batches.get(str(taken.batch_id))
    assert batch.input_bytes == len(data)
    assert batch.outcome == BatchStatus.FAILED
    assert {error.code for error in batch.errors} == {"invalid_json_line"}
    ledger.close()


def test_what_is_too_large_is_refused_before_it_is_read(
    sqlite_url: str, store: ObjectStore, settings: Settings, model: Path, tmp_path: Path
) -> None:
    ledger = Ledger.open(sqlite_url)
    small = intake_settings(settings, model, tmp_path / "scratch", max_file_bytes=1000, max_requests=3)
    store.put(keys.inbox("acme", "x"), b"x" * 1001)
    taken = drop.take_drops(ledger=ledger, store=store, settings=small, limit=10)
    assert [(one.batch_id, one.code) for one in taken] == [(None, "file_too_large")]
    batch = uploaded(ledger, store, (request_line(1) + b"\n") * 4)
    for step in (validate, write_chunks):
        step(batch.batch_id, ledger=ledger, store=store, settings=small)
    assert [error.code for error in ledger.batches.get(batch.batch_id).errors] == ["too_many_requests"]
    ledger.close()
