"""What the ledger says of a batch, in the manifest's words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch, BatchStatus, Chunk, Event
from batch_pipeline.ledger.usage import Charge, total_cost
from batch_pipeline.models import Prices
from batch_pipeline.results import manifest
from batch_pipeline.results.manifest import ChunkFacts, EventFacts, Head, InputFacts, ModelUsage, PartFacts, Usage
from batch_pipeline.results.proof import Counted, Files
from batch_pipeline.results.scatter import Kept
from batch_pipeline.wire import codes

_REFUSED_WHOLE = {codes.TOO_MANY_REQUESTS, codes.FILE_TOO_LARGE}
_NOTHING_KEPT = Kept(0, 0, Usage())
_PAGE = 1000
_LAST_EVENTS = {"finalizing", "failing"}
"""Whichever comes: every chunk has stopped, or nothing runs because of invalid lines."""


def refused_whole(batch: Batch) -> bool:
    """Whether intake refused the file before it looked at all of its lines: then no line has a result."""
    return batch.total == 0 and any(error.code in _REFUSED_WHOLE for error in batch.errors)


def files_to_count(batch: Batch) -> Files:
    """Return the files of a final batch."""
    return Files(
        batch_id=batch.batch_id,
        input_key=None if refused_whole(batch) else batch.input_key,
        output_key=batch.output_key,
        error_key=batch.error_key,
    )


def chunks_of(batch_id: str, ledger: Ledger) -> list[Chunk]:
    """Return all chunks of a batch, in order: about 2 kB of memory each."""
    chunks: list[Chunk] = []
    while True:
        page = ledger.chunks.of(batch_id, after=chunks[-1].chunk if chunks else -1, limit=_PAGE)
        chunks += page
        if len(page) < _PAGE:
            return chunks


def events_until_merge(batch_id: str, ledger: Ledger) -> Iterator[EventFacts]:
    """Yield what happened to a batch and its chunks until nothing was left to do but the merge, a page at a time."""
    return until_merge(map(event_facts, ledger.events.of(batch_id)))


def until_merge(events: Iterable[EventFacts]) -> Iterator[EventFacts]:
    """Yield a batch's events up to the one after which the merge may begin.

    What follows it (the merge's own) is not of the files' making, and differs with the time of the merge.
    """
    for event in events:
        yield event
        if event.chunk is None and event.event in _LAST_EVENTS:
            return


def event_facts(event: Event) -> EventFacts:
    """Return an event in the manifest's words."""
    return EventFacts(**{name: getattr(event, name) for name in EventFacts.__struct_fields__})


def build_manifest(
    batch: Batch,
    chunks: Sequence[Chunk],
    kept: dict[int, Kept],
    counted: Counted,
    *,
    prices: dict[str, Prices],
    events: Iterable[EventFacts],
) -> tuple[bytes, list[Charge]]:
    """Return the bytes of the batch's manifest, the same whenever and by whomever they are made, and its bill."""
    facts = [chunk_facts(chunk, kept) for chunk in chunks]
    models = _model_usage(facts, prices)
    bill = charges_of(models)
    head = Head(
        batch_id=batch.batch_id,
        customer=batch.customer,
        name=batch.name,
        endpoint=batch.endpoint,
        metadata=dict(sorted(batch.metadata.items())),
        status=batch.outcome or BatchStatus.COMPLETED,
        created_at=batch.created_at,
        in_progress_at=batch.in_progress_at,
        cancelling_at=batch.cancelling_at,
        finalizing_at=batch.finalizing_at,
        deadline_at=batch.deadline_at,
        counts=counted.counts,
        usage=counted.usage,
        shared_requests=counted.shared_requests,
        models=models,
        cost=total_cost(bill),
        input=InputFacts(
            key=batch.input_key,
            bytes=batch.input_bytes,
            etag=batch.input_etag,
            sha256=batch.input_sha256,
            requests=counted.counts.total,
        ),
        output=counted.output,
        errors=counted.errors,
    )
    return manifest.encode(head, facts, events), bill


def charges_of(models: Iterable[ModelUsage]) -> list[Charge]:
    """Return what a manifest says of a batch's models in the ledger's words."""
    return [
        Charge(model=used.model, **msgspec.structs.asdict(used.usage), prices=used.prices, cost=used.cost)
        for used in models
    ]


def _model_usage(chunks: Iterable[ChunkFacts], prices: dict[str, Prices]) -> list[ModelUsage]:
    usage: dict[str, Usage] = {}
    for chunk in chunks:
        usage[chunk.model] = usage.get(chunk.model, Usage()).plus(chunk.usage)
    return [
        ModelUsage(
            model=model,
            usage=spent,
            prices=prices.get(model),
            cost=prices[model].cost(spent.input_tokens, spent.output_tokens) if model in prices else None,
        )
        for model, spent in sorted(usage.items())
    ]


def chunk_facts(chunk: Chunk, kept: dict[int, Kept] | None = None) -> ChunkFacts:
    """Return a chunk in the manifest's words. `kept` is what the merge took from the checkpoints of stopped ones;
    without
    it the ledger's sums over all checkpoints are given.
    """
    result = chunk.result
    if result is None:
        completed, failed, usage = kept.get(chunk.chunk, _NOTHING_KEPT) if kept is not None else _in_parts(chunk)
    else:
        completed, failed = result.completed, result.failed
        usage = Usage(
            input_tokens=result.input_tokens, cached_tokens=result.cached_tokens, output_tokens=result.output_tokens
        )
    return ChunkFacts(
        chunk=chunk.chunk,
        model=chunk.model,
        requests=chunk.requests,
        first_index=chunk.first_index,
        last_index=chunk.last_index,
        prompt_tokens=chunk.prompt_tokens,
        max_output_tokens=chunk.max_output_tokens,
        input_key=chunk.input_key,
        state=chunk.state,
        attempt=chunk.token,
        worker=chunk.worker_id,
        run_id=chunk.run_id,
        engine_version=None if result is None else result.engine_version,
        model_version=None if result is None else result.model_version,
        result_key=None if result is None else result.result_key,
        lines_key=None if result is None else result.lines_key,
        output_bytes=0 if result is None else result.output_bytes,
        error_bytes=0 if result is None else result.error_bytes,
        sha256=None if result is None else result.sha256,
        parts=[] if result is not None else [PartFacts(key=part.key, requests=part.requests) for part in chunk.parts],
        completed=completed,
        failed=failed,
        usage=usage,
    )


def _in_parts(chunk: Chunk) -> Kept:
    usage = Usage(
        input_tokens=sum(part.input_tokens for part in chunk.parts),
        cached_tokens=sum(part.cached_tokens for part in chunk.parts),
        output_tokens=sum(part.output_tokens for part in chunk.parts),
    )
    return Kept(sum(part.completed for part in chunk.parts), sum(part.failed for part in chunk.parts), usage)
