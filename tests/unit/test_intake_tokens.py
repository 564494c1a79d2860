"""Prompts against the context: the count is that of transformers, the bounds hold, and counting is rare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from batch_pipeline.intake.blocks import Block
from batch_pipeline.intake.bodies import ChatBody, Message
from batch_pipeline.intake.rules import Rules
from batch_pipeline.intake.templates import ChatTemplate, TemplateFailed
from batch_pipeline.intake.tokens import TokenCounter
from batch_pipeline.settings import Settings
from tests.fakes import intake_files
from tests.fakes.intake_files import Checked
from tests.fakes.small_model import CONTEXT_LENGTH, NAME, TEMPLATE, small_settings, write_model

CHAT = "/v1/chat/completions"
CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": "Answer in French."},
        {"role": "user", "content": "The fox, ünïcode, 日本語 😀\n\n"},
    ],
    [{"role": role, "content": f"{role} says a word"} for role in ("user", "assistant", "user", "assistant", "user")],
    [{"role": "user", "content": "<|im_end|>\n<|im_start|>system\nspecial tokens in a text"}],
    [{"role": "user", "content": ""}],
]
OTHER_TEMPLATE = """{{ bos_token }}{% for m in messages %}
  {%- if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}
  {% generation %}[{{ m.role | upper }}] {{ m.content | trim }}{% endgeneration %}
  {% if loop.index > 40 %}{% break %}{% endif %}
{% endfor %}{{ {"n": messages | length} | tojson }}{% if add_generation_prompt %}>{% endif %}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    return write_model(tmp_path_factory.mktemp("model"))


def transformers_tokenizer(folder: Path, template: str) -> Any:
    """The tokenizer of a folder as transformers has it."""
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **names)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", [TEMPLATE, OTHER_TEMPLATE])
@pytest.mark.parametrize("number", range(len(CONVERSATIONS)))
@pytest.mark.parametrize("with_prompt", [True, False])
def test_counts_are_those_of_transformers(tmp_path: Path, number: int, template: str, with_prompt: bool) -> None:
    folder = write_model(tmp_path, template)
    conversation = CONVERSATIONS[number]
    counter = TokenCounter(folder)
    body = ChatBody(
        model=NAME, messages=[Message(**message) for message in conversation], add_generation_prompt=with_prompt
    )
    prompt = counter.prompt_of(body)
    tokenizer = transformers_tokenizer(folder, template)
    rendered = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=with_prompt)
    expected = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert prompt == rendered
    assert counter.count(rendered, special_tokens=False, limit=10**6) == len(expected)
    assert counter.at_most(json.dumps(conversation).encode(), len(conversation)) >= len(expected)
    assert counter.at_least(len(rendered)) <= len(expected)


@given(st.lists(st.text(max_size=200), min_size=1, max_size=4))
def test_bounds_hold_for_any_conversation(tmp_path_factory: pytest.TempPathFactory, contents: list[str]) -> None:
    counter = _counter(tmp_path_factory)
    contents = [content.encode("utf-8", "replace").decode() for content in contents]
    messages = [Message(role="user", content=content) for content in contents]
    prompt = counter.prompt_of(ChatBody(model=NAME, messages=messages))
    assert prompt is not None
    tokens = counter.count(prompt, special_tokens=False, limit=10**6)
    raw = json.dumps([{"role": "user", "content": content} for content in contents], ensure_ascii=False).encode()
    assert counter.at_least(sum(map(len, contents))) <= tokens <= counter.at_most(raw, len(contents))


_counters: list[TokenCounter] = []


def _counter(tmp_path_factory: pytest.TempPathFactory) -> TokenCounter:
    if not _counters:
        _counters.append(TokenCounter(write_model(tmp_path_factory.mktemp("bounds"))))
    return _counters[0]


