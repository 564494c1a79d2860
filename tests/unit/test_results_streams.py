"""The small parts of the merge and of the proof, on every way in which a stream may be cut into blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from decimal import Decimal

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from batch_pipeline.ledger.records import Chunk, ChunkResult, ChunkState
from batch_pipeline.models import Prices
from batch_pipeline.results import manifest
from batch_pipeline.results.assemble import Section, groups
from batch_pipeline.results.findings import KEPT_PROBLEMS, Finding, Problems
from batch_pipeline.results.sections import SectionHashes
from batch_pipeline.results.streams import split_lines


def cut(data: bytes, sizes: list[int]) -> Iterator[bytes]:
    """The data in blocks of these sizes, and the rest."""
    start = 0
    for size in sizes:
        if data[start : start + size]:
            yield data[start : start + size]
        start += size
    if data[start:]:
        yield data[start:]


def chunk_of(number: int, first: int, last: int, result: ChunkResult | None = None) -> Chunk:
    """A chunk with this range of indexes."""
    return Chunk(
        batch_id="batch_x",
        chunk=number,
        model="m",
        input_key="",
        requests=1,
        first_index=first,
        last_index=last,
        prompt_tokens=0,
        max_output_tokens=0,
        state=ChunkState.COMMITTED,
        token=1,
        failures=0,
        worker_id=None,
        run_id=None,
        expires_at=None,
        parts=[],
        result=result,
        committed_at=None,
        last_error=None,
    )


SIZES = st.lists(st.integers(1, 7), max_size=30)


@given(data=st.binary(max_size=60).map(lambda data: data.replace(b"x", b"\n")), sizes=SIZES)
def test_lines_do_not_depend_on_how_the_stream_is_cut(data: bytes, sizes: list[int]) -> None:
    expected = data.split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    assert list(split_lines(cut(data, sizes))) == expected


@given(sizes=SIZES)
def test_line_above_the_limit_is_none_and_the_others_are_kept(sizes: list[int]) -> None:
    data = b"ab\n" + b"c" * 50 + b"\nde\n" + b"f" * 11
    assert list(split_lines(cut(data, sizes), limit=10)) == [b"ab", None, b"de", None]


@given(
    bounds=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)), max_size=8),
    output_sizes=SIZES,
    error_sizes=SIZES,
    order=st.lists(st.booleans(), max_size=200),
    flip=st.integers(0, 10_000),
)
def test_hashes_of_sections_do_not_depend_on_the_order_of_reading(
    bounds: list[tuple[int, int, int]],
    output_sizes: list[int],
    error_sizes: list[int],
    order: list[bool],
    flip: int,
) -> None:
    """`bounds`: bytes of output and of errors of each chunk, and of foreign bytes between."""
    output = errors = b""
    sections = []
    for number, (made, failed, between) in enumerate(bounds):
        output += b"-" * between
        errors += b"-" * (between // 2)
        own = bytes([number + 65]) * made, bytes([number + 97]) * failed
        digest = hashlib.sha256(own[0] + own[1]).hexdigest()
        result = ChunkResult(
            result_key="",
            lines_key="",
            output_bytes=made,
            error_bytes=failed,
            sha256=digest,
            completed=0,
            failed=0,
            input_tokens=0,
            cached_tokens=0,
            output_tokens=0,
            engine_version="",
            model_version="",
        )
        sections.append(Section(chunk_of(number, number, number, result), len(output), len(errors)))
        output, errors = output + own[0], errors + own[1]
    assert run(sections, cut(output, output_sizes), cut(errors, error_sizes), order) == []
    if output:
        position = flip % len(output)
        changed = output[:position] + b"?" + output[position + 1 :]
        problems = run(sections, cut(changed, output_sizes), cut(errors, error_sizes), order)
        assert len(problems) == (output[position : position + 1] != b"-")


def run(sections: list[Section], output: Iterator[bytes], errors: Iterator[bytes], order: list[bool]) -> list[str]:
    """Feed the blocks of both files in this order, and then what is left."""
    hashes = SectionHashes(sections)
    for is_output in order:
        block = next(output if is_output else errors, None)
        if block is not None:
            (hashes.output if is_output else hashes.errors)(block)
    for block in output:
        hashes.output(block)
    for block in errors:
        hashes.errors(block)
    return hashes.problems()


@given(ranges=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=12))
def test_groups_are_what_overlaps_and_follow_each_other(ranges: list[tuple[int, int]]) -> None:
    chunks = [chunk_of(number, first, first + length) for number, (first, length) in enumerate(ranges)]
    found = groups(chunks)
    assert sorted(chunk.chunk for group in found for chunk in group) == list(range(len(chunks)))
    last = -1
    for group in found:
        assert min(chunk.first_index for chunk in group) > last
        covered = {index for chunk in group for index in range(chunk.first_index, chunk.last_index + 1)}
        last = max(covered)
        assert covered == set(range(min(covered), last + 1)), "a group without overlap is two groups"


def test_problems_are_all_counted_and_the_first_ones_kept() -> None:
    problems = Problems()
    for number in range(KEPT_PROBLEMS + 5):
        problems.add(Finding.EXACTLY_ONE, f"problem {number}")
    verdict = problems.verdicts[Finding.EXACTLY_ONE]
    assert (verdict.count, len(verdict.problems), verdict.holds) == (KEPT_PROBLEMS + 5, KEPT_PROBLEMS, False)
    assert problems.verdicts[Finding.NOTHING_UNKNOWN].holds


def test_manifest_reads_back_and_has_a_line_for_each_chunk() -> None:
    usage = manifest.Usage(input_tokens=1, cached_tokens=2, output_tokens=3)
    head = manifest.Head(
        batch_id="batch_x",
        customer="acme",
        name="n",
        endpoint="/v1/completions",
        metadata={},
        status="completed",
        created_at=1.5,
        in_progress_at=None,
        cancelling_at=None,
        finalizing_at=2.5,
        deadline_at=3.5,
        counts=manifest.Counts(total=2, completed=2),
        usage=usage,
        models=[manifest.ModelUsage(model="m", usage=usage, prices=Prices(), cost=Decimal("0.5"))],
        cost=Decimal("0.5"),
        input=manifest.InputFacts(key="k", bytes=1, etag="e", sha256="s", requests=2),
        output=manifest.FileFacts(key="o", bytes=1, lines=2, sha256="s"),
        errors=None,
    )
    chunks = [
        manifest.ChunkFacts(
            chunk=number,
            model="m",
            requests=1,
            first_index=number,
            last_index=number,
            prompt_tokens=5,
            max_output_tokens=7,
            input_key="i",
            state="committed",
            attempt=1,
            worker="w",
            run_id="r",
            engine_version="e",
            model_version="1",
            result_key="k",
            lines_key="l",
            output_bytes=1,
            error_bytes=0,
            sha256="s",
            parts=[],
            completed=1,
            failed=0,
            usage=usage,
        )
        for number in range(2)
    ]
    happened = manifest.EventFacts(
        sequence=1, at=0.5, chunk=None, event="created", actor="drop", token=None, run_id=None, detail=None
    )
    for listed, events in ((chunks, [happened]), ([], [])):
        data = manifest.encode(head, listed, events)
        assert manifest.decode(data) == manifest.Manifest(**msgspec.structs.asdict(head), chunks=listed)
        assert manifest.events_in(data) == events
        assert data.count(b"\n") == len(listed) + len(events) + 3
