"""The cases in tests/cases/validation: small files with the right answer, line by line."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from batch_pipeline.intake.blocks import read_blocks
from batch_pipeline.intake.check import check_file
from batch_pipeline.intake.problems import LineProblem
from batch_pipeline.intake.rules import Rules
from batch_pipeline.settings import Settings
from tests.fakes import intake_files
from tests.fakes.small_model import small_settings, write_model

CASES = Path(__file__).resolve().parent.parent / "cases" / "validation"
EXPECTED: dict[str, dict[str, Any]] = json.loads((CASES / "expected.json").read_text(encoding="utf-8"))
ENDPOINT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Settings with the model that the cases name."""
    return small_settings(write_model(tmp_path_factory.mktemp("model")))


def answers(report_total: int, problems: list[LineProblem], expected: list[str | None]) -> list[str | None]:
    """Return what was said of each line, for lines that are requests according to the case."""
    codes = {problem.line: problem.code for problem in problems}
    assert report_total == sum(line is not None for line in expected)
    return [None if line is None else codes.pop(number, "ok") for number, line in enumerate(expected, 1)]


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_case_gives_the_expected_answers(name: str, settings: Settings) -> None:
    expected = EXPECTED[name]["lines"]
    report = check_file(CASES / f"{name}.jsonl", ENDPOINT, settings)
    problems = list(report)
    assert answers(report.total, problems, expected) == expected
    assert report.invalid == len(problems)
    assert [problem.line for problem in problems] == sorted({problem.line for problem in problems})


@pytest.mark.parametrize("name", sorted(EXPECTED))
@pytest.mark.parametrize("size", [1, 7, 300])
def test_answers_do_not_depend_on_how_the_file_is_read(name: str, size: int, settings: Settings) -> None:
    data = (CASES / f"{name}.jsonl").read_bytes()[:5000]
    rules = Rules(settings, ENDPOINT)

    def read(piece: int) -> list[object]:
        pieces = (data[start : start + piece] for start in range(0, len(data), piece))
        checked = [intake_files.check(block, rules) for block in read_blocks(pieces, settings.intake.max_line_bytes)]
        return [entry for part in checked for entry in [*part.requests, *part.problems]]

    assert sorted(map(str, read(size))) == sorted(map(str, read(len(data) or 1)))


def test_a_stream_is_checked_like_a_file(settings: Settings) -> None:
    data = (CASES / "duplicate_custom_id.jsonl").read_bytes()
    from_stream = list(check_file(io.BytesIO(data), ENDPOINT, settings))
    assert from_stream == list(check_file(CASES / "duplicate_custom_id.jsonl", ENDPOINT, settings))
    assert from_stream[0].message.startswith('custom_id "a" is already that of line 1')


@pytest.mark.parametrize(
    ("name", "line", "custom_id", "words"),
    [
        ("missing_fields", 1, "a", "url is missing"),
        ("missing_fields", 2, None, "custom_id is missing"),
        ("missing_fields", 3, "c", "body is missing"),
        ("unknown_model", 1, "a", '"no-such-model"'),
        ("unknown_model", 2, "b", "body.model"),
        ("stream_and_priority", 1, "a", "body.stream"),
        ("messages_shape", 3, "c", "body.temperature must be a number from 0 to 2"),
        ("over_long_prompt", 2, "b", "body.max_tokens is 1000000"),
        ("hostile_json", 7, "h", "body.max_tokens"),
    ],
)
def test_message_names_the_field_and_the_mend(
    name: str, line: int, custom_id: str | None, words: str, settings: Settings
) -> None:
    problem = next(p for p in check_file(CASES / f"{name}.jsonl", ENDPOINT, settings) if p.line == line)
    assert (problem.custom_id, words in problem.message) == (custom_id, True), problem


def test_an_empty_file_is_a_problem_of_the_file(settings: Settings) -> None:
    report = check_file(CASES / "empty_file.jsonl", ENDPOINT, settings)
    assert [error.code for error in report.errors] == ["empty_batch"]
    assert list(report) == []
