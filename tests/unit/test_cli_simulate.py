"""`simulate` and `plan` on the command line, and the example workloads."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from batch_pipeline.cli.program import run
from batch_pipeline.settings import Intake, Scheduling, Worker
from batch_pipeline.simulate import POLICIES, load
from batch_pipeline.simulate.arrivals import draw
from batch_pipeline.simulate.workload import (
    MOST_SIGMA,
    Customers,
    Failures,
    ListedBatch,
    Outage,
    SimulatedModel,
    Spread,
    Workload,
    check,
)

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


SENSELESS = """
name = "base"
gpus = 2
hours = 2.0
{top}
[models.m]
prompt_tokens_per_second = 10000
output_tokens_per_second = 1000
gpus_per_worker = 2
[[customers]]
name = "a"
count = 2
models = {{m = 1.0}}
batches_per_day = 48
{rest}
"""


def senseless(folder: Path, top: str = "", rest: str = "") -> str:
    """Return the path of a workload, which is a good one but for these lines."""
    file = folder / "senseless.toml"
    file.write_text(SENSELESS.format(top=top, rest=rest), encoding="utf-8")
    return str(file)


@pytest.mark.parametrize(
    ("top", "rest", "message"),
    [
        ("", "requests = {median = 100, sigma = 1000.0}", "customers.a.requests.sigma must be from 0 to 5, not 1000"),
        ("", "requests = {median = 100, least = 9.0, most = 8.0}", "customers.a.requests.least must not be more than"),
        ("seed = -1", "", "seed must be 0 or more, not -1"),
        (
            "",
            "[[failures.outages]]\nat_hours = -1.0\nhours = 1.0\ngpus = 1",
            "failures.outages.at_hours must be 0 or more, not -1.0",
        ),
        (
            "",
            "[[failures.outages]]\nat_hours = nan\nhours = 1.0\ngpus = 1",
            "failures.outages.at_hours must be 0 or more, not nan",
        ),
        ("", "[[customers]]\nname = 'a-1'\nmodels = {m = 1.0}", "'a-1' is also the name of one of the 2 of 'a'"),
        ("", "[scheduling]\nat_risk_share = 7.0", "scheduling.at_risk_share is a share: at most 1"),
        ("", "[worker]\nheartbeat_seconds = 40.0", "worker.heartbeat_seconds must be at most half of"),
        ("", "[intake]\nchunk_tokens = 0", "intake.chunk_tokens must be above 0, not 0"),
        ("", "[live]\ngpus_by_hour = [1]", "gpus_per_worker is 2, more than live.gpus_by_hour leaves of 2 gpus"),
    ],
)
def test_a_value_without_sense_is_refused_before_anything_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], top: str, rest: str, message: str
) -> None:
    load(Path(senseless(tmp_path)))
    assert run(["simulate", senseless(tmp_path, top, rest)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize("name", ["a-0", "a-3", "a-01", "a-x", "-1", "b-1"])
def test_a_name_that_none_of_the_counted_customers_has_is_free(tmp_path: Path, name: str) -> None:
    load(Path(senseless(tmp_path, rest=f"[[customers]]\nname = '{name}'\nmodels = {{m = 1.0}}")))


def _with_one_nan(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the place of each fraction in a value, and the value with nan there."""
    if isinstance(value, float):
        yield "", math.nan
    elif isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            for place, other in _with_one_nan(getattr(value, field)):
                yield f".{field}{place}", msgspec.structs.replace(value, **{field: other})
    elif isinstance(value, dict):
        for name, within in value.items():
            for place, other in _with_one_nan(within):
                yield f".{name}{place}", {**value, name: other}
    elif isinstance(value, list):
        for number, within in enumerate(value):
            for place, other in _with_one_nan(within):
                yield f"[{number}]{place}", [*value[:number], other, *value[number + 1 :]]


def test_nan_is_refused_wherever_it_stands() -> None:
    wrong = dict(_with_one_nan(load(EXAMPLES / "reference.toml")))
    assert {".hours", ".failures.outages[0].at_hours", ".customers[0].models.small"} < wrong.keys()
    assert [place for place, workload in wrong.items() if not check(workload)] == []


def test_the_widest_spread_can_be_drawn() -> None:
    reference = load(EXAMPLES / "reference.toml")
    widest = Spread(median=1000.0, sigma=MOST_SIGMA)
    (shop,) = reference.customers
    customers = msgspec.structs.replace(shop, requests=widest, prompt_tokens=widest, batches_per_day=1000.0)
    made = msgspec.structs.replace(reference, customers=[customers])
    assert check(made) == []
    assert all(widest.least <= batch.requests <= widest.most for batch in draw(made))


def test_the_gpus_of_the_command_line_are_checked_like_those_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = senseless(tmp_path)
    assert run(["simulate", file, "--gpus", "1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{file} with gpus = 1: models.m.gpus_per_worker is 2, more than gpus, which is 1" in line
    assert load(Path(file), gpus=4, seed=7) == msgspec.structs.replace(load(Path(file)), gpus=4, seed=7)


def test_an_unknown_policy_is_a_wrong_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", SMALL, "--policy", "best"]) == 2
    assert "no 'best'; there are ours, fcfs" in capsys.readouterr().err
