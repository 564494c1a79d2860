"""Texts of customers and engines where people read them: nothing in them acts on a terminal, a log or a file."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from batch_pipeline.cli.app import make_console, print_json
from batch_pipeline.errors import CustomerError
from batch_pipeline.intake import options
from batch_pipeline.intake.blocks import Block
from batch_pipeline.intake.problems import LineProblem
from batch_pipeline.intake.rules import Rules
from batch_pipeline.plain import one_line, printable
from batch_pipeline.settings import Intake, Settings
from tests.fakes import intake_files

EVIL = "\x1b]0;pwned\x07\x1b[2J\x9b31m\u202etxt.exe\u2066\u200b\r\b\x00\U000e0041[red]:smile:"
ANY = st.text(st.characters(exclude_categories=[]), max_size=40)


@given(ANY)
def test_printable_text_has_nothing_that_acts_and_reads_the_same_in_json(text: str) -> None:
    shown = printable(text)
    assert shown.replace("\n", "").replace("\t", "").isprintable()
    assert printable(shown) == shown
    document = json.dumps({"a": text}, ensure_ascii=False)
    assert json.loads(printable(document)) == {"a": text}


@given(ANY)
def test_one_line_is_one_printable_line(text: str) -> None:
    assert one_line(text * 50, 60).isprintable()
    assert len(one_line(text * 50, 60)) <= 60


def test_what_the_command_line_prints_cannot_act(capsys: pytest.CaptureFixture[str]) -> None:
    console = make_console()
    console.print(f"reason {EVIL}", soft_wrap=True)
    table = Table("name")
    table.add_row(EVIL)
    console.print(table)
    print_json({"custom_id": EVIL})
    out = capsys.readouterr().out
    assert all(line.isprintable() for line in out.split("\n"))
    assert "\\u001b" in out
    assert "[red]:smile:" in out
    assert json.loads(out[out.index("{\n") :]) == {"custom_id": EVIL}


@pytest.mark.parametrize("key", ["x", EVIL, "\udcff"])
@pytest.mark.parametrize("value", ["\x1b[2J", "\udcff", "\u202e", "a\nb", "\x00"])
def test_metadata_is_printable_text(key: str, value: str) -> None:
    with pytest.raises(CustomerError) as caught:
        options.choose(Intake(), metadata={key: value})
    assert caught.value.code == "invalid_option"
    assert str(caught.value).isprintable()
    assert str(caught.value).encode()


FIELDS: list[dict[str, Any]] = [
    {"method": EVIL},
    {"url": EVIL},
    {"body": {"model": EVIL, "messages": [{"role": "user", "content": "hi"}]}},
    {"body": {"model": "m", "messages": [{"role": EVIL, "content": "hi"}]}},
    {"body": {"model": "m", "messages": [{"role": "user", "content": [{"type": EVIL}]}]}},
    {"body": {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", EVIL: 1}]}]}},
    {"body": {"model": "m", "messages": [{"role": "user", "content": "hi"}], "logit_bias": {EVIL: "x"}}},
    {"body": {"model": "m", EVIL: 1}},
]


@pytest.mark.parametrize("changed", FIELDS, ids=range(len(FIELDS)))
def test_messages_about_lines_are_printable(changed: dict[str, Any]) -> None:
    line = {"custom_id": "a\u202e", "method": "POST", "url": "/v1/chat/completions", "body": {}, **changed}
    for text in (json.dumps(line), json.dumps(line, ensure_ascii=False)):
        checked = intake_files.check(Block(0, 0, text.encode()), Rules(Settings(), "/v1/chat/completions"))
        (problem,) = checked.problems
        assert isinstance(problem, LineProblem)
        assert problem.message.isprintable()
        assert len(problem.message) < 400


@pytest.mark.parametrize("custom_id", ["a\x1b[2J", "a\nb", "a\x00", "\x9b", "\ud800", "x" * 513, ""])
def test_custom_ids_that_could_act_are_refused(custom_id: str) -> None:
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": {}}
    checked = intake_files.check(Block(0, 0, json.dumps(line).encode()), Rules(Settings(), "/v1/chat/completions"))
    assert [problem.code for problem in checked.problems] != []
    assert checked.problems[0].message.isprintable()
