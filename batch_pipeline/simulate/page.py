"""Reports as one HTML page with drawings, for an operator: no scripts, nothing fetched from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from batch_pipeline.scheduling.risk import duration
from batch_pipeline.simulate.drawing import Line, bars, chart
from batch_pipeline.simulate.report import Group, Quantiles, Report

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #2b2f3a; margin: 2rem auto; max-width: 1000px; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0.2rem; } h2 { font-size: 1.1rem; margin: 2rem 0 0.4rem; }
p.note { color: #667; margin: 0.2rem 0 0.8rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: 0.3rem 0.6rem; text-align: right; border-bottom: 1px solid #e3e5ea; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
th { color: #667; font-weight: 600; vertical-align: bottom; }
.cards { display: flex; flex-wrap: wrap; gap: 0.8rem; margin: 1rem 0; }
.card { border: 1px solid #e3e5ea; border-radius: 8px; padding: 0.6rem 1rem; min-width: 130px; }
.card b { display: block; font-size: 1.35rem; } .card span { color: #667; font-size: 12px; }
svg { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: #556; }
.bad { color: #b3261e; } .good { color: #1d7a46; }
"""
_MOST_CUSTOMERS = 30


def page(reports: Sequence[Report]) -> str:
    """Return the page for one report or several of one workload; the first is the one that is drawn."""
    first = reports[0]
    parts = [_head(first), _cards(first)]
    if len(reports) > 1:
        parts.append(_comparison(reports))
    parts += [_course(first), _groups("By size of batch", first.by_size), _customers(first), _foot(first)]
    title = escape(f"{first.workload}: simulated")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def seconds(value: float | None) -> str:
    """Return a time as people say it; a dash for none."""
    return "–" if value is None else duration(value)


def _head(report: Report) -> str:
    return (
        f"<h1>{escape(report.workload)}</h1><p class='note'>Simulated, not measured: policy “{escape(report.policy)}”, "
        f"{report.gpus} GPUs, seed {report.seed}, {report.simulated_hours:.1f} hours on paper. "
        f"{report.batches:,} batches, {report.requests:,} requests, {report.events.chunks_leased:,} chunks.</p>"
    )


def _cards(report: Report) -> str:
    late = report.batches - report.met
    kept = report.live.is_budget_kept
    cards = [
        (f"{report.met_share:.2%}", f"deadlines met ({late:,} missed)", "bad" if late else "good"),
        (f"{report.expired:,}", "requests expired", "bad" if report.expired else "good"),
        (f"{report.gpu.held_hours:,.0f}", "GPU hours held", ""),
        (f"{report.gpu.used_share:.1%}", "of them used for what was saved", ""),
        (f"{report.gpu.tokens_per_gpu_hour / 1e6:,.1f} M", "tokens a GPU hour", ""),
        (f"{report.gpu.switches:,}", "GPUs changed model", ""),
        (_jain(report.fairness.jain_mean), "Jain's index, hourly mean", ""),
        ("kept" if kept else "not kept", "live traffic's share", "good" if kept else "bad"),
    ]
    shown = "".join(
        f"<div class='card'><b class='{kind}'>{escape(value)}</b><span>{escape(what)}</span></div>"
        for value, what, kind in cards
    )
    return f"<div class='cards'>{shown}</div>"