def check(body: dict[str, Any], settings: Settings, endpoint: str = CHAT) -> Checked:
    """What a line with this body is."""
    request = {"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": NAME, **body}}
    return intake_files.check(Block(0, 0, json.dumps(request).encode()), Rules(settings, endpoint))


def test_the_limit_is_exact(folder: Path) -> None:
    settings = small_settings(folder)
    content = "word " * 1500
    counter = TokenCounter(folder)
    prompt = counter.prompt_of(ChatBody(model=NAME, messages=[Message(role="user", content=content)]))
    assert prompt is not None
    tokens = counter.count(prompt, special_tokens=False, limit=10**6)
    body = {"messages": [{"role": "user", "content": content}]}
    fits = check({**body, "max_tokens": CONTEXT_LENGTH - tokens}, settings)
    assert fits.requests[0].prompt_tokens == tokens
    over = check({**body, "max_tokens": CONTEXT_LENGTH - tokens + 1}, settings)
    assert over.problems[0].code == "context_length_exceeded"
    assert f"{tokens} tokens" in over.problems[0].message


@pytest.mark.parametrize(
    ("endpoint", "body", "accepted"),
    [
        ("/v1/completions", {"prompt": "word " * 3000, "max_tokens": 1}, False),
        ("/v1/completions", {"prompt": ["hi", "word " * 3000], "max_tokens": 1}, False),
        ("/v1/completions", {"prompt": list(range(300)) * 7, "max_tokens": 1}, False),
        ("/v1/completions", {"prompt": [1] * (CONTEXT_LENGTH - 1), "max_tokens": 1}, True),
        ("/v1/completions", {"prompt": "word " * 3000, "max_tokens": 1, "truncate_prompt_tokens": 100}, True),
        ("/v1/embeddings", {"model": "embedder", "input": "word " * 300}, False),
        ("/v1/embeddings", {"model": "embedder", "input": [1] * 256}, True),
        (CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": CONTEXT_LENGTH}, False),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 3_000_000}]}, False),
    ],
)
def test_prompts_of_every_kind(folder: Path, endpoint: str, body: dict[str, Any], accepted: bool) -> None:
    checked = check(body, small_settings(folder), endpoint)
    assert [p.code for p in checked.problems] == ([] if accepted else ["context_length_exceeded"])


def test_a_short_prompt_needs_no_tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise AssertionError("counted")

    monkeypatch.setattr(TokenCounter, "count", refuse)
    assert check({"messages": [{"role": "user", "content": "word " * 100}]}, small_settings(folder)).requests


def test_without_a_tokenizer_here_the_engine_decides(tmp_path: Path) -> None:
    settings = small_settings(tmp_path / "not on this machine")
    assert check({"messages": [{"role": "user", "content": "word " * 5000}]}, settings).requests
    assert check({"messages": [{"role": "user", "content": "hi"}], "max_tokens": CONTEXT_LENGTH}, settings).problems


@pytest.mark.parametrize("field", ["tools", "documents", "chat_template_kwargs"])
def test_what_only_the_engine_can_render_is_left_to_it(folder: Path, field: str) -> None:
    value: object = {} if field == "chat_template_kwargs" else []
    body = {"messages": [{"role": "user", "content": "word " * 1900}], field: value}
    assert check(body, small_settings(folder)).requests


def test_a_template_that_refuses_or_is_broken_is_left_to_the_engine(tmp_path: Path) -> None:
    with pytest.raises(TemplateFailed):
        ChatTemplate(OTHER_TEMPLATE, {}).render([{"role": "tool", "content": ""}], add_generation_prompt=True)
    with pytest.raises(TemplateFailed):
        ChatTemplate("{% if %}", {})
    with pytest.raises(TemplateFailed):
        ChatTemplate("{{ ''.__class__.__mro__ }}", {}).render([], add_generation_prompt=True)
    settings = small_settings(write_model(tmp_path, "{% if %}"))
    assert check({"messages": [{"role": "user", "content": "word " * 1900}]}, settings).requests
