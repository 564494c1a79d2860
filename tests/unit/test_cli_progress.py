"""How batches that run are shown."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

from batch_pipeline.cli.progress import Bars, Lines, Pace, duration, follow, progress, words
from batch_pipeline.results.manifest import Counts
from batch_pipeline.results.status import (
    FilesShown,
    InputDetails,
    OutputDetails,
    RequestCounts,
    StatusDocument,
    UsageObject,
)


def document(status: str = "in_progress", completed: int = 0, total: int = 10, as_of: float = 100.0) -> StatusDocument:
    return StatusDocument(
        id="batch_1",
        endpoint="/v1/chat/completions",
        model=None,
        errors=None,
        input_file_id="batches/batch_1/input.jsonl",
        completion_window="24h",
        status=status,
        output_file_id=None,
        error_file_id=None,
        created_at=90,
        in_progress_at=None,
        expires_at=1000,
        finalizing_at=None,
        completed_at=None,
        failed_at=None,
        expired_at=None,
        cancelling_at=None,
        cancelled_at=None,
        request_counts=RequestCounts(total=total, completed=completed, failed=0),
        usage=UsageObject(
            input_tokens=0,
            input_tokens_details=InputDetails(cached_tokens=0),
            output_tokens=0,
            output_tokens_details=OutputDetails(),
            total_tokens=0,
        ),
        metadata={},
        customer="acme",
        name="notes",
        counts=Counts(total=total, completed=completed),
        reason=None,
        estimated_finish_at=None,
        warning=None,
        cost=None,
        files=FilesShown(),
        revision=1,
        progress=0,
        as_of=as_of,
    )


def test_without_a_terminal_each_change_is_one_line() -> None:
    written: list[str] = []
    lines = Lines(written.append)
    waiting = msgspec.structs.replace(document("validating", total=0), reason="waiting for validation")
    for seen in (waiting, waiting, document(completed=1), document(completed=1, as_of=105), document("completed", 10)):
        lines.show([seen])
    assert written == [
        "acme/notes  0/?  validating, waiting for validation",
        "acme/notes  1/10  in_progress",
        "acme/notes  10/10  completed",
    ]


def test_a_terminal_gets_a_bar_for_each_batch() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with progress(console) as show:
        show([document(completed=4)])
    assert isinstance(console.file, io.StringIO)
    assert "acme/notes" in console.file.getvalue()
    assert "4/10" in console.file.getvalue()


def test_a_narrow_terminal_cuts_off_nothing() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    reason = "waiting for a worker of smollm2-135m: its engine is loading the model"
    with progress(console) as show:
        show([msgspec.structs.replace(document(completed=4), reason=reason)])
    assert isinstance(console.file, io.StringIO)
    last = console.file.getvalue().rpartition("acme/notes")[2]
    assert "4/10" in last
    assert "…" not in last
    assert "loading the" in last


def test_a_bar_knows_no_total_before_validation() -> None:
    with Progress(TextColumn("")) as bars:
        Bars(bars).show([document("validating", total=0)])
        assert bars.tasks[0].total is None


def test_words_have_the_reason_the_rate_and_the_estimate() -> None:
    seen = msgspec.structs.replace(document(), reason="running on smollm2-135m", estimated_finish_at=190.0)
    assert words(seen, 0.5) == "in_progress, running on smollm2-135m, 0.5 requests/s, done in about 90 s"


def test_a_batch_that_has_ended_has_no_estimate() -> None:
    assert words(msgspec.structs.replace(document("expired"), estimated_finish_at=190.0), 0.5) == "expired"


def test_the_rate_leaves_out_the_time_before_the_first_request_ran() -> None:
    pace = Pace()
    rates = [pace.rate(document(completed=done, as_of=at)) for done, at in ((0, 100.0), (0, 200.0), (6, 202.0))]
    assert rates == [None, None, 3.0]


def test_the_rate_of_a_batch_that_runs_already_counts_from_the_first_look() -> None:
    pace = Pace()
    rates = [pace.rate(document(completed=done, as_of=at)) for done, at in ((2, 100.0), (2, 101.0), (6, 102.0))]
    assert rates == [None, None, 2.0]


def test_a_batch_whose_results_are_assembled_has_no_estimate() -> None:
    assert words(msgspec.structs.replace(document("finalizing"), estimated_finish_at=190.0), 0.5) == "finalizing"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0 s"), (45, "45 s"), (150, "2 min"), (7_800, "2 h 10 min"), (3 * 86_400 + 4 * 3600, "3 d 4 h")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_batch_is_followed_to_its_end() -> None:
    answers = iter([document("validating"), document(), document("cancelled")])
    shown: list[str] = []
    pauses: list[float] = []
    last = follow(lambda: next(answers), lambda seen: shown.append(seen[0].status), 1.0, pauses.append)
    assert last.status == "cancelled"
    assert shown == ["validating", "in_progress", "cancelled"]
    assert pauses == [1.0, 1.0]
