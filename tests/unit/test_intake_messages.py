"""Anthropic's /v1/messages as the endpoint of a batch: what is taken, what is counted, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from batch_pipeline.intake.blocks import Block
from batch_pipeline.intake.problems import LineProblem
from batch_pipeline.intake.rows import Request
from batch_pipeline.intake.rules import Rules
from batch_pipeline.settings import Settings
from batch_pipeline.wire.usage import AnswerBody, tokens_of
from tests.fakes import intake_files
from tests.fakes.small_model import CONTEXT_LENGTH, NAME, small_settings, write_model

USER = {"role": "user", "content": "hi"}
PLAIN: dict[str, Any] = {"model": NAME, "max_tokens": 8, "messages": [USER]}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
AT_URL = {"type": "image", "source": {"type": "url", "url": "http://169.254.169.254/latest"}}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return small_settings(write_model(tmp_path_factory.mktemp("model")))


def check(body: dict[str, Any], settings: Settings) -> Request | LineProblem:
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/messages", "body": body}).encode()
    checked = intake_files.check(Block(0, 0, line), Rules(settings, "/v1/messages"))
    (only,) = [*checked.requests, *checked.problems]
    return only


def said(*blocks: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"system": "Be brief."},
        {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]},
        {"temperature": 1, "top_p": 0.5, "top_k": 5, "stop_sequences": ["x"], "metadata": {"user_id": "u"}},
        {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "stream": False},
        {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}}},
        said({"type": "text", "text": "one"}, {"type": "text", "text": "two"}),
        said({"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "x"}, role="assistant"),
        said({"type": "tool_use", "id": "t", "name": "f", "input": {"a": [1]}}, role="assistant"),
        said(
            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "3"}], "is_error": False}
        ),
        said({"type": "tool_result", "tool_use_id": "t", "content": "3"}),
    ],
    ids=range(12),
)
def test_params_of_the_sdk_are_taken(more: dict[str, Any], settings: Settings) -> None:
    taken = check({**PLAIN, **more}, settings)
    assert isinstance(taken, Request), taken
    assert taken.max_tokens == 8
    assert taken.prompt_tokens > 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"max_tokens": 0}, "body.max_tokens must be"),
        ({"max_tokens": None}, "body.max_tokens must be"),
        ({"messages": []}, "body.messages must be"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "body.messages[0].role"),
        ({"stream": True}, "body.stream"),
        ({"temperature": 3}, "body.temperature must be"),
        ({"vllm_xargs": {"a": 1}}, "body.vllm_xargs is not taken"),
        ({"system": [IMAGE]}, "body.system must be"),
        ({"model": "another"}, "there is no model"),
        ({"max_tokens": CONTEXT_LENGTH + 1}, "body.max_tokens is"),
        ({"chat_template_kwargs": {"messages": "x"}}, "must not set messages"),
        ({"output_config": {"format": {"schema": {"maxItems": 10**9}}}}, "body.output_config"),
        ({"tools": [{**TOOL, "input_schema": {"maxItems": 10**9}}], "tool_choice": {"type": "any"}}, "body.tools"),
        ({"tools": [{**TOOL, "strict": True, "input_schema": {"maxItems": 10**9}}]}, "body.tools"),
        (said(AT_URL), "body.messages[0].content must be a text"),
        (said(IMAGE), "body.messages[0].content must be a text"),
        (said({"type": "tool_result", "tool_use_id": "t", "content": [AT_URL]}), "body.messages[0].content"),
        (said({**AT_URL, "type": "text", "text": "x"}), "body.messages[0].content"),
        (said({"type": "document", "source": {"type": "url", "url": "http://x"}}), "body.messages[0].content"),
        (said({"type": "image", "source": {"type": "file", "file_id": "f"}}), "body.messages[0].content"),
        (said({"type": "tool_result", "content": [{"type": "tool_reference", "tool_name": "f"}]}), "content"),
    ],
    ids=range(21),
)
def test_params_that_cannot_be_are_refused_with_their_place(
    more: dict[str, Any], words: str, settings: Settings
) -> None:
    refused = check({name: value for name, value in {**PLAIN, **more}.items() if value is not None}, settings)
    assert isinstance(refused, LineProblem), refused
    assert words in refused.message


def test_prompt_that_does_not_fit_is_refused_by_its_exact_tokens(settings: Settings) -> None:
    for number in range(1, 4000, 37):
        words = "word " * number
        as_chat = {"model": NAME, "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": words}]}
        line = json.dumps(
            {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {**as_chat, "max_tokens": 8}}
        ).encode()
        checked = intake_files.check(Block(0, 0, line), Rules(settings, "/v1/chat/completions"))
        mine = check({**PLAIN, "system": "S", "messages": [{"role": "user", "content": words}]}, settings)
        assert isinstance(mine, Request) == bool(checked.requests), number
    assert isinstance(mine, LineProblem)
    assert mine.code == "context_length_exceeded"


def test_usage_of_messages_is_read_with_the_parts_that_a_cache_had() -> None:
    def read(**usage: int | None) -> tuple[int, int, int]:
        return tokens_of(msgspec.json.decode(msgspec.json.encode({"usage": usage}), type=AnswerBody).usage)

    assert read(input_tokens=10, output_tokens=3) == (10, 0, 3)
    assert read(input_tokens=4, cache_read_input_tokens=6, cache_creation_input_tokens=1, output_tokens=3) == (11, 6, 3)
    assert read(input_tokens=4, cache_read_input_tokens=None, output_tokens=None) == (4, 0, 0)
    assert read(input_tokens=-4, cache_read_input_tokens=2**40, output_tokens=-1) == (0, 0, 0)
    assert read(prompt_tokens=5, input_tokens=9, completion_tokens=2, output_tokens=7) == (5, 0, 2)
