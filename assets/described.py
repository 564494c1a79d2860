"""A batch in Dagster's words: the metadata with which its events show what an operator wants to know."""

import base64
from collections.abc import Iterable, Mapping
from typing import Any

import dagster as dg

from batch_pipeline.plain import one_line
from batch_pipeline.results.manifest import ChunkFacts, FileFacts, Manifest
from batch_pipeline.results.timeline import AttemptEnd
from batch_pipeline.results.top_errors import TopErrors
from batch_pipeline.results.view import BatchView
from batch_pipeline.store import links
from resources import Parts

_ROWS = 50
"""Most rows of a table in one event: an event is a row of Dagster's database."""


def progress_metadata(view: BatchView) -> dict[str, Any]:
    """Return what a batch is at, in figures: for the observations of one that runs, and the head of every event."""
    status, counts = view.status, view.status.counts
    ended = counts.ended if status.is_final else counts.completed + counts.failed + counts.invalid
    shown: dict[str, Any] = {
        "customer": status.customer,
        "name": status.name,
        "status": str(status.status),
        "progress": f"{ended} of {counts.total} requests ({ended / counts.total:.0%})"
        if counts.total
        else "no requests",
        **({"waiting_for": status.reason} if status.reason else {}),
        **_moment("estimated_finish", status.estimated_finish_at),
        **({"warning": status.warning} if status.warning else {}),
        **_moment("deadline", float(status.expires_at)),
        "requests_total": counts.total,
        "requests_completed": counts.completed,
        "requests_failed": counts.failed,
        "requests_invalid": counts.invalid,
        "requests_expired": counts.expired,
        "requests_cancelled": counts.cancelled,
        "input_tokens": status.usage.input_tokens,
        "cached_tokens": status.usage.input_tokens_details.cached_tokens,
        "output_tokens": status.usage.output_tokens,
        "cost_usd": "unknown: a model has no price" if status.cost is None else float(status.cost),
        "requests_per_second": view.pace.requests_per_second,
        "output_tokens_per_second": view.pace.output_tokens_per_second,
        "seconds_until_first_chunk": view.pace.seconds_until_first_chunk,
        "seconds_running": view.pace.seconds_running,
        **{f"estimate_error_{made}": round(error, 4) for made, error in view.estimate_errors.items()},
    }
    return {name: value for name, value in shown.items() if value is not None}


def chunks_metadata(view: BatchView) -> dict[str, Any]:
    """Return what ran, where, how often, with which versions; with the time line as a picture."""
    chunks = view.chunks
    return {
        "chunks_committed": chunks.committed,
        "chunks_given_up_or_stopped": chunks.stopped,
        "chunks_open": chunks.open,
        "attempts": chunks.attempts,
        "attempts_lost": view.lost,
        "workers": dg.JsonMetadataValue(chunks.workers),
        "engine_versions": dg.JsonMetadataValue(chunks.engine_versions),
        "model_versions": dg.JsonMetadataValue(chunks.model_versions),
        **timeline_metadata(view),
        **_lost_attempts(view),
    }


def timeline_metadata(view: BatchView) -> dict[str, Any]:
    """Return the time line of the chunks as a picture."""
    if not view.attempts:
        return {}
    picture = base64.b64encode(view.timeline).decode()
    return {"time_line_of_chunks": dg.MetadataValue.md(f"![time line of chunks](data:image/png;base64,{picture})")}


def files_metadata(files: Mapping[str, FileFacts | str | None], parts: Parts) -> dict[str, Any]:
    """Return where a batch's files are: as a list with sizes, and as links where a browser can open them."""
    store = parts.settings.store
    lines = []
    for name, file in files.items():
        if file is None:
            lines.append(f"- {name}: none")
            continue
        key = file if isinstance(file, str) else file.key
        url = links.link(store, key)
        head = name if url is None else f"[{name}]({url})"
        size = "" if isinstance(file, str) else f", {file.lines} lines, {file.bytes} bytes, sha256 `{file.sha256}`"
        lines.append(f"- {head}: `{links.uri(store, key)}`{size}")
    return {"files": dg.MetadataValue.md("\n".join(lines))}


