"""Single lines: what is refused before a GPU sees it, what passes, and what the customer is told."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batch_pipeline.intake.blocks import Block, read_blocks
from batch_pipeline.intake.lines import readable_custom_id
from batch_pipeline.intake.problems import LineProblem
from batch_pipeline.intake.rows import Request
from batch_pipeline.intake.rules import Rules
from batch_pipeline.settings import Settings
from batch_pipeline.wire.nesting import depth_of
from tests.fakes import intake_files
from tests.fakes.small_model import NAME, small_settings, write_model

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Settings with one model for texts and one for embeddings."""
    return small_settings(write_model(tmp_path_factory.mktemp("model")))


def line_of(endpoint: str = CHAT, **body: Any) -> bytes:
    """A line with a body of the endpoint, which is valid but for what is given."""
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"model": NAME, "messages": [USER]},
        COMPLETIONS: {"model": NAME, "prompt": "hi"},
        EMBEDDINGS: {"model": "embedder", "input": "hi"},
    }
    request = {"custom_id": "a", "method": "POST", "url": endpoint, "body": {**bodies[endpoint], **body}}
    return json.dumps(request).encode()


def check(line: bytes, settings: Settings, endpoint: str = CHAT) -> Request | LineProblem:
    """What a single line is."""
    checked = intake_files.check(Block(0, 0, line), Rules(settings, endpoint))
    (only,) = [*checked.requests, *checked.problems]
    return only


def refusal(line: bytes, settings: Settings, endpoint: str = CHAT) -> tuple[str, str]:
    """The code and the message of a line that must be refused."""
    problem = check(line, settings, endpoint)
    assert isinstance(problem, LineProblem), line
    return problem.code, problem.message


BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "body.messages"),
    ({"messages": "hi"}, "body.messages"),
    ({"messages": [{"role": "user"}]}, "body.messages[0].content is missing"),
    ({"messages": [{"role": "king", "content": "hi"}]}, "body.messages[0].role"),
    ({"messages": [{"content": "hi"}]}, "body.messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "text parts"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://h/x"}}]}]},
        "images",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "audio"),
    ({"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}]}, "files"),
    ({"messages": [{"role": "user", "content": [{"image_url": "http://h/x"}]}]}, "text parts"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "", "uuid": "1", "image_url": "http://h/x"}]}
            ]
        },
        "text parts",
    ),
    ({"stream": True}, "body.stream"),
    ({"n": 17}, "body.n must be at most 16"),
    ({"n": 0}, "body.n"),
    ({"best_of": 1000}, "body.best_of"),
    ({"n": True}, "body.n"),
    ({"max_tokens": 0}, "body.max_tokens"),
    ({"max_tokens": -1}, "body.max_tokens"),
    ({"max_tokens": 1.5}, "body.max_tokens"),
    ({"max_tokens": "8"}, "body.max_tokens"),
    ({"max_tokens": 2**40}, "body.max_tokens"),
    ({"max_completion_tokens": 0}, "body.max_completion_tokens"),
    ({"temperature": -0.1}, "body.temperature"),
    ({"temperature": "hot"}, "body.temperature"),
    ({"top_p": 0}, "body.top_p"),
    ({"top_p": 1.1}, "body.top_p"),
    ({"top_k": -2}, "body.top_k"),
    ({"min_p": 2}, "body.min_p"),
    ({"presence_penalty": 3}, "body.presence_penalty"),
    ({"frequency_penalty": -3}, "body.frequency_penalty"),
    ({"repetition_penalty": 0}, "body.repetition_penalty"),
    ({"logprobs": 5}, "body.logprobs must be true or false"),
    ({"top_logprobs": 21}, "body.top_logprobs"),
    ({"top_logprobs": -1}, "body.top_logprobs"),
    ({"prompt_logprobs": -1}, "body.prompt_logprobs"),
    ({"logit_bias": {"5": 101}}, "body.logit_bias"),
    ({"seed": 2**64}, "body.seed"),
    ({"stop": [1]}, "body.stop"),
    ({"model": 5}, "body.model"),
    ({"response_format": {"type": "json_schema", "json_schema": {"x": "y" * 70_000}}}, "body.response_format has"),
    ({"guided_json": {f"p{i}": 1 for i in range(5000)}}, "body.guided_json has about"),
    ({"structured_outputs": {"regex": "a" * 70_000}}, "body.structured_outputs"),
    ({"tools": [{"x": "y" * 70_000}], "tool_choice": "required"}, "body.tools"),
]


@pytest.mark.parametrize(("body", "words"), BAD_CHAT, ids=[str(i) for i in range(len(BAD_CHAT))])
def test_bad_chat_parameter_is_refused_by_name(body: dict[str, Any], words: str, settings: Settings) -> None:
    code, message = refusal(line_of(**body), settings)
    assert (code, words in message) == ("invalid_request", True), message
    assert len(message) < 400


