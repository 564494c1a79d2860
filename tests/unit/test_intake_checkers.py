"""Lines checked in processes beside this one: the same answers in the same order, and no process outlives its work."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from batch_pipeline.intake import checkers
from batch_pipeline.intake.block_check import CheckedBlock
from batch_pipeline.intake.blocks import BYTE_ORDER_MARK, Block, read_blocks
from batch_pipeline.intake.checkers import CheckerLost, Checkers, check_all
from batch_pipeline.settings import Settings
from tests.fakes.intake_files import BAD, CHAT, file_of, request_line
from tests.fakes.small_model import small_settings, write_model


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Settings with the small model."""
    return small_settings(write_model(tmp_path_factory.mktemp("model")))


DATA = BYTE_ORDER_MARK + file_of([request_line(n) if n % 7 else BAD for n in range(400)]) + b"x" * 5000


def blocks() -> Iterator[Block]:
    """Blocks of good and bad lines, the last line too long, behind a byte order mark."""
    return read_blocks((DATA[start : start + 1500] for start in range(0, len(DATA), 1500)), 3000)


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    """The file of these blocks, open."""
    path = tmp_path / "input.jsonl"
    path.write_bytes(DATA)
    with path.open("rb") as file:
        yield file.fileno()


def children() -> list[psutil.Process]:
    """The processes that check lines for this one."""
    own = psutil.Process().children()
    return [p for p in own if p.status() != psutil.STATUS_ZOMBIE and "batch_pipeline.intake" in p.cmdline()]


def test_answers_are_the_same_in_the_same_order(
    settings: Settings, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = list(check_all(blocks(), settings, CHAT, descriptor=descriptor, size=None))
    assert [problem.code for problem in here[-1].problems] == ["line_too_long"]
    assert sum(len(block.requests.array) for block in here) > 300
    monkeypatch.setattr(checkers, "PARALLEL_BYTES", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert list(check_all(blocks(), settings, CHAT, descriptor=descriptor, size=2)) == here
    assert children() == []


def test_processes_end_with_the_work_also_where_it_is_given_up(settings: Settings, descriptor: int) -> None:
    def begin() -> Iterator[CheckedBlock]:
        with Checkers(settings, CHAT, descriptor, 2) as processes:
            yield from processes.check(blocks())

    work = begin()
    next(work)
    assert children() != []
    work.close()
    assert children() == []


def test_a_process_that_is_killed_ends_the_work_and_loses_nothing_silently(settings: Settings, descriptor: int) -> None:
    with Checkers(settings, CHAT, descriptor, 1) as processes:
        answers = processes.check(blocks())
        next(answers)
        children()[0].send_signal(signal.SIGKILL)
        with pytest.raises(CheckerLost, match="-9"):
            list(answers)


def test_a_process_ends_with_its_parent(tmp_path: Path) -> None:
    """What it is given ends; so does it."""
    given, answers = tmp_path / "given", tmp_path / "answers"
    given.write_bytes(b"")
    with given.open("rb") as source, answers.open("wb") as target:
        checkers.serve(source, target)
    assert answers.read_bytes() == b""
