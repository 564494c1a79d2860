"""The command line on the real S3 server and SQLite: a batch from its file to its proof."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from batch_pipeline import ids
from batch_pipeline.cli.program import run
from batch_pipeline.intake import ops
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.batches import Batches
from batch_pipeline.ledger.records import BatchStatus, ChunkResult, Lease
from batch_pipeline.results import merge, outbox
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore, keys
from batch_pipeline.wire import chunk_files
from batch_pipeline.wire.chunk_files import FinishedRequest
from batch_pipeline.wire.lines import EngineResponse, ResultLine, encode_result

MODEL = "smollm2-135m"
CHAT = "/v1/chat/completions"

Run = Callable[..., int]


class Parts(NamedTuple):
    """The parts that the command line works on, for looking behind it."""

    ledger: Ledger
    store: ObjectStore
    settings: Settings


@pytest.fixture
def parts(settings: Settings, store: ObjectStore) -> Iterator[Parts]:
    ledger = Ledger.from_settings(settings)
    yield Parts(ledger, store, settings)
    ledger.close()


@pytest.fixture
def cli(settings_file: Path) -> Run:
    """Run one command line with the test's configuration."""
    return lambda *arguments: run(["--config", str(settings_file), *map(str, arguments)])


def line(custom_id: str, **body: object) -> str:
    full = {"model": MODEL, "messages": [{"role": "user", "content": f"Hello {custom_id}"}], "max_tokens": 4, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": full})


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    """Four lines, of which the third is broken."""
    file = tmp_path / "greetings.jsonl"
    file.write_text("\n".join([line("a"), line("b"), "{", line("d")]) + "\n", encoding="utf-8")
    return file


def take_in(batch_id: str, parts: Parts) -> None:
    ops.validate(batch_id, ledger=parts.ledger, store=parts.store, settings=parts.settings)
    ops.write_chunks(batch_id, ledger=parts.ledger, store=parts.store, settings=parts.settings)


def answer_all(parts: Parts) -> None:
    """Be a worker: answer every request that waits, and commit."""
    parts.ledger.workers.register("worker-1", MODEL, "run-1", "here")
    for lease in parts.ledger.chunks.lease("worker-1", MODEL, 100, run_id="run-1"):
        parts.ledger.chunks.commit(lease.ref, _result(lease, parts.store))


def _result(lease: Lease, store: ObjectStore) -> ChunkResult:
    finished = [
        _answer(lease.ref.batch_id, request) for request in chunk_files.read_requests(store.get(lease.input_key))
    ]
    encoded = chunk_files.encode_result_object(finished)
    prefix = keys.attempt(*lease.ref, ids.new_nonce())
    store.put(f"{prefix}results.jsonl", encoded.data)
    store.put(f"{prefix}lines.parquet", encoded.lines)
    return ChunkResult(
        result_key=f"{prefix}results.jsonl",
        lines_key=f"{prefix}lines.parquet",
        output_bytes=encoded.output_bytes,
        error_bytes=encoded.error_bytes,
        sha256=encoded.sha256,
        engine_version="1.2.3",
        model_version="1",
        **encoded.counts._asdict(),
    )


def _answer(batch_id: str, request: chunk_files.ChunkRequest) -> FinishedRequest:
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    body = {"choices": [{"message": {"content": f"Hello, {request.custom_id}"}}], "usage": usage}
    response = EngineResponse(200, f"engine-{request.index}", msgspec.Raw(msgspec.json.encode(body)))
    result = ResultLine(ids.request_id(batch_id, request.index), request.custom_id, response, None)
    return FinishedRequest(request.index, False, encode_result(result), 5, 1, 2)


def complete(batch_id: str, parts: Parts) -> None:
    """Bring a batch from its submission to its end."""
    take_in(batch_id, parts)
    answer_all(parts)
    merge.merge(batch_id, ledger=parts.ledger, store=parts.store, settings=parts.settings, run_id="run-2")
    outbox.deliver(batch_id, ledger=parts.ledger, store=parts.store, settings=parts.settings)


@pytest.fixture
def submitted(cli: Run, requests: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The id of a batch that was just submitted."""
    assert cli("submit", requests, "--customer", "acme", "--metadata", "project=spring") == 0
    return capsys.readouterr().out.strip()


@pytest.fixture
def completed(submitted: str, parts: Parts) -> str:
    """The id of a batch that has completed."""
    complete(submitted, parts)
    return submitted


def test_submit_makes_a_batch_of_the_bytes_and_shows_it_at_once(submitted: str, requests: Path, parts: Parts) -> None:
    batch = parts.ledger.batches.get(submitted)
    assert (batch.customer, batch.name, batch.door) == ("acme", "greetings", "cli")
    assert batch.metadata == {"project": "spring"}
    assert parts.store.get(batch.input_key) == requests.read_bytes()
    shown = json.loads(parts.store.get(keys.outbox("acme", "greetings", "status.json")))
    assert (shown["id"], shown["status"]) == (submitted, "validating")


def test_the_same_idempotency_key_is_the_same_batch(
    cli: Run, requests: Path, parts: Parts, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("submit", requests, "--customer", "acme", "--idempotency-key", "monday")
    assert [cli(*command), cli(*command)] == [0, 0]
    first, second = capsys.readouterr().out.split()
    assert first == second
    assert len(parts.ledger.batches.recent()) == 1
    assert [info.key for info in parts.store.list("batches/")] == [keys.input_file(first)]


@pytest.mark.parametrize("killed_at", ["ledger.batches.create", "publish"])
def test_a_submission_that_was_killed_is_made_once_by_the_next_one_with_its_key(
    cli: Run, requests: Path, parts: Parts, killed_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    command = ("submit", requests, "--customer", "acme", "--idempotency-key", "monday")
    with monkeypatch.context() as patch:
        if killed_at == "publish":
            patch.setattr(outbox, "publish_status", kill)
        else:
            patch.setattr(Batches, "create", kill)
        assert cli(*command) == 130
    assert [cli(*command), cli(*command)] == [0, 0]
    (batch,) = parts.ledger.batches.recent()
    assert parts.store.get(batch.input_key) == requests.read_bytes()
    assert json.loads(parts.store.get(keys.outbox("acme", "greetings", "status.json")))["id"] == batch.batch_id


def test_of_two_submissions_at_once_with_one_key_the_second_returns_the_batch_of_the_first(
    cli: Run, requests: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Neither sees the other's batch before it creates its own.
    monkeypatch.setattr(Batches, "by_creation_key", lambda _self, _key: None)
    command = ("submit", requests, "--customer", "acme", "--idempotency-key", "monday")
    assert [cli(*command), cli(*command)] == [0, 0]
    first, second = capsys.readouterr().out.split()
    assert first == second
    assert [info.key for info in parts.store.list("batches/")] == [keys.input_file(first)]


def test_an_idempotency_key_is_not_for_two_files(cli: Run, requests: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("submit", requests, "--customer", "acme", "--idempotency-key", "monday")
    assert cli(*command) == 0
    sent = requests.read_bytes()
    # Also one of the same size.
    for other in (line("other").encode(), sent[:-3] + bytes([sent[-3] ^ 1]) + sent[-2:]):
        requests.write_bytes(other)
        assert cli(*command) == 1
        assert "with another file: use a new key" in capsys.readouterr().err


def test_customers_do_not_share_idempotency_keys(cli: Run, requests: Path, parts: Parts) -> None:
    for customer in ("acme", "globex"):
        assert cli("submit", requests, "--customer", customer, "--idempotency-key", "monday") == 0
    assert len(parts.ledger.batches.recent()) == 2


def test_submit_reads_standard_input(
    cli: Run, requests: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(requests.read_bytes())))
    assert cli("submit", "-", "--customer", "acme", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["name"] == "stdin"
    assert parts.store.get(document["input_file_id"]) == requests.read_bytes()
    assert list(Path(parts.settings.intake.scratch_dir).iterdir()) == []


def test_status_is_the_document_of_the_outbox(
    cli: Run, completed: str, parts: Parts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("status", completed, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    published = json.loads(parts.store.get(keys.outbox("acme", "greetings", "status.json")))
    assert {**printed, "as_of": None} == {**published, "as_of": None}
    assert printed["counts"] == {"total": 4, "completed": 3, "failed": 0, "expired": 0, "cancelled": 0, "invalid": 1}


def test_status_for_people_has_the_counts_and_the_price(
    cli: Run, completed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("status", completed) == 0
    printed = capsys.readouterr().out
    assert "4: 3 completed, 0 failed, 1 invalid, 0 expired, 0 cancelled" in printed
    assert "15 in, 6 out; 0.000001 USD" in printed
    assert "line 3: invalid_json_line" in printed


def test_list_has_the_newest_first(
    cli: Run, submitted: str, requests: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("submit", requests, "--customer", "globex") == 0
    newest = capsys.readouterr().out.strip()
    assert cli("list", "--json") == 0
    assert [entry["id"] for entry in json.loads(capsys.readouterr().out)] == [newest, submitted]
    assert cli("list", "--customer", "acme", "--status", "validating") == 0
    printed = capsys.readouterr().out
    assert submitted in printed
    assert newest not in printed


def test_watch_ends_with_the_batch(cli: Run, completed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("watch", completed) == 0
    assert "acme/greetings  4/4  completed" in capsys.readouterr().out


def test_watch_says_by_its_exit_status_that_a_batch_did_not_complete(cli: Run, submitted: str, parts: Parts) -> None:
    assert cli("cancel", submitted) == 0
    complete(submitted, parts)
    assert cli("watch", submitted, "--json") == 1


def test_cancel_twice_is_once_and_after_the_end_an_error(
    cli: Run, submitted: str, parts: Parts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [cli("cancel", submitted), cli("cancel", submitted)] == [0, 0]
    assert capsys.readouterr().out == f"{submitted} cancelling\n" * 2
    shown = json.loads(parts.store.get(keys.outbox("acme", "greetings", "status.json")))
    assert shown["status"] == "cancelling"
    complete(submitted, parts)
    assert cli("cancel", submitted) == 1
    assert "cannot be cancelled any more" in capsys.readouterr().err


def test_results_brings_every_file_whole(
    cli: Run, completed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "here"
    assert cli("results", completed, "--to", folder) == 0
    assert sorted(file.name for file in folder.iterdir()) == ["errors.jsonl", "manifest.json", "output.jsonl"]
    ids_of = [json.loads(text)["custom_id"] for text in (folder / "output.jsonl").read_text().splitlines()]
    assert ids_of == ["a", "b", "d"]
    assert str(folder / "manifest.json") in capsys.readouterr().out


def test_results_may_be_fetched_again_but_not_over_those_of_another_batch(
    cli: Run, completed: str, parts: Parts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [cli("results", completed, "--to", tmp_path / "r") for _ in range(2)] == [0, 0]
    assert cli("submit", tmp_path / "greetings.jsonl", "--customer", "globex") == 0
    other = capsys.readouterr().out.split()[-1]
    complete(other, parts)
    assert cli("results", other, "--to", tmp_path / "r") == 1
    assert f"of {completed}: choose another folder" in capsys.readouterr().err
    assert cli("results", other, "--to", tmp_path / "r", "--overwrite") == 0
    assert json.loads((tmp_path / "r" / "manifest.json").read_bytes())["batch_id"] == other


def test_results_are_refused_before_the_end(
    cli: Run, submitted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("results", submitted, "--to", tmp_path / "r") == 1
    assert f"batch {submitted} is validating" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_results_that_were_tampered_with_are_not_kept(
    cli: Run, completed: str, parts: Parts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = parts.ledger.batches.get(completed).output_key
    assert key is not None
    parts.store.put(key, parts.store.get(key).replace(b"Hello", b"Hallo"))
    assert cli("results", completed, "--to", tmp_path / "r") == 1
    assert "but its manifest says" in capsys.readouterr().err
    assert list((tmp_path / "r").iterdir()) == []


def test_a_download_that_was_cut_off_does_not_look_complete_and_goes_on(
    cli: Run, completed: str, parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "r"
    rename = Path.replace

    def fail(self: Path, target: Path) -> Path:
        if target.name == "errors.jsonl":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", fail)
    assert cli("results", completed, "--to", folder) == 130
    assert not (folder / "manifest.json").exists()
    monkeypatch.undo()
    assert cli("results", completed, "--to", folder, "--overwrite") == 0
    assert (folder / "manifest.json").exists()


def test_verify_proves_and_refutes(cli: Run, completed: str, parts: Parts, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("verify", completed) == 0
    assert "4 requests = 3 completed, 0 failed, 0 expired, 0 cancelled, 1 invalid" in capsys.readouterr().out
    key = parts.ledger.batches.get(completed).output_key
    assert key is not None
    parts.store.put(key, b"".join(parts.store.get(key).splitlines(keepends=True)[1:]))
    assert cli("verify", completed) == 1
    assert "problem: " in capsys.readouterr().err
    assert cli("verify", completed, "--json") == 1
    assert json.loads(capsys.readouterr().out)["verdicts"]["exactly_one_result"]["count"] > 0


def test_audit_follows_a_result_back_to_the_upload(
    cli: Run, completed: str, parts: Parts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("audit", completed, "--custom-id", "d", "--json") == 0
    trail = json.loads(capsys.readouterr().out)
    (request,) = trail["requests"]
    assert (request["line"], request["source_is_identical"]) == (4, True)
    assert (request["chunk"]["worker"], request["chunk"]["run_id"]) == ("worker-1", "run-1")
    place = request["input"]
    assert json.loads(parts.store.get_range(place["key"], place["offset"], place["length"]))["custom_id"] == "d"
    assert cli("audit", completed, "--index", "3") == 0
    printed = capsys.readouterr().out
    for told in ("line 4 (index 3), custom_id 'd'", "the same bytes", "worker-1", "1.2.3", "run run-2", "committed"):
        assert told in printed


def test_audit_of_a_whole_batch_has_every_event(cli: Run, completed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("audit", completed) == 0
    printed = capsys.readouterr().out
    for event in ("created", "in_progress", "leased", "committed", "finalizing", "completed"):
        assert event in printed


def test_audit_names_a_request_in_one_way_only(cli: Run, completed: str) -> None:
    assert cli("audit", completed, "--custom-id", "d", "--index", "3") == 2
    assert cli("audit", completed, "--custom-id", "unknown") == 1


@pytest.mark.parametrize("command", ["status", "watch", "cancel", "verify", "audit"])
def test_an_unknown_batch_is_said_to_be_unknown(
    cli: Run, command: str, parts: Parts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(command, "batch_none") == 1
    assert capsys.readouterr().err == "error: no batch batch_none\n"


def test_a_batch_without_a_good_line_fails_and_has_only_an_error_file(
    cli: Run, parts: Parts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.jsonl").write_text("{\n[]\n", encoding="utf-8")
    assert cli("submit", tmp_path / "bad.jsonl", "--customer", "acme") == 0
    batch_id = capsys.readouterr().out.strip()
    complete(batch_id, parts)
    assert parts.ledger.batches.get(batch_id).status == BatchStatus.FAILED
    assert cli("results", batch_id, "--to", tmp_path / "r") == 0
    assert sorted(file.name for file in (tmp_path / "r").iterdir()) == ["errors.jsonl", "manifest.json"]


def entry(findings: list[dict[str, Any]], part: str) -> dict[str, Any]:
    return next(finding for finding in findings if finding["part"] == part)


def test_doctor_finds_what_works(
    cli: Run, settings_file: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"BATCH_PIPELINE__MODELS__{MODEL}__ENGINE_URL".upper(), "http://127.0.0.1:9")
    cli("doctor", "--json")
    findings = json.loads(capsys.readouterr().out)
    for part in ("configuration", "object store", "conditional puts", "ledger", "clock of the object store"):
        assert entry(findings, part)["state"] == "ok"
    assert list(parts.store.list("doctor/")) == []


def test_doctor_says_what_to_mend(
    cli: Run, settings_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATCH_PIPELINE__STORE__BUCKET", "no-such-bucket")
    monkeypatch.setenv("BATCH_PIPELINE__MODELS__SMOLLM2-135M__ENGINE_URL", "http://127.0.0.1:9")
    assert cli("doctor") == 1
    printed = capsys.readouterr().out
    assert "mend object store" in printed
    assert "start the engine, or set models.smollm2-135m.engine_url to its address" in printed


def test_housekeeping_says_what_it_would_remove_and_removes_it(
    cli: Run, parts: Parts, requests: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATCH_PIPELINE__RETENTION__LEDGER_MINUTES", "0.000001")
    monkeypatch.setenv("BATCH_PIPELINE__RETENTION__WORK_HOURS", "0.0000001")
    assert cli("submit", requests, "--customer", "acme") == 0
    batch_id = capsys.readouterr().out.strip()
    assert cli("housekeeping") == 0
    assert capsys.readouterr().out == "nothing to remove\n"
    complete(batch_id, parts)
    assert cli("housekeeping", "--dry-run") == 0
    assert "archive: 1 (0 objects, 3 rows) would be removed" in capsys.readouterr().out
    assert len(parts.ledger.chunks.of(batch_id)) == 1
    assert cli("housekeeping", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [removal["step"] for removal in report["report"]["removals"]] == ["archive", "work"]
    assert cli("verify", batch_id) == 0
    assert cli("audit", batch_id, "--custom-id", "a") == 0
    assert "what the workers wrote was removed" in capsys.readouterr().out
