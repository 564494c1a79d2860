"""OpenAI's /v1/responses as the endpoint of a batch: what is taken, what is counted, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from batch_pipeline.engine import Answer
from batch_pipeline.intake.blocks import Block
from batch_pipeline.intake.problems import LineProblem
from batch_pipeline.intake.rows import Request
from batch_pipeline.intake.rules import Rules
from batch_pipeline.settings import Settings
from batch_pipeline.wire.usage import AnswerBody, tokens_of
from batch_pipeline.worker.outcome import Meaning, meaning, said, salted, unstored
from tests.fakes import intake_files
from tests.fakes.small_model import CONTEXT_LENGTH, NAME, small_settings, write_model

USER = {"role": "user", "content": "hi"}
PLAIN: dict[str, Any] = {"model": NAME, "max_output_tokens": 8, "input": "hi"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
HOST = "http://169.254.169.254/latest"
IMAGE = {"type": "input_image", "image_url": HOST, "detail": "auto"}
TEXT = {"type": "input_text", "text": "x"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
ANSWERED = {
    "id": "msg_1",
    "content": [{"annotations": [], "text": "Hello", "type": "output_text", "logprobs": None}],
    "role": "assistant",
    "status": "completed",
    "type": "message",
    "phase": None,
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return small_settings(write_model(tmp_path_factory.mktemp("model")))


def with_hosts(settings: Settings, *hosts: str) -> Settings:
    model = msgspec.structs.replace(settings.models[NAME], allowed_media_hosts=list(hosts))
    return msgspec.structs.replace(settings, models={**settings.models, NAME: model})


def check(body: dict[str, Any], settings: Settings, endpoint: str = "/v1/responses") -> Request | LineProblem:
    line = json.dumps({"custom_id": "a", "method": "POST", "url": endpoint, "body": body}).encode()
    checked = intake_files.check(Block(0, 0, line), Rules(settings, endpoint))
    (only,) = [*checked.requests, *checked.problems]
    return only


def items(*given: dict[str, Any]) -> dict[str, Any]:
    return {"input": list(given)}


TAKEN: list[dict[str, Any]] = [
    {},
    {"instructions": "Be brief.", "temperature": 1, "top_p": 0.5, "metadata": {"user": "u"}, "user": "u"},
    {"store": True, "background": False, "stream": False, "service_tier": "flex", "prompt_cache_key": "k"},
    {"previous_response_id": None, "prompt": None, "conversation": None},
    {"tools": [TOOL, {"type": "custom", "name": "g"}], "tool_choice": "auto", "parallel_tool_calls": False},
    {"tools": [{**TOOL, "strict": True}], "tool_choice": {"type": "function", "name": "f"}, "max_tool_calls": 1},
    {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}, "verbosity": "low"}},
    {"reasoning": {"effort": "low", "summary": None}, "include": ["message.output_text.logprobs"], "top_logprobs": 2},
    {"truncation": "auto"},
    items(USER),
    items({"type": "message", "role": "user", "content": [TEXT, TEXT]}),
    items({"role": "developer", "content": "x"}, USER),
    items(USER, ANSWERED, USER),
    items(USER, {"role": "assistant", "content": "Hello"}, USER),
    items(USER, {**CALL, "id": "fc_1", "status": "completed", "namespace": None, "caller": None, "async": None}),
    items(USER, CALL, {"type": "function_call_output", "call_id": "c", "output": "3"}),
    items(USER, CALL, {"type": "function_call_output", "call_id": "c", "output": [TEXT]}),
    items(
        USER,
        {"type": "custom_tool_call", "call_id": "c", "name": "g", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "y"},
    ),
    items(USER, {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}),
    items(USER, {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None, "status": None}),
]


@pytest.mark.parametrize("more", TAKEN, ids=range(len(TAKEN)))
def test_bodies_of_the_sdk_are_taken(more: dict[str, Any], settings: Settings) -> None:
    taken = check({**PLAIN, **more}, settings)
    assert isinstance(taken, Request), taken
    assert taken.max_tokens == 8
    assert taken.prompt_tokens > 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "body.input must be a text or a list of at least one item"),
    ({"input": []}, "body.input must be a text or a list of at least one item"),
    ({"input": 5}, "body.input must be a text or a list of at least one item"),
    ({"max_output_tokens": 0}, "body.max_output_tokens must be"),
    ({"max_output_tokens": CONTEXT_LENGTH + 1}, "body.max_output_tokens is"),
    ({"temperature": 3}, "body.temperature must be"),
    ({"model": "another"}, "there is no model"),
    ({"stream": True}, "body.stream must be false"),
    ({"background": True}, "body.background must be false"),
    ({"previous_response_id": "resp_1"}, "body.previous_response_id is not taken"),
    ({"previous_input_messages": [USER]}, "body.previous_input_messages is not taken"),
    ({"conversation": "conv_1"}, "body.conversation is not taken"),
    ({"prompt": {"id": "p"}}, "body.prompt is not taken"),
    ({"vllm_xargs": {"a": 1}}, "body.vllm_xargs is not taken"),
    ({"mm_processor_kwargs": {"a": 1}}, "body.mm_processor_kwargs is not taken"),
    ({"media_io_kwargs": {"a": {}}}, "body.media_io_kwargs is not taken"),
    ({"chat_template_kwargs": {"messages": "x"}}, "must not set messages"),
    ({"text": {"format": {"type": "json_schema", "schema": {"maxItems": 10**9}}}}, "body.text"),
    ({"structured_outputs": {"regex": "(a{1,9999}){1,9999}"}}, "body.structured_outputs"),
    ({"tools": [{**TOOL, "parameters": {"maxItems": 10**9}}], "tool_choice": "required"}, "body.tools"),
    ({"tools": [{**TOOL, "strict": True, "parameters": {"maxItems": 10**9}}]}, "body.tools"),
    ({"tools": {"type": "function"}}, "body.tools must be a list"),
    ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "body.tool_choice must be"),
    (items({"role": "tool", "content": "x"}), "body.input[0].role"),
    (items({"content": "x"}), "body.input[0].role is missing"),
    (items({"role": "user"}), "body.input[0].content is missing"),
    (items({"role": "user", "content": []}), "body.input[0] has an empty list"),
    (items(USER, {"type": "function_call", "call_id": "c"}), "body.input[1].name is missing"),
    (items(USER, {"type": "function_call_output", "output": "x"}), "body.input[1].call_id is missing"),
    (items({"type": "item_reference", "id": "x"}), "body.input[0].type is not as /v1/responses takes it"),
    (items({"type": "web_search_call", "id": "x", "status": "completed"}), "body.input[0].type"),
    (items({**USER, "uuid": "x"}), "body.input[0]"),
    (items({"type": "reasoning", "summary": [], "encrypted_content": "x"}), "body.input[0].encrypted_content"),
    (items({**ANSWERED, "content": ANSWERED["content"] * 2}), "body.input[0].content has more than one part"),
    (items({**ANSWERED, "content": [{"type": "refusal", "refusal": "no"}]}), "body.input[0].content"),
    (items({"role": "user", "content": [IMAGE]}), "body.input[0] must be of text parts"),
    (items({"role": "user", "content": [{**TEXT, "image_url": HOST}]}), "body.input[0] must be of text parts"),
    (items({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}), "body.input[0].content"),
    (items({"role": "user", "content": [{"type": "input_image"}]}), "body.input[0] must be of text parts"),
    (items({"role": "user", "content": [{"type": "input_file", "file_url": HOST}]}), "body.input[0].content"),
    (items({"role": "user", "content": [{**TEXT, "uuid": "1"}]}), "body.input[0].content"),
    (items({"type": "function_call_output", "call_id": "c", "output": [IMAGE]}), "body.input[0] must be of text parts"),
    (items({"type": "reasoning", "summary": [IMAGE]}), "body.input[0] must be of text parts"),
]


@pytest.mark.parametrize(("more", "words"), REFUSED, ids=range(len(REFUSED)))
def test_bodies_that_cannot_be_are_refused_with_their_place(
    more: dict[str, Any], words: str, settings: Settings
) -> None:
    refused = check({name: value for name, value in {**PLAIN, **more}.items() if value is not None}, settings)
    assert isinstance(refused, LineProblem), refused
    assert words in refused.message


@pytest.mark.parametrize(
    "kind",
    ["mcp", "web_search", "web_search_preview", "code_interpreter", "container", "file_search", "namespace", "shell"],
)
def test_tools_that_an_engine_would_run_itself_are_refused(kind: str, settings: Settings) -> None:
    for tools in ([{"type": kind, "name": "f"}], [TOOL, {"type": kind, "name": "f", "server_url": HOST}]):
        refused = check({**PLAIN, "tools": tools}, settings)
        assert isinstance(refused, LineProblem), refused
        assert "body.tools must be a list of tools of the types function and custom" in refused.message


def test_images_come_from_allowed_hosts_only(settings: Settings) -> None:
    allowing = with_hosts(settings, "media.example.com")
    for url, is_taken in (("https://media.example.com/x.png", True), (HOST, False), ("data:image/png;base64,A", False)):
        found = check({**PLAIN, **items({"role": "user", "content": [TEXT, {**IMAGE, "image_url": url}]})}, allowing)
        assert isinstance(found, Request) == is_taken, found


def test_a_prompt_that_does_not_fit_is_refused_as_that_of_a_chat_is(settings: Settings) -> None:
    for number in range(1, 4000, 37):
        words = "word " * number
        messages = [{"role": "system", "content": "S"}, {"role": "user", "content": words}]
        chat = check({"model": NAME, "messages": messages, "max_tokens": 8}, settings, "/v1/chat/completions")
        as_text = check({**PLAIN, "instructions": "S", "input": words}, settings)
        parts = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": words}]}
        as_items = check({**PLAIN, "instructions": "S", "input": [parts]}, settings)
        found = {isinstance(one, Request) for one in (chat, as_text, as_items)}
        assert len(found) == 1, number
    assert isinstance(as_text, LineProblem)
    assert as_text.code == "context_length_exceeded"
    assert "body.max_output_tokens asks for 8" in as_text.message
    assert isinstance(check({**PLAIN, "input": words, "truncation": "auto"}, settings), Request)


def test_requests_that_begin_alike_share_a_prefix_whatever_form_their_input_has(settings: Settings) -> None:
    def prefix(**more: Any) -> int:
        found = check({**PLAIN, **more}, settings)
        assert isinstance(found, Request), found
        return found.prefix_64

    system = "You are a helpful assistant who answers in one short sentence and in plain words only."
    assert prefix(instructions=system, input="a") == prefix(instructions=system, input=[USER])
    assert prefix(instructions=system, input="a") == prefix(input=[{"role": "system", "content": system}, USER])
    assert prefix(instructions=system, input="a", tools=[TOOL]) != prefix(instructions=system, input="a")
    assert prefix(input="a") != prefix(input="b")


def test_usage_of_responses_has_the_cached_tokens_in_the_input() -> None:
    def read(**usage: Any) -> tuple[int, int, int]:
        return tokens_of(msgspec.json.decode(msgspec.json.encode({"usage": usage}), type=AnswerBody).usage)

    assert read(input_tokens=10, output_tokens=3, input_tokens_details={"cached_tokens": 6}) == (10, 6, 3)
    assert read(input_tokens=10, output_tokens=3, input_tokens_details={"cached_tokens": 60}) == (10, 10, 3)
    assert read(input_tokens=10, output_tokens=3, input_tokens_details={}) == (10, 0, 3)
    assert read(input_tokens=-1, output_tokens=2**40, input_tokens_details={"cached_tokens": -1}) == (0, 0, 0)


@pytest.mark.parametrize(
    ("state", "status", "expected"),
    [
        ("completed", 200, Meaning.FINAL),
        ("incomplete", 200, Meaning.FINAL),
        ("", 200, Meaning.FINAL),
        ("failed", 200, Meaning.FAILED),
        ("cancelled", 200, Meaning.FAILED),
        ("queued", 200, Meaning.FAILED),
        ("in_progress", 200, Meaning.FAILED),
        ("failed", 400, Meaning.FINAL),
    ],
)
def test_a_response_that_says_that_it_failed_is_no_result(state: str, status: int, expected: Meaning) -> None:
    answer = Answer(status, b"{}", True, "resp_1", 1, 0, 1, None, "", state)
    assert meaning(answer) is expected
    assert (state in said(answer)) == (state == "" or state not in ("completed", "incomplete"))


def test_an_engine_is_told_to_keep_nothing() -> None:
    body = unstored(salted(b'{"model":"m","input":"x"} ', "acme"))
    decoded = json.loads(body)
    assert (decoded["model"], decoded["input"], decoded["store"]) == ("m", "x", False)
    assert decoded.keys() == {"model", "input", "store", "cache_salt"}
