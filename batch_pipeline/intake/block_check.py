"""What the lines of a block are: plain ones all together, every other one by itself. Pure: no I/O of its own."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np

from batch_pipeline.intake.blocks import Block
from batch_pipeline.intake.lines import check_line
from batch_pipeline.intake.plain import take_plain
from batch_pipeline.intake.problems import LineProblem
from batch_pipeline.intake.rows import Request, Rows, rows_of
from batch_pipeline.intake.rules import Rules


class CheckedBlock(msgspec.Struct, frozen=True):
    """What a block of lines holds, in the order of the lines: together they are its lines that are not blank."""

    requests: Rows
    problems: list[LineProblem]


def check_block(block: Block, rules: Rules) -> CheckedBlock:
    """Return what the lines of a block are. Never raises for what a file holds."""
    if not block.is_cut and not block.data.strip():
        return CheckedBlock(rows_of([]), [])
    lines = block.data.removesuffix(b"\n").split(b"\n")
    places = [*itertools.accumulate(map(len, lines), lambda place, size: place + size + 1, initial=block.offset)]
    may_be_plain = not block.is_cut and _is_utf8(block.data)
    plain = take_plain(lines if may_be_plain else [], rules)
    plain.rows["line_offset"] = np.array(places, dtype=np.int64)[plain.rows["index"]]
    plain.rows["index"] += block.first_line
    requests: list[Request] = []
    problems: list[LineProblem] = []
    for position in sorted(plain.left) if may_be_plain else range(len(lines)):
        number = block.first_line + position
        checked = check_line(lines[position], number, places[position], rules, is_cut=block.is_cut)
        if isinstance(checked, Request):
            requests.append(checked)
        elif checked is not None:
            problems.append(checked)
    return CheckedBlock(rows_of(requests, plain.models, plain.rows), problems)


def _is_utf8(data: bytes) -> bool:
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
