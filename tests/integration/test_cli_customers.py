"""`customers` makes keys that open the API, shows them once, and says what counts for whom."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from batch_pipeline.cli.program import run
from batch_pipeline.ledger import Ledger


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "batch-pipeline.toml"
    file.write_text("[limits]\nmax_open_batches = 7\n", encoding="utf-8")
    return file


def said(config: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["--config", str(config), "customers", *words]) == 0
    return capsys.readouterr().out


def test_a_key_is_shown_once_and_opens_until_it_is_revoked(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = said(config, capsys, "keys", "add", "acme", "--label", "nightly").strip()
    other = json.loads(said(config, capsys, "keys", "add", "acme", "--json"))
    assert secret.startswith("bp-")
    assert len(secret) > 40
    listed = said(config, capsys, "keys", "list", "acme")
    assert "nightly" in listed
    assert secret[:10] in listed
    assert secret not in listed + said(config, capsys, "show", "acme", "--json")
    ledger = Ledger.open(f"sqlite:///{config.parent / 'var' / 'ledger.sqlite'}")
    known = ledger.customers.by_secret(secret)
    assert known is not None
    assert known.customer.customer == "acme"
    assert secret.encode() not in (config.parent / "var" / "ledger.sqlite").read_bytes()
    said(config, capsys, "keys", "revoke", "acme", known.key.key_id)
    assert ledger.customers.by_secret(secret) is None
    assert ledger.customers.by_secret(other["key"]) is not None
    assert ledger.customers.by_secret("bp-\udc80") is None
    ledger.close()


def test_limits_are_set_shown_and_forgotten_again(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(config, capsys, "add", "acme", "--weight", "2", "--max-requests", "5")
    shown = json.loads(said(config, capsys, "show", "acme", "--json"))["customer"]
    assert (shown["weight"], shown["own_limits"]) == (2.0, {"max_requests": 5})
    assert (shown["limits"]["max_requests"], shown["limits"]["max_open_batches"]) == (5, 7)
    said(config, capsys, "set", "acme", "--default", "max_requests", "--max-open-batches", "3")
    assert "acme" in said(config, capsys, "list")
    assert json.loads(said(config, capsys, "show", "acme", "--json"))["open_batches"] == 0
    [listed] = json.loads(said(config, capsys, "list", "--json"))
    assert (listed["weight"], listed["own_limits"]) == (2.0, {"max_open_batches": 3})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("add", "Acme!"), "customer 'Acme!'"),
        (("set", "nobody", "--weight", "1"), "no customer nobody"),
        (("set", "acme", "--weight", "5e-324"), "a weight is 0.001 to 1,000,000, where 1 is usual, not 5e-324"),
        (("add", "bolt", "--weight", "nan"), "a weight is 0.001 to 1,000,000, where 1 is usual, not nan"),
        (("show", "nobody"), "no customer nobody"),
        (("keys", "list", "nobody"), "no customer nobody"),
        (("keys", "revoke", "acme", "key_x"), "customer acme has no key key_x"),
    ],
)
def test_mistakes_are_one_clear_line(
    config: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    said(config, capsys, "add", "acme")
    assert run(["--config", str(config), "customers", *words]) == 1
    assert f"error: {message}" in capsys.readouterr().err


def test_a_port_that_is_taken_is_one_clear_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(["--config", str(config), "serve", "--port", str(port)]) == 3
    assert f"127.0.0.1:{port} cannot be listened on" in capsys.readouterr().err
