"""Ports that are chosen before anybody listens on them."""

from __future__ import annotations

import pytest

from batch_pipeline.embedded import ports
from batch_pipeline.errors import OperatorError


@pytest.fixture(autouse=True)
def few_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three to choose from, none of which was chosen."""
    monkeypatch.setattr(ports, "_LOWEST", 21_000)
    monkeypatch.setattr(ports, "_HIGHEST", 21_003)
    monkeypatch.setattr(ports, "_reserved", set())
    monkeypatch.setattr(ports, "is_free", lambda _port: True)


def test_a_port_is_chosen_once_though_nobody_listens_on_it_yet() -> None:
    assert sorted(ports.free_ports(1) + ports.free_ports(2)) == [21_000, 21_001, 21_002]
    with pytest.raises(OperatorError, match="no 1 free ports"):
        ports.free_ports(1)


def test_what_others_are_to_listen_on_is_not_chosen_nor_what_is_ten_thousand_above() -> None:
    ports.reserve(21_001, 11_002)
    assert ports.free_ports(1) == [21_000]
    with pytest.raises(OperatorError):
        ports.free_ports(1)


def test_a_port_is_not_chosen_where_somebody_is_to_listen_ten_thousand_above() -> None:
    ports.reserve(31_000, 31_002)
    assert ports.free_ports(1) == [21_001]