GOOD_CHAT: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, "there"]}]},
    {
        "messages": [
            USER,
            {"role": "assistant", "tool_calls": []},
            {"role": "tool", "content": "x", "tool_call_id": "1"},
        ]
    },
    {"messages": [{"role": "developer", "content": ""}, {**USER, "name": "x"}]},
    {
        "temperature": 2,
        "top_p": 1,
        "top_k": -1,
        "n": 16,
        "seed": -5,
        "stop": ["a"],
        "logprobs": True,
        "top_logprobs": 20,
    },
    {"temperature": None, "max_tokens": None, "stream": None, "n": None, "stop": None, "response_format": None},
    {"max_tokens": 100, "max_completion_tokens": 50, "min_tokens": 0},
    {"unknown_to_us": {"deep": [1, 2, {"x": None}]}, "chat_template_kwargs": {"enable_thinking": False}},
    {"tools": [{"x": "y" * 70_000}], "tool_choice": "auto"},
    {"response_format": {"type": "json_object"}, "logit_bias": {"5": -100}},
    {"user": "nul \u0000 is JSON"},
]


@pytest.mark.parametrize("body", GOOD_CHAT, ids=[str(i) for i in range(len(GOOD_CHAT))])
def test_good_chat_request_passes(body: dict[str, Any], settings: Settings) -> None:
    assert isinstance(check(line_of(**body), settings), Request)


@pytest.mark.parametrize(
    ("endpoint", "body", "words"),
    [
        (COMPLETIONS, {"prompt": []}, "body.prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "body.prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "body.prompt"),
        (COMPLETIONS, {"prompt": None}, "body.prompt"),
        (COMPLETIONS, {"prompt": [[1], []]}, "body.prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 17}, "more than 16 answers"),
        (COMPLETIONS, {"prompt": ["a"] * 3, "n": 6}, "more than 16 answers"),
        (COMPLETIONS, {"prompt_embeds": "AAAA"}, "body.prompt_embeds"),
        (COMPLETIONS, {"logprobs": True}, "body.logprobs must be a whole number"),
        (EMBEDDINGS, {"input": []}, "body.input"),
        (EMBEDDINGS, {"input": {"a": 1}}, "body.input"),
        (EMBEDDINGS, {"input": ["a"] * 2049}, "2049 texts"),
        (EMBEDDINGS, {"encoding_format": "bytes"}, "body.encoding_format"),
        (EMBEDDINGS, {"messages": [USER]}, "body.messages"),
        (EMBEDDINGS, {"stream": True}, "body.stream"),
    ],
)
def test_bad_parameter_of_other_endpoints(endpoint: str, body: dict[str, Any], words: str, settings: Settings) -> None:
    code, message = refusal(line_of(endpoint, **body), settings, endpoint)
    assert (code, words in message) == ("invalid_request", True), message


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (COMPLETIONS, {"prompt": [1, 2, 3]}),
        (COMPLETIONS, {"prompt": [[1], [2]], "n": 8, "suffix": None, "echo": True}),
        (COMPLETIONS, {"prompt": "", "logprobs": 5}),
        (EMBEDDINGS, {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 8}),
        (EMBEDDINGS, {"input": [[1, 2], [3]]}),
    ],
)
def test_good_request_of_other_endpoints(endpoint: str, body: dict[str, Any], settings: Settings) -> None:
    assert isinstance(check(line_of(endpoint, **body), settings, endpoint), Request)


def test_a_model_of_another_endpoint_is_not_found(settings: Settings) -> None:
    code, message = refusal(line_of(model="embedder"), settings)
    assert code == "model_not_found"
    assert "does not serve /v1/chat/completions, only /v1/embeddings" in message


@pytest.mark.parametrize("field", ["priority", "request_id", "kv_transfer_params", "ec_transfer_params"])
def test_the_operators_fields_are_marked_to_be_taken_out(field: str, settings: Settings) -> None:
    request = check(line_of(**{field: -5}), settings)
    assert isinstance(request, Request)
    assert request.rewrite
    plain = check(line_of(), settings)
    assert isinstance(plain, Request)
    assert not plain.rewrite


@pytest.mark.parametrize("value", ["e" * 5000, "\u0001" * 5000, "\U0001f600" * 5000, "\n" * 9])
def test_a_message_repeats_little_of_what_it_was_given_and_escaped(value: str, settings: Settings) -> None:
    for line in (
        line_of(model=value),
        json.dumps({"custom_id": "a", "method": value, "url": value, "body": {}}).encode(),
    ):
        _, message = refusal(line, settings)
        assert len(message) < 300
        assert message.isprintable()


