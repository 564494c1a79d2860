"""Plain requests, which are checked many at once: the same answers as line by line, and no more work than they need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from batch_pipeline.intake import block_check, grammars, plain
from batch_pipeline.intake.blocks import Block
from batch_pipeline.intake.rules import Rules
from batch_pipeline.settings import Settings
from tests.fakes import intake_files
from tests.fakes.intake_files import CHAT, file_of, request_line
from tests.fakes.small_model import NAME, small_settings, write_model

TEXTS = st.one_of(st.text(max_size=40), st.sampled_from(["", "a" * 63, "a" * 64, "é" * 700, "word " * 900, "x" * 9000]))
COUNTS = st.sampled_from([None, 0, 1, 16, 17, 2000, 2048, 2**31, 1.5, "8", True])
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool", "king"])
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": ROLES, "content": TEXTS}),
        st.fixed_dictionaries(
            {"role": ROLES, "content": st.one_of(st.none(), st.just([{"type": "text", "text": "hi"}]))},
            optional={"name": st.sampled_from(["x", 5]), "more": st.just([[]])},
        ),
    ),
    max_size=3,
)
PROMPTS = st.one_of(TEXTS, st.just(["a", "b"]), st.just([1, 2]), st.just([]))
COMMON: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from([NAME, NAME, NAME, "embedder", "unknown", 5]),
    "temperature": st.sampled_from([None, 0, 0.5, 2, 3, "hot"]),
    "top_p": st.sampled_from([1, 0]),
    "n": COUNTS,
    "max_tokens": COUNTS,
    "user": st.sampled_from([None, "u", {"a": 1}]),
    "stop": st.sampled_from(["x", ["x"], [1]]),
    "stream": st.sampled_from([False, True]),
    "seed": st.sampled_from([1, 2**64]),
    "priority": st.just(-1),
    "response_format": st.just({"type": "json_object"}),
    "tools": st.just([{"name": "f"}]),
}
OWN: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    CHAT: {"messages": MESSAGES, "max_completion_tokens": COUNTS, "logprobs": st.sampled_from([True, 3])},
    "/v1/completions": {"prompt": PROMPTS, "logprobs": st.sampled_from([True, 3])},
    "/v1/embeddings": {"input": PROMPTS, "dimensions": COUNTS, "encoding_format": st.sampled_from(["float", "x"])},
    "/v1/messages": {"messages": MESSAGES, "system": st.one_of(TEXTS, st.just([])), "stop_sequences": st.just(["x"])},
    "/v1/responses": {
        "input": st.one_of(TEXTS, st.just([{"role": "user", "content": "hi"}])),
        "instructions": TEXTS,
        "max_output_tokens": COUNTS,
    },
}
LIKELY = ("model", "messages", "prompt", "input")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Settings with one model for texts and one for embeddings."""
    return small_settings(write_model(tmp_path_factory.mktemp("model")))


@st.composite
def lines(draw: st.DrawFn, endpoint: str) -> bytes:
    """A line of an endpoint, plain or nearly so."""
    fields = {**COMMON, **OWN[endpoint]}
    others = draw(st.lists(st.sampled_from(sorted(fields.keys() - set(LIKELY))), max_size=2))
    names = [name for name in LIKELY if name in fields] + others
    body = {name: draw(fields[name]) for name in names}
    request = {
        "custom_id": draw(st.sampled_from(["a", "b", "ü", 'q"', "", "c" * 513, "line\nfeed", 5])),
        "method": draw(st.sampled_from(["POST", "POST", "POST", "GET"])),
        "url": draw(st.sampled_from([endpoint, endpoint, endpoint, "/v1/other"])),
        "body": body,
    }
    keys = draw(st.one_of(st.just(list(request)), st.permutations(list(request))))
    written = json.dumps({key: request[key] for key in keys}, ensure_ascii=draw(st.booleans())).encode()
    twice = draw(
        st.sampled_from([b'"body":', b'"b\\u006fdy":', b'"custom_id": 5, "custom_id":', b'"more": [], "body":'])
    )
    spoilt = [written, written[:-1], written + b" \r", written.replace(b'"body":', b'"body": {}, ' + twice, 1)]
    return draw(st.sampled_from([written, written, written, *spoilt]))


@pytest.mark.parametrize("endpoint", sorted(OWN))
def test_a_block_gets_the_answers_that_its_lines_get_one_by_one(endpoint: str, settings: Settings) -> None:
    rules = Rules(settings, endpoint)

    @hypothesis_settings(max_examples=60, deadline=None)
    @given(st.lists(st.one_of(lines(endpoint), st.sampled_from([b"", b" ", b"\xff", b"{}", b"null"])), max_size=8))
    def agree(block: list[bytes]) -> None:
        intake_files.check(Block(3, 1000, b"\n".join(block)), rules)

    agree()


@pytest.mark.parametrize("depth", [2, 3, 4, 40, 62, 63, 64, 65, 66, 300])
@pytest.mark.parametrize("most", [1, 2, 3, 64])
def test_what_a_key_given_twice_hides_is_no_deeper_than_a_line_may_be(
    depth: int, most: int, settings: Settings
) -> None:
    rules = Rules(small_settings(Path(settings.models[NAME].source), max_depth=most), CHAT)
    nested = b"[" * depth + b"]" * depth
    line = request_line(1)
    twice = line.replace(b'"body":', b'"body":' + nested + b',"body":', 1)
    further = line.replace(b'"body":', b'"more":' + nested + b',"body":', 1)
    inside = line.replace(b'"messages":', b'"messages":' + nested + b',"messages":', 1)
    checked = intake_files.check(Block(0, 0, b"\n".join([line, twice, further, inside])), rules)
    assert (1 in {problem.line for problem in checked.problems}) == (most < 3)
    assert (2 in {problem.line for problem in checked.problems}) == (depth > most or most < 3)


def test_plain_lines_are_decoded_twice_and_never_looked_at_alone(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, alone = [], []

    class Counting:
        """A decoder that remembers the sizes of what it was given."""

        def __init__(self, decoder: Any) -> None:
            self._decoder = decoder

        def decode(self, data: bytes) -> Any:
            decoded.append(len(data))
            return self._decoder.decode(data)

    monkeypatch.setattr(plain, "_envelopes", Counting(plain._envelopes))
    monkeypatch.setattr(plain, "_bodies", {CHAT: Counting(plain._bodies[CHAT])})
    monkeypatch.setattr(block_check, "check_line", lambda *arguments, **_: alone.append(arguments))
    own = [request_line(number, system="be kind", temperature=0.5, seed=1) for number in range(50)]
    checked = block_check.check_block(Block(0, 0, file_of(own)), Rules(settings, CHAT))
    assert len(checked.requests.array) == 50
    assert (len(decoded), alone) == (100, [])
    assert sum(decoded) < 2 * sum(map(len, own))


def test_a_schema_that_every_line_has_is_looked_through_once(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "title": "once"}}}
    own = file_of([request_line(number, response_format=schema) for number in range(50)])
    looked: list[str] = []
    states = grammars._states
    monkeypatch.setattr(grammars, "_states", lambda name, value: looked.append(name) or states(name, value))
    checked = block_check.check_block(Block(0, 0, own), Rules(settings, CHAT))
    assert len(checked.requests.array) == 50
    assert looked.count("response_format") == 1
