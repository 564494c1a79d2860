"""The command line over HTTP: a customer's key and the service's URL are all that it needs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest

from batch_pipeline.cli.app import KEY_VARIABLE, URL_VARIABLE
from batch_pipeline.cli.program import run as run_program
from batch_pipeline.embedded.ports import free_ports
from batch_pipeline.ledger import Ledger
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore
from tests.fakes import service
from tests.fakes.openai_client import Run, create, line

Cli = Callable[..., int]


@pytest.fixture
def cli(served: service.Running, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Run one command line as a customer who has nothing but a key."""
    monkeypatch.setenv(URL_VARIABLE, f"{served.url}/v1")
    monkeypatch.setenv(KEY_VARIABLE, service.new_key(ledger, "acme"))
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: run_program([*map(str, arguments)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "greetings.jsonl"
    file.write_bytes(line("a") + b"{\n" + line("c"))
    return file


def test_a_batch_from_its_file_to_its_results(
    cli: Cli, file: Path, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submit = ("submit", file, "--window", "2h", "--metadata", "team=search", "--idempotency-key", "k1")
    assert cli(*submit) == 0
    batch_id = capsys.readouterr().out.strip()
    assert cli("status", batch_id) == 0
    assert "acme, as greetings" in capsys.readouterr().out
    assert cli("results", batch_id, "--to", tmp_path / "out") == 1
    assert "its results are there once it is completed" in capsys.readouterr().err
    run(batch_id)
    assert cli("watch", batch_id, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["status"], document["completion_window"]) == ("completed", "2h")
    assert document["metadata"] == {"team": "search"}
    assert document["counts"] == {"total": 3, "completed": 2, "failed": 0, "expired": 0, "cancelled": 0, "invalid": 1}
    assert document["cost"] is not None
    assert cli("results", batch_id, "--to", tmp_path / "out") == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "errors.jsonl",
        "manifest.json",
        "output.jsonl",
    ]
    assert len((tmp_path / "out" / "output.jsonl").read_bytes().splitlines()) == 2
    assert cli("cancel", batch_id) == 1
    assert "completed" in capsys.readouterr().err


def test_the_same_idempotency_key_gives_the_same_batch_only_for_the_same_file(
    cli: Cli, file: Path, capsys: pytest.CaptureFixture[str], client: openai.OpenAI
) -> None:
    assert cli("submit", file, "--idempotency-key", "k1") == 0
    first = capsys.readouterr().out
    assert cli("submit", file, "--idempotency-key", "k1") == 0
    assert capsys.readouterr().out == first
    sent = file.read_bytes()
    # Also one of the same size.
    for other in (line("other"), sent[:-3] + bytes([sent[-3] ^ 1]) + sent[-2:]):
        file.write_bytes(other)
        assert cli("submit", file, "--idempotency-key", "k1") == 1
        assert first.strip() in capsys.readouterr().err
    assert len(client.batches.list().data) == len(client.files.list().data) == 1


def test_a_key_tells_another_file_also_once_the_first_one_is_deleted(
    cli: Cli, file: Path, capsys: pytest.CaptureFixture[str], client: openai.OpenAI
) -> None:
    assert cli("submit", file, "--idempotency-key", "k1") == 0
    first = capsys.readouterr().out
    (uploaded,) = client.files.list().data
    client.files.delete(uploaded.id)
    assert cli("submit", file, "--idempotency-key", "k1") == 0
    assert capsys.readouterr().out == first
    file.write_bytes(line("other"))
    assert cli("submit", file, "--idempotency-key", "k1") == 1
    assert "with another file" in capsys.readouterr().err


def test_what_is_no_file_or_no_address_is_one_clear_line(
    cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    assert cli("submit", tmp_path / "missing.jsonl") == 1
    assert "does not exist: name a file of requests" in capsys.readouterr().err
    assert cli("--url", "http://[::1", "submit", file) == 1
    assert "is no address" in capsys.readouterr().err
    monkeypatch.setenv("BATCH_PIPELINE_URL", "http://127.0.0.1:1")
    assert cli("verify", "batch_x") == 2
    assert "BATCH_PIPELINE_URL is set, and verify does not go over HTTP" in capsys.readouterr().err


def test_batches_are_listed_and_cancelled(cli: Cli, client: openai.OpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    made = [create(client, line("a")).id for _ in range(3)]
    assert cli("cancel", made[1]) == 0
    assert made[1] in capsys.readouterr().out
    assert cli("list", "--json", "--limit", "2") == 0
    assert [batch["id"] for batch in json.loads(capsys.readouterr().out)] == [made[2], made[1]]
    assert cli("list", "--json", "--status", "validating") == 0
    assert made[0] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("status", "batch_" + "0" * 32), "batch_" + "0" * 32),
        (("submit", "missing.jsonl"), "missing.jsonl"),
        (("submit", "greetings.jsonl", "--customer", "acme"), "the key says whose batch it is"),
        (("submit", "greetings.jsonl", "--window", "1m"), "window"),
        (("submit", "greetings.jsonl", "--endpoint", "/v1/images"), "endpoint"),
        (("list", "--customer", "acme"), "the key says whose batches"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    *,
    arguments: tuple[str, ...],
    said: str,
    cli: Cli,
    file: Path,
    client: openai.OpenAI,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli(*arguments) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert said in error
    assert client.batches.list().data == client.files.list().data == []


def test_a_command_that_does_not_go_over_http_says_so(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("--url", "http://127.0.0.1:1", "verify", "batch_" + "0" * 32) == 2
    assert "verify does not go over HTTP" in capsys.readouterr().err


def test_a_wrong_key_a_missing_one_and_a_service_that_is_away_are_said(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "bp-wrong")
    assert cli("list") == 1
    assert "key" in capsys.readouterr().err
    monkeypatch.delenv(KEY_VARIABLE)
    assert cli("list") == 1
    assert KEY_VARIABLE in capsys.readouterr().err
    monkeypatch.setenv(KEY_VARIABLE, "bp-wrong")
    monkeypatch.setattr("batch_pipeline.cli.remote.time.sleep", lambda _seconds: None)
    assert cli("--url", f"http://127.0.0.1:{free_ports(1)[0]}", "list") == 3
    assert "cannot be reached" in capsys.readouterr().err


def test_an_upload_that_was_refused_for_its_rate_is_sent_again(
    cli: Cli, file: Path, served: service.Running, ledger: Ledger, client: openai.OpenAI
) -> None:
    ledger.customers.set("acme", limits={"requests_per_minute": 120})
    for key in ledger.customers.keys("acme"):
        while served.app.state.services.rates.take(key.key_id, 120) == 0:
            pass
    assert cli("submit", file) == 0
    (batch,) = client.batches.list().data
    assert client.files.content(batch.input_file_id).content == file.read_bytes()


def test_watch_waits_for_a_service_that_starts_again(
    *,
    ledger: Ledger,
    store: ObjectStore,
    settings: Settings,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, service.new_key(ledger, "acme"))
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with (
        service.running(ledger, store, settings, port=port),
        openai.OpenAI(base_url=f"{url}/v1", api_key=os.environ[KEY_VARIABLE], max_retries=0) as client,
    ):
        batch_id = create(client, line("a")).id
    again = ExitStack()

    def starts(_seconds: float) -> None:
        """The pause of a command that found nobody: by its end the batch is over and the service back."""
        if "waiting for it" in capsys.readouterr().err:
            run(batch_id)
            again.enter_context(service.running(ledger, store, settings, port=port))

    monkeypatch.setattr("time.sleep", starts)
    with again:
        assert run_program(["--url", url, "watch", batch_id]) == 0