@pytest.mark.parametrize(
    ("line", "accepted"),
    [
        (b'{"custom_id":1,"custom_id":"g","method":"POST","url":"%s","body":{"model":"%s","messages":[%s]}}', True),
        (b'{"custom_id":"g","method":"POST","url":"%s","body":{"model":4,"model":"%s","messages":[%s]}}', True),
        (b'{"custom_id":"g","custom_id":1,"method":"POST","url":"%s","body":{"model":"%s","messages":[%s]}}', False),
        (b'{"custom_id":"g","method":"POST","url":"%s","body":{"model":"%s","model":4,"messages":[%s]}}', False),
    ],
)
def test_of_a_key_given_twice_the_last_one_counts(line: bytes, accepted: bool, settings: Settings) -> None:
    found = check(line % (CHAT.encode(), NAME.encode(), json.dumps(USER).encode()), settings)
    assert isinstance(found, Request) == accepted


def test_syntax_is_at_fault_before_types_are(settings: Settings) -> None:
    assert refusal(b'{"custom_id": 5, "method": "POST",', settings)[0] == "invalid_json_line"
    assert refusal(b"[1, 2", settings)[0] == "invalid_json_line"
    assert refusal(line_of(temperature=99)[:-1], settings)[0] == "invalid_json_line"


@pytest.mark.parametrize(("depth", "accepted"), [(60, True), (64, True), (65, False), (300, False), (100_000, False)])
def test_bodies_are_nested_to_the_limit_and_no_further(depth: int, accepted: bool, settings: Settings) -> None:
    nested = "[" * (depth - 1) + "]" * (depth - 1)
    line = line_of(metadata="HERE").replace(b'"HERE"', nested.encode())
    if accepted:
        assert isinstance(check(line, settings), Request)
    else:
        assert refusal(line, settings)[0] == "invalid_json_line"


def test_brackets_in_a_text_are_no_nesting(settings: Settings) -> None:
    text = '[{"\\' * 100
    assert isinstance(check(line_of(messages=[{"role": "user", "content": text}]), settings), Request)
    assert depth_of(json.dumps({"a": [text]}).encode(), 10) == 2


def test_where_parts_of_a_line_lie(settings: Settings) -> None:
    for custom_id in ("plain", 'with \\ and " in it', "emoji-\U0001f600"):
        request = json.loads(line_of())
        request["custom_id"] = custom_id
        for line in (json.dumps(request).encode(), json.dumps(request, ensure_ascii=False).encode() + b" \r"):
            found = check(line, settings)
            assert isinstance(found, Request)
            body = line[found.body_start : found.body_start + found.body_bytes]
            assert json.loads(body) == request["body"]
            if found.id_start >= 0:
                assert line[found.id_start : found.id_start + found.id_bytes].decode() == custom_id
            assert readable_custom_id(line) == custom_id


def endless(start: bytes, filler: bytes, count: int) -> Iterator[bytes]:
    """A line without an end, and a good line behind it."""
    yield start
    for _ in range(count):
        yield filler
    yield b"\n" + line_of() + b"\n"


def test_an_endless_line_is_skipped_in_bounded_memory(settings: Settings) -> None:
    rules = Rules(settings, CHAT)
    tracemalloc.start()
    blocks = read_blocks(endless(line_of()[:-2], b"x" * 1_000_000, 200), rules.max_line_bytes)
    checked = [intake_files.check(block, rules) for block in blocks]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * rules.max_line_bytes
    assert [(p.line, p.code) for part in checked for p in part.problems] == [(1, "line_too_long")]
    assert [r.line_index for part in checked for r in part.requests] == [1]


def test_a_blank_line_of_any_length_is_no_request(settings: Settings) -> None:
    rules = Rules(settings, CHAT)
    blocks = list(read_blocks(endless(b" ", b" \t" * 500_000, 9), rules.max_line_bytes))
    checked = [intake_files.check(block, rules) for block in blocks]
    assert not [p for part in checked for p in part.problems]
    assert [(r.line_index, r.line_offset) for part in checked for r in part.requests] == [(1, 9_000_002)]


def test_lines_around_the_limit(settings: Settings) -> None:
    line = line_of()
    for limit, accepted in ((len(line), True), (len(line) - 1, False)):
        rules = Rules(small_settings(Path(settings.models[NAME].source), max_line_bytes=limit), CHAT)
        for pieces in ([line + b"\n" + line], [line, b"\n", line]):
            checked = [intake_files.check(block, rules) for block in read_blocks(pieces, limit)]
            good = sum(len(part.requests) for part in checked)
            codes = [p.code for part in checked for p in part.problems]
            assert (good, codes) == ((2, []) if accepted else (0, ["line_too_long"] * 2))
