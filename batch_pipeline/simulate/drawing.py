"""Charts as SVG text. The same values give the same drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

_WIDTH, _HEIGHT = 960, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 28, 34
_TICKS = 6
_HOURS = (0.25, 0.5, 1, 2, 4, 6, 12, 24)
_MOST_HOURS = 12
"""Labels of hours, and between which of them."""
_BAR = 26


class Line(NamedTuple):
    """One line of a chart."""

    name: str
    colour: str
    values: Sequence[float]
    is_filled: bool = False
    is_dashed: bool = False


def chart(hours: Sequence[float], lines: Sequence[Line], unit: str) -> str:
    """Return lines over hours; an empty frame where there are no points."""
    last = max(hours, default=0.0) or 1.0
    top = _nice(max((max(line.values, default=0.0) for line in lines), default=0.0) or 1.0)
    parts = [_frame(last, top, unit)]
    for line in lines:
        points = [(_x(hour, last), _y(value, top)) for hour, value in zip(hours, line.values, strict=True)]
        if not points:
            continue
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        if line.is_filled:
            base = _y(0.0, top)
            area = f"{points[0][0]:.1f},{base:.1f} {path} {points[-1][0]:.1f},{base:.1f}"
            parts.append(f'<polygon points="{area}" fill="{line.colour}" opacity="0.18"/>')
        dashes = ' stroke-dasharray="5 4"' if line.is_dashed else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="1.6"{dashes}/>')
    parts.append(_legend(lines))
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg>'


def bars(values: Sequence[tuple[str, float]], unit: str) -> str:
    """Return a bar for each name."""
    most = max((value for _, value in values), default=0.0) or 1.0
    left, width = 130, _WIDTH - 130 - 90
    parts = []
    for number, (name, value) in enumerate(values):
        y = number * _BAR
        parts.append(
            f'<text x="{left - 8}" y="{y + 17}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{left}" y="{y + 4}" width="{max(value / most * width, 1.0):.1f}" height="{_BAR - 8}" '
            f'fill="{"#d1495b" if value else "#3aa76d"}"/>'
            f'<text x="{left + value / most * width + 8:.1f}" y="{y + 17}">{value:.2f} {escape(unit)}</text>'
        )
    return f'<svg viewBox="0 0 {_WIDTH} {len(values) * _BAR + 4}" role="img">{"".join(parts)}</svg>'


def _frame(last: float, top: float, unit: str) -> str:
    parts = [f'<text x="4" y="14">{escape(unit)}</text>']
    for tick in range(_TICKS + 1):
        value = top * tick / _TICKS
        y = _y(value, top)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e5ea"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_figure(value)}</text>'
        )
    every = next((step for step in _HOURS if last / step <= _MOST_HOURS), _HOURS[-1])
    for number in range(int(last / every) + 1):
        hour = number * every
        parts.append(f'<text x="{_x(hour, last):.1f}" y="{_HEIGHT - 12}" text-anchor="middle">{hour:g} h</text>')
    return "".join(parts)


def _legend(lines: Sequence[Line]) -> str:
    parts, x = [], float(_LEFT)
    for line in lines:
        parts.append(
            f'<rect x="{x:.0f}" y="5" width="12" height="10" fill="{line.colour}"/>'
            f'<text x="{x + 17:.0f}" y="14">{escape(line.name)}</text>'
        )
        x += 40 + 7.0 * len(line.name)
    return "".join(parts)


def _x(hour: float, last: float) -> float:
    return _LEFT + hour / last * (_WIDTH - _LEFT - _RIGHT)


def _y(value: float, top: float) -> float:
    return _HEIGHT - _BOTTOM - value / top * (_HEIGHT - _TOP - _BOTTOM)


def _nice(value: float) -> float:
    """Return a round number that is not below the value and divides well by six."""
    unit = 10.0 ** math.floor(math.log10(value))
    return next(step * unit for step in (1.2, 1.8, 2.4, 3.0, 4.2, 6.0, 9.0, 12.0) if step * unit >= value)


def _figure(value: float) -> str:
    return f"{value / 1000:.4g}k" if value >= 10_000 else f"{value:.4g}"
