"""The example files hold what the demo promises: three kinds of work, two customers, three bad lines."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from batch_pipeline.cli.program import run
from batch_pipeline.embedded.demo import find_drops
from batch_pipeline.models import Model
from batch_pipeline.settings import Settings

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODEL = "smollm2-135m"
BAD_LINES = {
    "acme/notes.jsonl": [],
    "acme/tickets.jsonl": [
        {"line": 5, "custom_id": None, "code": "invalid_json_line"},
        {"line": 9, "custom_id": "ticket-002", "code": "duplicate_custom_id"},
    ],
    "globex/invoices.jsonl": [{"line": 6, "custom_id": "invoice-long", "code": "context_length_exceeded"}],
}


def test_there_are_the_files_of_two_customers() -> None:
    assert [str(file.relative_to(EXAMPLES)) for file in sorted(EXAMPLES.glob("*/*.jsonl"))] == sorted(BAD_LINES)


@pytest.mark.parametrize("name", sorted(BAD_LINES))
def test_each_file_has_the_bad_lines_that_it_should(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "batch-pipeline.toml"
    config.write_text(f"[models.{MODEL}]\nsource = 'model'\ncontext_length = 2048\n", encoding="utf-8")
    arguments = ["--config", str(config), "validate", str(EXAMPLES / name), "--endpoint", "/v1/chat/completions"]
    assert run([*arguments, "--json"]) == (1 if BAD_LINES[name] else 0)
    problems = json.loads(capsys.readouterr().out)
    assert all(problem["message"] for problem in problems)
    assert [{k: problem[k] for k in ("line", "custom_id", "code")} for problem in problems] == BAD_LINES[name]
    run(arguments)
    printed = capsys.readouterr().out
    assert [f"line {bad['line']}" in printed for bad in BAD_LINES[name]] == [True] * len(BAD_LINES[name])


def test_the_demo_expects_that_much_of_them(tmp_path: Path) -> None:
    settings = Settings(models={MODEL: Model(source=str(tmp_path), context_length=2048)})
    drops = find_drops(EXAMPLES, settings)
    good = sum(drop.requests - drop.bad_lines for drop in drops)
    assert (len(drops), good, sum(drop.bad_lines for drop in drops)) == (3, 27, 3)


@pytest.mark.parametrize("name", sorted(BAD_LINES))
def test_the_requests_of_a_file_share_a_system_prompt_and_want_short_answers(name: str) -> None:
    bad = {entry["line"] for entry in BAD_LINES[name]}
    lines = (EXAMPLES / name).read_text(encoding="utf-8").splitlines()
    bodies = [json.loads(line)["body"] for number, line in enumerate(lines, 1) if number not in bad]
    shared = Counter(json.dumps(body["messages"][:-1]) for body in bodies)
    assert list(shared.values()) == [len(bodies)]
    assert min(map(len, shared)) > 600
    assert all(body["messages"][0]["role"] == "system" for body in bodies)
    assert max(body["max_tokens"] for body in bodies) <= 24