def _jain(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _comparison(reports: Sequence[Report]) -> str:
    heads = (
        *("policy", "deadlines met", "requests expired", "GPU hours", "used", "largest gap in chunks"),
        *("Jain, mean", "Jain, least", "launches", "switches", "wait, smallest batches, p95"),
    )
    rows = [
        (
            report.policy,
            f"{report.met_share:.2%}",
            f"{report.expired:,}",
            f"{report.gpu.held_hours:,.0f}",
            f"{report.gpu.used_share:.1%}",
            f"{in_chunks(report):,.1f}",
            _jain(report.fairness.jain_mean),
            _jain(report.fairness.jain_least),
            f"{report.gpu.launches:,}",
            f"{report.gpu.switches:,}",
            seconds(report.by_size[0].wait_seconds.p95 if report.by_size else None),
        )
        for report in reports
    ]
    missed = [(report.policy, 100 * (1 - report.met_share)) for report in reports]
    return (
        "<h2>Policies compared</h2><p class='note'>The same batches, GPUs and failures under each. The gap is the most "
        "by which one waiting customer got more than another, in chunks of the largest size.</p>"
        + _table(heads, rows)
        + "<h2>Deadlines missed, percent of the batches</h2>"
        + bars(missed, "%")
    )


def in_chunks(report: Report) -> float:
    """Return the largest gap in largest chunks; 0 where nothing ran."""
    largest = report.fairness.largest_chunk_tokens
    return report.fairness.largest_gap_tokens / largest if largest else 0.0


def _course(report: Report) -> str:
    series = report.series
    gpus = [
        Line("held by batches", "#2f6fd0", series.held, is_filled=True),
        # On top: batches often hold all that is left.
        Line("left by live traffic and failures", "#1b2333", series.available, is_dashed=True),
    ]
    if any(series.live):
        gpus.append(Line("live traffic", "#d1495b", series.live))
    colours = ("#2f6fd0", "#e0a030", "#3aa76d", "#9a6fb0", "#d1495b")
    waiting = [
        Line(model, colours[number % len(colours)], values)
        for number, (model, values) in enumerate(series.waiting_chunks.items())
    ]
    return (
        f"<h2>GPUs</h2>{chart(series.hours, gpus, 'GPUs')}"
        f"<h2>Chunks that wait</h2>{chart(series.hours, waiting, 'chunks')}"
    )


def _groups(title: str, groups: Sequence[Group]) -> str:
    heads = (
        *("", "batches", "deadlines met", "requests", "expired", "wait p50", "p95", "p99"),
        *("turnaround p50", "p95", "p99"),
    )
    rows = [
        (
            group.name,
            f"{group.batches:,}",
            f"{group.met / group.batches:.1%}",
            f"{group.requests:,}",
            f"{group.requests - group.served:,}",
            *_three(group.wait_seconds),
            *_three(group.turnaround_seconds),
        )
        for group in groups
    ]
    return f"<h2>{escape(title)}</h2>" + _table(heads, rows)


def _three(quantiles: Quantiles) -> tuple[str, str, str]:
    return seconds(quantiles.p50), seconds(quantiles.p95), seconds(quantiles.p99)


def _customers(report: Report) -> str:
    """Those that missed most first, where there are many."""
    groups = sorted(report.by_customer, key=lambda group: (group.met / group.batches, -group.requests, group.name))
    title = "By customer"
    if len(groups) > _MOST_CUSTOMERS:
        title = f"By customer: the {_MOST_CUSTOMERS} of {len(groups)} with most missed deadlines, then most requests"
    return _groups(title, groups[:_MOST_CUSTOMERS])


def _foot(report: Report) -> str:
    happened, live = report.events, report.live
    between = ", ".join(report.fairness.gap_between) or "no two customers waited together"
    lines: tuple[str, ...] = (
        f"{happened.workers_died:,} workers died, {happened.engines_died:,} engines; {happened.preempted:,} workers "
        f"were asked to leave; {happened.leases_expired:,} leases ran out; {report.gpu.redone_requests:,} requests ran "
        "again.",
        f"Batches held {live.overshoot_gpu_hours:.2f} GPU hours of what live traffic wanted, for "
        f"{live.longest_overshoot_seconds:.0f} s at most ({live.allowed_seconds:.0f} s are a step and the grace).",
        f"Largest gap: {report.fairness.largest_gap_tokens:,.0f} tokens over weight ({between}); the largest chunk has "
        f"{report.fairness.largest_chunk_tokens:,.0f}.",
    )
    if report.estimates:
        errors = ", ".join(f"{made.made}: {made.p50:.0%} ({made.p95:.0%})" for made in report.estimates)
        lines = (*lines, f"Estimates of finish were off by, median and p95 of the time that was left: {errors}.")
    return "<h2>What happened</h2>" + "".join(f"<p>{escape(line)}</p>" for line in lines)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
