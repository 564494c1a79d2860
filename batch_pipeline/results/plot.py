"""The time line of a batch as a picture: a row per worker, a bar per attempt at a chunk, coloured by how it ended.

A PNG of some kilobytes, because that is what Dagster's UI shows within an event. The same values give the same picture.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

from batch_pipeline.results.timeline import Attempt, AttemptEnd

_WIDTH = 900
_LEFT, _RIGHT = 170, 20
_TOP, _AXIS, _LEGEND = 12, 26, 22
_ROW, _GAP = 30, 8
_CURVE = 70
_MOST_ROWS = 10
_MOST_LANES = 5
_TICKS = 5
_BACKGROUND, _INK, _FAINT, _CURVE_COLOUR = "#ffffff", "#2b2f3a", "#d6d9e0", "#4a5bd4"
_COLOURS = {
    AttemptEnd.COMMITTED: "#3aa76d",
    AttemptEnd.RELEASED: "#e0a030",
    AttemptEnd.LEASE_EXPIRED: "#d1495b",
    AttemptEnd.SUPERSEDED: "#9a6fb0",
    AttemptEnd.RUNNING: "#6aa5d8",
}
_WORDS = {
    AttemptEnd.COMMITTED: "committed",
    AttemptEnd.RELEASED: "handed back",
    AttemptEnd.LEASE_EXPIRED: "worker lost",
    AttemptEnd.SUPERSEDED: "run again",
    AttemptEnd.RUNNING: "running",
}


_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


class _Scale(NamedTuple):
    """From moments to pixels."""

    first: float
    last: float

    def x(self, moment: float) -> int:
        share = (moment - self.first) / max(self.last - self.first, 1e-9)
        return _LEFT + round(min(max(share, 0.0), 1.0) * (_WIDTH - _LEFT - _RIGHT))


def timeline_png(attempts: Sequence[Attempt], *, since: float, until: float, chunks: int) -> bytes:
    """Return the picture of the attempts between two moments (UTC seconds); `chunks` is their number in the batch.

    The workers that began last are shown together where there are more than ten.
    """
    rows = _rows(attempts)
    height = _TOP + _CURVE + _GAP + len(rows) * (_ROW + _GAP) + _AXIS + _LEGEND
    image = Image.new("RGB", (_WIDTH, height), _BACKGROUND)
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(size=12)
    scale = _Scale(since, max(until, since + 1.0))
    bottom = height - _AXIS - _LEGEND
    _draw_axis(draw, font, scale, bottom)
    _draw_curve(draw, font, scale, attempts, chunks)
    for number, (label, of_row) in enumerate(rows):
        top = _TOP + _CURVE + _GAP + number * (_ROW + _GAP)
        draw.text((8, top + _ROW // 2), _short(label), _INK, font, anchor="lm")
        draw.line([(_LEFT, top + _ROW + _GAP // 2), (_WIDTH - _RIGHT, top + _ROW + _GAP // 2)], _FAINT)
        _draw_bars(draw, scale, of_row, top, until)
    _draw_legend(draw, font, attempts, height - _LEGEND // 2)
    packed = io.BytesIO()
    image.quantize(32).save(packed, "PNG", optimize=True)
    return packed.getvalue()


def _rows(attempts: Sequence[Attempt]) -> list[tuple[str, list[Attempt]]]:
    """Return the attempts by worker, in the order in which the workers began."""
    by_worker: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        by_worker.setdefault(attempt.worker, []).append(attempt)
    rows = list(by_worker.items())
    if len(rows) <= _MOST_ROWS:
        return rows
    rest = [attempt for _, of_worker in rows[_MOST_ROWS - 1 :] for attempt in of_worker]
    return [*rows[: _MOST_ROWS - 1], (f"{len(rows) - _MOST_ROWS + 1} more workers", rest)]


def _draw_bars(draw: ImageDraw.ImageDraw, scale: _Scale, attempts: Sequence[Attempt], top: int, until: float) -> None:
    """Draw a row; attempts at one time stand below each other, as far as there is room."""
    ends: list[float] = []
    placed = []
    for attempt in attempts:
        ended = until if attempt.ended_at is None else attempt.ended_at
        lane = next((lane for lane, end in enumerate(ends) if end <= attempt.started_at), len(ends))
        ends[lane : lane + 1] = [ended]
        placed.append((attempt, ended, lane % _MOST_LANES))
    high = _ROW // min(max(len(ends), 1), _MOST_LANES)
    for attempt, ended, lane in placed:
        left, right = scale.x(attempt.started_at), scale.x(ended)
        box = [left, top + lane * high, max(right - 1, left + 1), top + (lane + 1) * high - 2]
        draw.rectangle(box, _COLOURS[attempt.ended])


def _draw_curve(
    draw: ImageDraw.ImageDraw, font: _Font, scale: _Scale, attempts: Sequence[Attempt], chunks: int
) -> None:
    """Draw how many chunks were committed by when."""
    base, most = _TOP + _CURVE - 4, max(chunks, 1)
    draw.text((8, _TOP + _CURVE // 2 - 8), "chunks committed", _INK, font, anchor="lm")
    draw.line([(_LEFT, base), (_WIDTH - _RIGHT, base)], _FAINT)
    committed = sorted(a.ended_at for a in attempts if a.ended == AttemptEnd.COMMITTED and a.ended_at is not None)
    draw.text((8, _TOP + _CURVE // 2 + 8), f"{min(len(committed), chunks)} of {chunks}", _INK, font, anchor="lm")
    points = [(scale.x(scale.first), base)]
    for count, moment in enumerate(committed, start=1):
        x = scale.x(moment)
        points += [(x, points[-1][1]), (x, base - round(min(count / most, 1.0) * (_CURVE - 12)))]
    points.append((scale.x(scale.last), points[-1][1]))
    draw.line(points, _CURVE_COLOUR, width=2)


def _draw_axis(draw: ImageDraw.ImageDraw, font: _Font, scale: _Scale, bottom: int) -> None:
    whole = scale.last - scale.first
    for tick in range(_TICKS + 1):
        moment = scale.first + whole * tick / _TICKS
        x = scale.x(moment)
        draw.line([(x, _TOP), (x, bottom)], _FAINT)
        anchor = "ra" if tick == _TICKS else "ma"
        text = f"+{_duration(moment - scale.first)}" if tick else "0"
        draw.text((x, bottom + 4), text, _INK, font, anchor=anchor)
    begun = datetime.fromtimestamp(scale.first, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    draw.text((8, bottom + 4), begun, _INK, font, anchor="la")


def _draw_legend(draw: ImageDraw.ImageDraw, font: _Font, attempts: Sequence[Attempt], y: int) -> None:
    seen = {attempt.ended for attempt in attempts}
    x = _LEFT
    for end in AttemptEnd:
        if end in seen:
            draw.rectangle([x, y - 5, x + 12, y + 5], _COLOURS[end])
            draw.text((x + 18, y), _WORDS[end], _INK, font, anchor="lm")
            x += 130


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f}s"
    if seconds < 120:
        return f"{seconds:.0f}s"
    minutes = round(seconds / 60)
    return f"{minutes}m" if minutes < 120 else f"{minutes / 60:.1f}h"


def _short(label: str) -> str:
    return label if len(label) <= 22 else f"{label[:10]}…{label[-11:]}"
