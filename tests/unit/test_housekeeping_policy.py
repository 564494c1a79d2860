"""What may go is a pure choice: looked at for every state of a chunk and every kind of object."""

from __future__ import annotations

import itertools

import pytest

from batch_pipeline.housekeeping.policy import cutoffs, leftovers, work_of
from batch_pipeline.ledger.records import (
    Batch,
    BatchStatus,
    Chunk,
    ChunkResult,
    ChunkState,
    Door,
    OnInvalid,
    Part,
)
from batch_pipeline.settings import Retention
from batch_pipeline.store import ObjectInfo, keys

BATCH = "batch_" + "0" * 32
OLD, YOUNG, CUTOFF = 100.0, 300.0, 200.0


def attempt_file(token: int, file: str, chunk: int = 7) -> str:
    return f"{keys.attempt(BATCH, chunk, token, 'abcd')}{file}"


def chunk(state: ChunkState, token: int, parts: tuple[str, ...] = (), result: str | None = None) -> Chunk:
    committed = None
    if result is not None:
        committed = ChunkResult(
            result_key=result,
            lines_key=result.replace("results.jsonl", "lines.parquet"),
            output_bytes=1,
            error_bytes=0,
            sha256="0",
            completed=1,
            failed=0,
            input_tokens=1,
            cached_tokens=0,
            output_tokens=1,
            engine_version="e",
            model_version="1",
        )
    return Chunk(
        batch_id=BATCH,
        chunk=7,
        model="m",
        input_key=keys.chunk_input(BATCH, 7),
        requests=1,
        first_index=0,
        last_index=0,
        prompt_tokens=1,
        max_output_tokens=1,
        state=state,
        token=token,
        failures=0,
        worker_id=None,
        run_id=None,
        expires_at=None,
        parts=[
            Part(key=key, requests=1, completed=1, failed=0, input_tokens=1, cached_tokens=0, output_tokens=1)
            for key in parts
        ],
        result=committed,
        committed_at=None,
        last_error=None,
    )


def info(key: str, modified_at: float = OLD) -> ObjectInfo:
    return ObjectInfo(key, 1, "etag", modified_at, {})


@pytest.mark.parametrize(
    ("state", "token", "written_by", "is_old", "is_named"),
    [*itertools.product(ChunkState, (1, 2, 3), (1, 2, 3, 4), (False, True), (False, True))],
)
def test_only_what_an_ended_attempt_wrote_long_ago_and_the_row_does_not_name_may_go(
    state: ChunkState, token: int, written_by: int, is_old: bool, is_named: bool
) -> None:
    key = attempt_file(written_by, "part-0000.parquet")
    row = chunk(state, token, (key,) if is_named else ())
    may_still_write = written_by > token or (state == ChunkState.LEASED and written_by == token)
    gone = leftovers(row, [info(key, OLD if is_old else YOUNG)], CUTOFF)
    assert bool(gone) == (is_old and not is_named and not may_still_write)


def test_input_result_and_what_is_not_an_attempts_always_stay() -> None:
    row = chunk(ChunkState.COMMITTED, 3, result=attempt_file(2, "results.jsonl"))
    kept = [
        row.input_key,
        attempt_file(2, "results.jsonl"),
        attempt_file(2, "lines.parquet"),
        attempt_file(1, "results.jsonl", chunk=8),
        f"{keys.chunk(BATCH, 7)}notes/file",
        f"{keys.chunk(BATCH, 7)}000001-file",
        f"{keys.chunk(BATCH, 7)}²-x/file",
    ]
    gone = attempt_file(1, "results.jsonl")
    assert [found.key for found in leftovers(row, map(info, [*kept, gone]), CUTOFF)] == [gone]


def test_what_is_given_out_and_audited_is_never_work() -> None:
    batch = _batch()
    given_out = [
        keys.input_file(BATCH),
        keys.invalid_lines(BATCH),
        *(keys.final(BATCH, file) for file in ("output.jsonl", "errors.jsonl", "manifest.json")),
    ]
    work = [keys.chunk_input(BATCH, 0), attempt_file(1, "results.jsonl"), keys.request_table(BATCH)]
    rebuilt = [f"{keys.rebuild(BATCH, 'n')}output.jsonl"]
    unknown = [f"{keys.batch(BATCH)}somebody.txt"]
    listed = [info(key) for key in [*given_out, *work, *rebuilt, *unknown]]
    assert [found.key for found in work_of(batch, listed, CUTOFF)] == [*work, *rebuilt]
    assert work_of(batch, [info(rebuilt[0], YOUNG)], CUTOFF) == []


def test_cutoffs_are_the_configured_times_before_now() -> None:
    found = cutoffs(Retention(ledger_minutes=10, work_hours=2, files_days=3, orphans_hours=4), 1_000_000.0)
    assert found == (1_000_000 - 600, 1_000_000 - 7200, 1_000_000 - 3 * 86_400, 1_000_000 - 14_400)


def _batch() -> Batch:
    final = keys.final(BATCH, "")
    return Batch(
        batch_id=BATCH,
        customer="acme",
        name="n",
        door=Door.DROP,
        endpoint="/v1/chat/completions",
        window_seconds=1,
        on_invalid=OnInvalid.SKIP,
        creation_key="k",
        input_key=keys.input_file(BATCH),
        input_bytes=1,
        input_etag="e",
        metadata={},
        status=BatchStatus.COMPLETED,
        outcome=BatchStatus.COMPLETED,
        priority=0,
        revision=1,
        created_at=0.0,
        deadline_at=1.0,
        in_progress_at=0.0,
        finalizing_at=0.0,
        cancelling_at=None,
        ended_at=1.0,
        input_sha256="0",
        invalid_key=keys.invalid_lines(BATCH),
        models=["m"],
        total=1,
        invalid=0,
        completed=1,
        failed=0,
        expired=0,
        cancelled=0,
        errors=[],
        input_tokens=1,
        cached_tokens=0,
        output_tokens=1,
        output_key=f"{final}output.jsonl",
        error_key=f"{final}errors.jsonl",
        manifest_key=f"{final}manifest.json",
        intake_attempts=1,
        intake_run_id=None,
        merge_attempts=1,
        merge_run_id=None,
    )
