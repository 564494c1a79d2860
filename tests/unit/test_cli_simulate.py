"""`simulate` and `plan` on the command line, and the example workloads."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from batch_pipeline.cli.program import run
from batch_pipeline.settings import Intake, Scheduling, Worker
from batch_pipeline.simulate import POLICIES, load
from batch_pipeline.simulate.arrivals import draw
from batch_pipeline.simulate.workload import Customers, Failures, ListedBatch, Outage, SimulatedModel, Spread, Workload

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "workloads"
SMALL = str(EXAMPLES / "small.toml")


def test_the_examples_are_valid_and_the_large_one_is_a_day_at_a_billion() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.toml")} == {"billion", "small", "trough", "overload", "reference"}
    for file in EXAMPLES.glob("*.toml"):
        load(file)
    batches = draw(load(EXAMPLES / "billion.toml"))
    assert 9_500 <= len(batches) <= 10_500
    assert 0.95e9 <= sum(batch.requests for batch in batches) <= 1.1e9
    assert max(batch.requests for batch in batches) == 1_000_000


def test_the_reference_has_every_field_and_its_default() -> None:
    reference = load(EXAMPLES / "reference.toml")
    written = tomllib.loads((EXAMPLES / "reference.toml").read_text(encoding="utf-8"))
    customers, model = written["customers"][0], written["models"]["small"]
    assert written.keys() == set(Workload.__struct_fields__)
    assert customers.keys() == set(Customers.__struct_fields__)
    assert model.keys() == set(SimulatedModel.__struct_fields__)
    assert written["failures"].keys() == set(Failures.__struct_fields__)
    assert written["failures"]["outages"][0].keys() == set(Outage.__struct_fields__)
    assert customers["batches"][0].keys() == set(ListedBatch.__struct_fields__)
    for field in ("requests", "prompt_tokens", "output_share"):
        assert customers[field].keys() == set(Spread.__struct_fields__)
    assert (reference.intake, reference.worker, reference.scheduling) == (Intake(), Worker(), Scheduling())
    least = Workload(name="", gpus=8, models={}, customers=[])
    for field in ("seed", "hours", "step_seconds", "speed_seconds", "estimate_seconds", "live"):
        assert getattr(reference, field) == getattr(least, field)


def test_all_policies_are_compared_in_a_table_and_on_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert run(["simulate", SMALL, "--compare", "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "simulated, not measured" in printed
    text = page.read_text(encoding="utf-8")
    for name in POLICIES:
        assert re.search(rf"^{name} ", printed, re.MULTILINE)
        assert f"<td>{name}</td>" in text
    assert text.count("<svg") == text.count("</svg>") == 3
    assert "<script" not in text
    assert "http" not in text


def test_json_is_one_document_with_a_report_for_each_policy(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", SMALL, "--policy", "ours", "--policy", "fcfs", "--gpus", "2", "--seed", "9", "--json"]
    assert run(arguments) == 0
    ours, fcfs = json.loads(capsys.readouterr().out)
    assert (ours["policy"], fcfs["policy"], ours["gpus"], ours["seed"]) == ("ours", "fcfs", 2, 9)
    assert ours["requests"] == fcfs["requests"] == ours["served"] + ours["expired"]


def test_a_plan_shows_its_arithmetic_and_the_simulations_that_confirm_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", SMALL]) == 0
    shown = capsys.readouterr()
    for step in ("chat-8b: ", "average: ", "peak: ", "failures take ", "1 GPUs are enough for 99.90%"):
        assert step in shown.out
    assert "simulated 1 GPUs" in shown.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpus = 1", "missing required field"),
        ("gpus = 0", "gpus must be above 0"),
        ("gpu = 1", "gpu: no such field; is gpus meant?"),
        ("gpus = 1\nseed = ", "not valid TOML"),
    ],
)
def test_a_wrong_workload_is_one_line_that_names_file_and_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    file = tmp_path / "wrong.toml"
    rest = "" if message.startswith("missing") else "\nname = 'x'\ncustomers = []\nmodels = {}\n"
    file.write_text(text + rest, encoding="utf-8")
    assert run(["simulate", str(file)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(file) in line
    assert message in line


def test_an_unknown_policy_is_a_wrong_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", SMALL, "--policy", "best"]) == 2
    assert "no 'best'; there are ours, fcfs" in capsys.readouterr().err