def errors_metadata(errors: TopErrors) -> dict[str, Any]:
    """Return the commonest errors as a table."""
    if not errors.groups:
        return {"top_errors": "none"}
    name = "top_errors" if errors.is_whole else f"top_errors_of_the_first_{errors.lines}"
    columns = (("errors", "int"), ("code", "string"), ("example", "string"), ("message", "string"))
    rows: list[dict[str, str | int]] = [
        {
            "errors": group.count,
            "code": group.code,
            "example": "unreadable" if group.custom_id is None else one_line(group.custom_id, 60),
            "message": one_line(group.message, 200),
        }
        for group in errors.groups
    ]
    return {name: _table(columns, rows)}


def lineage_metadata(manifest: Manifest | None, intake_run_id: str | None, parts: Parts) -> dict[str, Any]:
    """Return where the results come from: the upload's bytes, the runs, each chunk's attempt, engine and model."""
    if manifest is None:
        return {}
    upload = manifest.input
    url = links.link(parts.settings.store, upload.key)
    runs = sorted({chunk.run_id for chunk in manifest.chunks if chunk.run_id is not None})
    shown: dict[str, Any] = {
        "upload": f"{links.uri(parts.settings.store, upload.key)}, {upload.bytes} bytes",
        "upload_sha256": upload.sha256 or "not known: the file was refused unread",
        "worker_runs": dg.JsonMetadataValue(runs[:_ROWS]),
        "chunks": _table(_CHUNK_COLUMNS, [_chunk_row(chunk) for chunk in manifest.chunks[:_ROWS]]),
    }
    if url is not None:
        shown["upload_link"] = dg.MetadataValue.url(url)
    if intake_run_id is not None:
        shown["intake_run"] = dg.MetadataValue.dagster_run(intake_run_id)
    if len(manifest.chunks) > _ROWS:
        shown["chunks_not_shown"] = f"{len(manifest.chunks) - _ROWS} more: `batch-pipeline audit {manifest.batch_id}`"
    return shown


_CHUNK_COLUMNS = (
    ("chunk", "int"),
    ("model", "string"),
    ("requests", "int"),
    ("lines", "string"),
    ("state", "string"),
    ("attempt", "int"),
    ("worker", "string"),
    ("engine", "string"),
    ("model_version", "string"),
    ("run", "string"),
    ("sha256", "string"),
)


def _chunk_row(chunk: ChunkFacts) -> dict[str, str | int]:
    return {
        "chunk": chunk.chunk,
        "model": chunk.model,
        "requests": chunk.requests,
        "lines": f"{chunk.first_index + 1}-{chunk.last_index + 1}",
        "state": chunk.state,
        "attempt": chunk.attempt,
        "worker": chunk.worker or "none",
        "engine": chunk.engine_version or "none",
        "model_version": chunk.model_version or "none",
        "run": chunk.run_id or "none",
        "sha256": (chunk.sha256 or "none")[:16],
    }


def _lost_attempts(view: BatchView) -> dict[str, Any]:
    lost = [
        attempt
        for attempt in view.attempts
        if attempt.ended in (AttemptEnd.RELEASED, AttemptEnd.LEASE_EXPIRED, AttemptEnd.SUPERSEDED)
    ]
    if not lost:
        return {}
    columns = (("chunk", "int"), ("attempt", "int"), ("worker", "string"), ("ended", "string"), ("why", "string"))
    rows: list[dict[str, str | int]] = [
        {
            "chunk": attempt.chunk,
            "attempt": attempt.attempt,
            "worker": attempt.worker,
            "ended": str(attempt.ended),
            "why": one_line(attempt.detail or "", 200),
        }
        for attempt in lost[-_ROWS:]
    ]
    return {"attempts_without_result": _table(columns, rows)}


def _moment(name: str, moment: float | None) -> dict[str, Any]:
    return {} if moment is None else {name: dg.TimestampMetadataValue(moment)}


def _table(columns: Iterable[tuple[str, str]], rows: Iterable[Mapping[str, str | int]]) -> dg.TableMetadataValue:
    return dg.TableMetadataValue(
        records=[dg.TableRecord(dict(row)) for row in rows],
        schema=dg.TableSchema(columns=[dg.TableColumn(name, kind) for name, kind in columns]),
    )
