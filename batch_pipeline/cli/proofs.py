"""`verify` and `audit`: what is proved of a batch, and where each of its results comes from."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich.console import Console
from rich.table import Table

from batch_pipeline.cli.app import App, pass_app, print_json
from batch_pipeline.cli.progress import moment
from batch_pipeline.ledger.records import Event
from batch_pipeline.plain import printable
from batch_pipeline.results.audit import AuditTrail, Bytes, RequestTrail
from batch_pipeline.results.audit import audit as follow_back
from batch_pipeline.results.findings import KEPT_PROBLEMS
from batch_pipeline.results.manifest import ChunkFacts
from batch_pipeline.results.timeline import Attempt
from batch_pipeline.results.verify import Proof
from batch_pipeline.results.verify import verify as prove

_SHOWN = 100
"""Most chunks, and most events, that are printed for people."""


@click.command()
@click.argument("batch_id")
@click.option("--json", "as_json", is_flag=True, help="Print the proof as JSON.")
@pass_app
def verify(app: App, batch_id: str, as_json: bool) -> int:
    """Prove that a finished batch has exactly one result for each request.

    Counts the files themselves: the input against the output and error file, and both against manifest and ledger. Exit
    status 1 where the proof fails.
    """
    proof = prove(batch_id, ledger=app.ledger, store=app.store)
    if as_json:
        print_json(proof)
    else:
        _show(app, proof)
    return 0 if proof.holds else 1


def _show(app: App, proof: Proof) -> None:
    table = Table("finding", "verdict", box=None, pad_edge=False)
    for finding, verdict in proof.verdicts.items():
        table.add_row(finding, "proved" if verdict.holds else f"{verdict.count} problems")
    counts = proof.counted.counts
    app.console.print(f"{proof.batch_id}  {proof.status}")
    app.console.print(table)
    app.console.print(
        f"counted: {counts.total} requests = {counts.completed} completed, {counts.failed} failed, "
        f"{counts.expired} expired, {counts.cancelled} cancelled, {counts.invalid} invalid"
    )
    for problem in proof.problems:
        click.echo(f"problem: {printable(problem)}", err=True)
    if proof.problem_count > len(proof.problems):
        click.echo(f"{proof.problem_count} problems; at most {KEPT_PROBLEMS} of each finding are shown", err=True)


@click.command()
@click.argument("batch_id")
@click.option("--custom-id", help="Only the request with this custom_id.")
@click.option("--index", type=click.IntRange(0), help="Only the request at this 0-based line.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole trail as JSON.")
@pass_app
def audit(app: App, batch_id: str, custom_id: str | None, index: int | None, as_json: bool) -> None:
    """Follow the results of a batch, or of one request, back to the upload.

    Which bytes, which line, which chunk and attempt, which worker, engine and model version, which run; and every
    event of the batch in the order in which it happened.
    """
    if custom_id is not None and index is not None:
        raise click.UsageError("name the request by --custom-id or by --index, not by both")
    trail = follow_back(batch_id, ledger=app.ledger, store=app.store, custom_id=custom_id, index=index)
    if as_json:
        print_json(trail)
        return
    _show_origin(app.console, trail)
    for request in trail.requests:
        _show_request(app.console, request)
    _show_chunks(app.console, trail.chunks)
    _show_attempts(app.console, trail.attempts)
    _show_events(app.console, trail.events)


def _show_origin(console: Console, trail: AuditTrail) -> None:
    source = trail.input
    lines = {
        "batch": f"{trail.batch_id} of {trail.customer}, {trail.name}: {trail.status}",
        "came by": f"{trail.door} ({trail.creation_key})",
        "upload": f"{source.key}, {source.bytes} bytes, {source.requests} requests, etag {source.etag}",
        "sha256": source.sha256 or "not known before intake",
        "intake": f"run {trail.intake_run_id or '-'}",
        "merge": f"run {trail.merge_run_id or '-'}",
    }
    for what, file in (("output", trail.output), ("errors", trail.errors)):
        if file is not None:
            lines[what] = f"{file.key}, {file.lines} lines, sha256 {file.sha256}"
    if trail.manifest_key is not None:
        lines["manifest"] = trail.manifest_key
    lines["versions"] = ", ".join(f"{asset} {version}" for asset, version in trail.data_versions.items())
    _show_lines(console, lines)


def _show_request(console: Console, request: RequestTrail) -> None:
    console.print()
    identical = {True: "the same bytes", False: "OTHER BYTES than the result", None: "no result yet"}
    lines = {
        "request": f"line {request.line} (index {request.index}), custom_id {request.custom_id!r}",
        "  upload": _place(request.input),
        "  result": "none yet" if request.result is None else _place(request.result),
    }
    if request.source is not None:
        lines["  written"] = f"{_place(request.source)}: {identical[request.source_is_identical]}"
    if request.note is not None:
        lines["  note"] = request.note
    if request.chunk is None and request.note is None:
        lines["  chunk"] = "none: the line is invalid, or intake has not finished"
    elif request.chunk is not None:
        lines["  chunk"] = f"{request.chunk.chunk}, attempt {request.chunk.attempt}, worker {request.chunk.worker}"
    _show_lines(console, lines)


def _show_chunks(console: Console, chunks: Sequence[ChunkFacts]) -> None:
    names = ("chunk", "model", "requests", "lines", "state", "attempt", "worker", "engine", "version", "run")
    table = Table(*names, box=None, pad_edge=False)
    for chunk in chunks[:_SHOWN]:
        cells = (
            chunk.chunk,
            chunk.model,
            chunk.requests,
            f"{chunk.first_index + 1}-{chunk.last_index + 1}",
            chunk.state,
            chunk.attempt,
            chunk.worker or "-",
            chunk.engine_version or "-",
            chunk.model_version or "-",
            chunk.run_id or "-",
        )
        table.add_row(*map(str, cells))
    console.print()
    console.print(table)
    _show_rest(console, len(chunks), "chunks")


def _show_attempts(console: Console, attempts: Sequence[Attempt]) -> None:
    """Print who tried each chunk, and how that ended: what an attempt that was lost cost is seen here."""
    names = ("chunk", "attempt", "began", "seconds", "ended", "worker", "run", "why")
    table = Table(*names, box=None, pad_edge=False, title="attempts", title_justify="left")
    for attempt in attempts[:_SHOWN]:
        seconds = "-" if attempt.ended_at is None else f"{attempt.ended_at - attempt.started_at:.1f}"
        cells = (
            str(attempt.chunk),
            str(attempt.attempt),
            moment(attempt.started_at),
            seconds,
            attempt.ended.value,
            attempt.worker,
            attempt.run_id or "-",
            attempt.detail or "",
        )
        table.add_row(*cells)
    console.print()
    console.print(table)
    _show_rest(console, len(attempts), "attempts")


def _show_events(console: Console, events: Sequence[Event]) -> None:
    table = Table("at", "event", "chunk", "attempt", "by", "run", "detail", box=None, pad_edge=False)
    for event in events[:_SHOWN]:
        chunk = "-" if event.chunk is None else str(event.chunk)
        attempt = "-" if event.token is None else str(event.token)
        row = (moment(event.at), event.event, chunk, attempt, event.actor, event.run_id or "-", event.detail or "")
        table.add_row(*row)
    console.print()
    console.print(table)
    _show_rest(console, len(events), "events")


def _show_rest(console: Console, count: int, what: str) -> None:
    if count > _SHOWN:
        console.print(f"{count - _SHOWN} more {what}: --json prints them all")


def _show_lines(console: Console, lines: dict[str, str]) -> None:
    for what, text in lines.items():
        console.print(f"{what:<9} {text}", soft_wrap=True)


def _place(place: Bytes) -> str:
    return f"{place.key}, {place.length} bytes from {place.offset}"


COMMANDS = (verify, audit)
