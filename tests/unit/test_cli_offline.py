"""The command line where no service is needed: usage, messages, exit statuses, the configuration that counts."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from batch_pipeline import settings as configuration
from batch_pipeline.cli.effective import MASK, masked, to_toml
from batch_pipeline.cli.program import commands, run
from batch_pipeline.models import Model
from batch_pipeline.settings import Settings

REQUEST = {
    "custom_id": "one",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "small", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration with one model and an object store where nobody listens."""
    for variable in (configuration.CONFIG_VARIABLE, "AWS_PROFILE"):
        monkeypatch.delenv(variable, raising=False)
    file = tmp_path / "batch-pipeline.toml"
    file.write_text(
        """
[store]
endpoint_url = "http://127.0.0.1:9"
access_key_id = "key"
secret_access_key = "secret-of-the-store"

[models.small]
source = "models/small"
context_length = 2048
""",
        encoding="utf-8",
    )
    return file


@pytest.mark.parametrize("name", sorted(commands.commands))
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--help"]) == 0
    assert "Usage: batch-pipeline" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["nosuch"], ["status"], ["submit", "file"], ["results", "batch_1"], ["list", "--limit", "none"]]
)
def test_a_wrong_command_line_is_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    assert "Usage:" in capsys.readouterr().err


def test_a_broken_configuration_is_one_line_for_the_operator(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text("[store]\nbuckett = 'x'\n", encoding="utf-8")
    assert run(["--config", str(config), "list"]) == 3
    said = capsys.readouterr().err
    assert "buckett" in said
    assert said.count("\n") == 1


def test_a_store_that_is_away_is_one_line_for_the_operator(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(json.dumps(REQUEST), encoding="utf-8")
    assert run(["--config", str(config), "submit", str(file), "--customer", "acme"]) == 3
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "Traceback" not in said


def test_a_ledger_that_is_away_is_one_line_for_the_operator(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATCH_PIPELINE__LEDGER__URL", "postgresql+psycopg://nobody:secret@127.0.0.1:9/none")
    assert run(["--config", str(config), "list"]) == 3
    said = capsys.readouterr().err
    assert said.startswith("error: the ledger cannot be used: ")
    assert said.count("\n") == 1
    assert "secret" not in said


@pytest.mark.parametrize(
    "url",
    [
        "secret",
        "postgresql+nosuch://nobody:secret@127.0.0.1/none",
        "postgresql+asyncpg://nobody:secret@127.0.0.1/none",
        "postgresql://nobody:secret@127.0.0.1:port/none",
    ],
)
def test_a_ledger_url_that_means_nothing_is_one_line_for_the_operator(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    monkeypatch.setenv("BATCH_PIPELINE__LEDGER__URL", url)
    assert run(["--config", str(config), "list"]) == 3
    said = capsys.readouterr().err
    assert re.search(r"^error: .*ledger\.url (cannot be used|must be)", said)
    assert said.count("\n") == 1
    assert "secret" not in said


def test_a_ledger_file_that_is_no_database_is_one_line_for_the_operator(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ledger").write_bytes(b"no database, " * 500)
    monkeypatch.setenv("BATCH_PIPELINE__LEDGER__URL", f"sqlite:///{tmp_path / 'ledger'}")
    assert run(["--config", str(config), "list"]) == 3
    said = capsys.readouterr().err
    assert (
        said
        == "error: the ledger cannot be used: file is not a database; `batch-pipeline doctor` looks at every part\n"
    )


@pytest.mark.parametrize("arguments", [["status", "batch_\udcff"], ["list", "--customer", "\udcff"]])
def test_an_argument_that_is_not_utf8_is_one_line(
    config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert run(["--config", str(config), *arguments]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.endswith("the argument is not UTF-8\n")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (["--customer", "Acme Ltd"], "customer 'Acme Ltd'"),
        (["--name", "../x"], "name '../x'"),
        (["--window", "5m"], "from 1h to 7d"),
        (["--window", "tomorrow"], "90m, 24h or 7d"),
        (["--window", "8d"], "from 1h to 7d"),
        (["--endpoint", "/v1/other"], "'/v1/other' is not accepted"),
        (["--metadata", "novalue"], "write it as KEY=VALUE"),
        (["--idempotency-key", "k" * 257], "has 257 characters: give it 1 to 256"),
        (["--idempotency-key", ""], "has 0 characters"),
    ],
)
def test_submit_says_what_it_cannot_accept_before_it_sends_anything(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: list[str], expected: str
) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(json.dumps(REQUEST), encoding="utf-8")
    assert run(["--config", str(config), "submit", str(file), "--customer", "acme", *changed]) == 1
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(("name", "expected"), [("missing.jsonl", "does not exist"), (".", "is a folder")])
def test_submit_wants_a_file(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, expected: str
) -> None:
    assert run(["--config", str(config), "submit", str(tmp_path / name), "--customer", "acme", "--name", "a"]) == 1
    assert expected in capsys.readouterr().err


def test_submit_refuses_a_file_that_is_too_large(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATCH_PIPELINE__INTAKE__MAX_FILE_BYTES", "10")
    file = tmp_path / "requests.jsonl"
    file.write_bytes(b"x" * 11)
    assert run(["--config", str(config), "submit", str(file), "--customer", "acme"]) == 1
    assert "11 bytes; at most 10" in capsys.readouterr().err


def test_worker_names_the_models_that_there_are(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--config", str(config), "worker", "large"]) == 1
    assert "no model 'large' in the configuration; it has: small" in capsys.readouterr().err


def test_config_prints_toml_that_means_the_same(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--config", str(config), "config"]) == 0
    printed = capsys.readouterr().out
    assert "secret-of-the-store" not in printed
    read = msgspec.convert(tomllib.loads(printed), Settings)
    expected = configuration.load(config, environment={})
    masked_store = msgspec.structs.replace(expected.store, secret_access_key=MASK)
    assert read == msgspec.structs.replace(expected, store=masked_store)


def test_config_masks_whatever_opens_a_door() -> None:
    model = Model(
        source="/models/a b",
        context_length=10,
        engine_arguments=[
            "--api-key",
            "door",
            "--hf-token=door",
            "--tokenizer",
            "shown",
            "--max-num-batched-tokens",
            "9",
        ],
        engine_environment={"HF_TOKEN": "door", "VLLM_API_KEY": "door", "TOKENIZERS_PARALLELISM": "shown", "ONE": "1"},
        engine_url="http://user:door@host:8000/v1",
    )
    settings = Settings(
        store=configuration.Store(access_key_id="id", secret_access_key="door"),
        ledger=configuration.Ledger(url="postgresql+psycopg://user:door@host/ledger"),
        models={"a.b": model},
    )
    printed = to_toml(masked(settings))
    assert "door" not in printed
    read = msgspec.convert(tomllib.loads(printed), Settings)
    assert read.ledger.url == f"postgresql+psycopg://user:{MASK}@host/ledger"
    assert read.models["a.b"].engine_url == f"http://user:{MASK}@host:8000/v1"
    assert read.models["a.b"].engine_environment == {
        "HF_TOKEN": MASK,
        "VLLM_API_KEY": MASK,
        "TOKENIZERS_PARALLELISM": "shown",
        "ONE": "1",
    }
    assert read.models["a.b"].engine_arguments == [
        "--api-key",
        MASK,
        f"--hf-token={MASK}",
        "--tokenizer",
        "shown",
        "--max-num-batched-tokens",
        "9",
    ]
