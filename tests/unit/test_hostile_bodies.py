"""What a customer may not have an engine do: every field of vLLM's requests is passed on, taken out or refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from batch_pipeline.engine.server import ENVIRONMENT, vllm_command
from batch_pipeline.errors import SettingsError
from batch_pipeline.intake import grammars
from batch_pipeline.intake.blocks import Block
from batch_pipeline.intake.bodies import FORWARDED
from batch_pipeline.intake.chunk_inputs import forwarded
from batch_pipeline.intake.fields import REFUSED, STATEFUL
from batch_pipeline.intake.problems import LineProblem
from batch_pipeline.intake.rows import Request
from batch_pipeline.intake.rules import Rules
from batch_pipeline.models import Model
from batch_pipeline.settings import Settings, load
from batch_pipeline.worker.outcome import salted
from tests.fakes import intake_files
from tests.fakes.small_model import NAME, small_settings, write_model

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "security.md"
USER = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": NAME, "messages": [USER]},
    COMPLETIONS: {"model": NAME, "prompt": "hi"},
    EMBEDDINGS: {"model": "embedder", "input": "hi"},
    MESSAGES: {"model": NAME, "messages": [USER], "max_tokens": 5},
    RESPONSES: {"model": NAME, "input": "hi"},
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Settings with one model for texts and one for embeddings."""
    return small_settings(write_model(tmp_path_factory.mktemp("model")))


def with_hosts(settings: Settings, *hosts: str) -> Settings:
    """The settings with a model that may fetch from these hosts."""
    model = msgspec.structs.replace(settings.models[NAME], allowed_media_hosts=list(hosts))
    return msgspec.structs.replace(settings, models={**settings.models, NAME: model})


def line_of(endpoint: str, body: bytes) -> bytes:
    """A line with this body."""
    return b'{"custom_id":"a","method":"POST","url":"%s","body":%s}' % (endpoint.encode(), body)


def check(body: dict[str, Any] | bytes, settings: Settings, endpoint: str = CHAT) -> Request | LineProblem:
    """What a line is whose body has these fields beside the required ones, or these bytes."""
    raw = body if isinstance(body, bytes) else json.dumps({**BODIES[endpoint], **body}).encode()
    checked = intake_files.check(Block(0, 0, line_of(endpoint, raw)), Rules(settings, endpoint))
    (only,) = [*checked.requests, *checked.problems]
    return only


def message_of(found: Request | LineProblem) -> str:
    """The message of a line that must be refused."""
    assert isinstance(found, LineProblem), found
    assert found.code == "invalid_request"
    assert found.message.isprintable()
    return found.message


def sent(body: dict[str, Any], settings: Settings, endpoint: str = CHAT) -> dict[str, Any]:
    """What the engine gets of a body."""
    raw = json.dumps({**BODIES[endpoint], **body}).encode()
    found = check(raw, settings, endpoint)
    assert isinstance(found, Request), found
    decoded: dict[str, Any] = json.loads(forwarded(raw, endpoint) if found.rewrite else raw)
    return decoded


def documented(endpoint: str) -> dict[str, str]:
    """What docs/security.md says of each field: passed, taken out, refused."""
    column = {CHAT: 1, COMPLETIONS: 2, EMBEDDINGS: 3, MESSAGES: 4, RESPONSES: 5}[endpoint]
    fields = {}
    for row in re.findall(r"^\| (`.*) \|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE):
        cells = [cell.strip() for cell in row.split("|")]
        for field in re.findall(r"`([a-z_]+)`", cells[0]):
            if cells[column] != "-":
                fields[field] = cells[column]
    return fields


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES])
def test_every_field_of_the_installed_vllm_is_decided_and_documented(endpoint: str) -> None:
    protocol = {
        CHAT: ("vllm.entrypoints.openai.chat_completion.protocol", "ChatCompletionRequest"),
        COMPLETIONS: ("vllm.entrypoints.openai.completion.protocol", "CompletionRequest"),
        EMBEDDINGS: ("vllm.entrypoints.pooling.embed.protocol", "EmbeddingCompletionRequest"),
        MESSAGES: ("vllm.entrypoints.anthropic.protocol", "AnthropicMessagesRequest"),
        RESPONSES: ("vllm.entrypoints.openai.responses.protocol", "ResponsesRequest"),
    }[endpoint]
    fields = set(getattr(pytest.importorskip(protocol[0]), protocol[1]).model_fields)
    says = documented(endpoint)
    assert fields <= says.keys(), fields - says.keys()
    for field in fields:
        kept = field in FORWARDED[endpoint]
        refused = field in REFUSED or (endpoint == RESPONSES and field in STATEFUL)
        assert says[field] == ("refused" if kept and refused else "passed" if kept else "taken out"), field


@pytest.mark.parametrize(
    "field",
    [
        *("priority", "request_id", "kv_transfer_params", "ec_transfer_params", "cache_salt", "session_id"),
        *("stream_options", "mm_payload", "a_field_of_tomorrow", "mcp_servers", "store"),
    ],
)
@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES])
def test_fields_that_are_not_the_customers_never_reach_an_engine(field: str, endpoint: str, settings: Settings) -> None:
    for value in (-5, "text", {"host": "10.0.0.1"}, [1]):
        assert sent({field: value}, settings, endpoint) == BODIES[endpoint]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"chat_template": "{% for i in range(10**9) %}x{% endfor %}"}, "chat_template"),
        ({"vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs"),
        ({"logits_processors": ["os.system"]}, "logits_processors"),
        ({"mm_processor_kwargs": {"num_crops": 10**9}}, "mm_processor_kwargs"),
        ({"media_io_kwargs": {"video": {"num_frames": 10**9}}}, "media_io_kwargs"),
        ({"prompt_embeds": "gASV"}, "prompt_embeds"),
        ({"chat_template_kwargs": {"chat_template": "{{ x }}"}}, "chat_template"),
        ({"chat_template_kwargs": {"messages": "x"}}, "messages"),
        ({"chat_template_kwargs": {"tools": None}}, "tools"),
        ({"chat_template_kwargs": {"x": [[1]]}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": "y" * 2000}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {f"x{i}": 1 for i in range(40)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ({"bad_words": ["x"] * 300}, "bad_words"),
        ({"stop": ["x"] * 300}, "stop"),
        ({"stop_token_ids": [1] * 2000}, "stop_token_ids"),
        ({"logprob_token_ids": list(range(1000))}, "logprob_token_ids"),
        ({"repetition_detection": {"max_pattern_size": 10**9, "min_count": 2}}, "repetition_detection"),
    ],
)
def test_fields_that_run_code_or_load_the_engine_are_refused_by_name(
    body: dict[str, Any], field: str, settings: Settings
) -> None:
    assert field in message_of(check(body, settings))


def test_a_field_that_is_refused_cannot_be_hidden(settings: Settings) -> None:
    start = json.dumps(BODIES[CHAT]).encode()[:-1]
    for hidden in (
        b'"chat\\u005ftemplate":"{{1}}"',
        b'"chat_template":null,"chat_template":"{{1}}"',
        b'"x":1,"chat_template":"{{1}}"',
        b'"chat_template":"{{1}}","x":{"chat_template":null}',
    ):
        assert "chat_template" in message_of(check(start + b"," + hidden + b"}", settings))
    found = check(start + b',"prio\\u0072ity":-5}', settings)
    assert isinstance(found, Request)
    assert found.rewrite
    assert json.loads(forwarded(start + b',"prio\\u0072ity":-5}', CHAT)) == BODIES[CHAT]


def test_embeddings_take_texts_and_no_conversations(settings: Settings) -> None:
    for body in ({"messages": [USER]}, {"input": [USER]}, {"input": [[USER]]}, {"chat_template": "x"}):
        assert isinstance(check(body, settings, EMBEDDINGS), LineProblem)


def part(url: object, kind: str = "image_url") -> dict[str, Any]:
    """A conversation with one image, audio or video."""
    return {"messages": [{"role": "user", "content": [{"type": kind, kind: {"url": url}}]}]}


@pytest.mark.parametrize("kind", ["image_url", "audio_url", "video_url"])
@pytest.mark.parametrize(
    "url",
    [
        *("http://169.254.169.254/latest/meta-data/", "http://localhost:8433/", "https://example.com/x.png"),
        *("file:///etc/passwd", "data:image/png;base64,AAAA", "ftp://h/x", "//h/x", "", "gopher://h"),
    ],
)
def test_by_default_nothing_is_fetched(kind: str, url: str, settings: Settings) -> None:
    assert "texts only" in message_of(check(part(url, kind), settings))


@pytest.mark.parametrize(
    "content",
    [
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "file", "file": {"file_id": "f"}},
        {"type": "file", "file": {"file_data": "data:..."}},
        {"type": "input_image", "image_url": "http://h/x"},
        {"type": "image_embeds", "image_embeds": "gASV"},
        {"type": "audio_embeds", "audio_embeds": "gASV"},
        {"type": "prompt_embeds", "data": "gASV"},
        {"type": "image_pil", "image_pil": "x"},
        {"type": "tool_reference", "name": "x"},
        {"type": "text", "text": "x", "image_url": {"url": "http://h/x"}},
        {"type": "text", "text": "x", "uuid": "1", "image_url": "http://h/x"},
        {"image_url": "http://h/x"},
        [{"type": "image_url", "image_url": {"url": "http://h/x"}}],
    ],
)
@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
def test_no_part_brings_media_in_by_another_way(content: object, role: str, settings: Settings) -> None:
    body = {"messages": [USER, {"role": role, "content": [content]}]}
    assert "body.messages[1]" in message_of(check(body, settings))


GOOD_URLS = [
    *("https://media.example.com/a/b.png", "http://media.example.com", "https://MEDIA.example.com/?q=a%20b#c"),
    *("https://media.example.com:8443/x",),
]
BAD_URLS = [
    *("https://example.com/x", "https://media.example.com.evil.org/", "https://evil.org/media.example.com"),
    *("https://media.example.com@evil.org/", "https://evil.org@media.example.com/", "https://media.example.com:80/"),
    *("https://media.example.com\\@evil.org/", "https://media.example.com\\.evil.org/", "https:media.example.com/x"),
    *("https://media.example.com\t/x", "https://media.example.com /x", " https://media.example.com/x"),
    *(
        "https://media.example.com\n/x",
        "https://mediа.example.com/x",
        "https://[::1]/",
        "https://media.example.com:8443x/",
    ),
    *("HTTPS://media.example.com.", "file://media.example.com/etc/passwd", "https:///media.example.com/x"),
    *("https://media.example.com/" + "x" * 3000, "https://media.example.com/\u202e"),
    *("data:image/png;base64,AAAA", "DATA:,x"),
]


@pytest.mark.parametrize("url", GOOD_URLS)
def test_allowed_hosts_are_fetched_from(url: str, settings: Settings) -> None:
    allowing = with_hosts(settings, "media.example.com", "media.example.com:8443")
    assert isinstance(check(part(url), allowing), Request)


@pytest.mark.parametrize("url", BAD_URLS, ids=range(len(BAD_URLS)))
def test_nothing_else_is_fetched_however_it_is_written(url: str, settings: Settings) -> None:
    allowing = with_hosts(settings, "media.example.com", "media.example.com:8443")
    assert "body.messages[0].content" in message_of(check(part(url), allowing))


def test_media_in_the_request_itself_have_to_be_allowed_too(settings: Settings) -> None:
    audio = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    bodies = (part("data:image/png;base64,AAAA"), {"messages": [{"role": "user", "content": [audio]}]})
    for body in bodies:
        assert isinstance(check(body, with_hosts(settings, "data:")), Request)
        assert "may not stand in the request" in message_of(check(body, with_hosts(settings, "media.example.com")))


def test_the_engine_that_is_started_here_is_held_to_the_same_hosts(tmp_path: Path) -> None:
    for hosts, expected in (([], ["none.invalid"]), (["b.org:8443", "a.org", "data:"], ["a.org", "b.org"])):
        command = vllm_command("m", Model(source=str(tmp_path), context_length=8, allowed_media_hosts=hosts), 1)
        start = command.index("--allowed-media-domains") + 1
        assert command[start : start + len(expected) + 1] == [*expected, "--host"]
    assert ENVIRONMENT["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0"


@pytest.mark.parametrize("host", ["*", "https://a.org", "A.org", "a.org/", "a b", "", "[::1]", "user@a.org"])
def test_a_host_that_could_mean_more_than_it_says_is_no_configuration(host: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f'[models.m]\nsource = "x"\ncontext_length = 8\nallowed_media_hosts = ["{host}"]\n')
    with pytest.raises(SettingsError, match="allowed_media_hosts"):
        load(file, environment={})


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("abc", 3),
        (r"\d{4}-\d{2}-\d{2}", 10),
        ("[a-z]{1,64}@[a-z]{1,255}", 320),
        ("(ab){3}c", 7),
        ("((a{10}){10}){10}", 1000),
        ("(a|b)*", 4),
        (r"\{5\}", 3),
        ("[]{5}]{2}", 2),
        ("a{", 2),
        ("{,}", 0),
    ],
)
def test_a_pattern_counts_as_often_as_it_repeats(pattern: str, size: int) -> None:
    assert grammars.expanded(pattern) == size


BOMB = "((((a{1,99}){1,99}){1,99}){1,99}){1,99}"


@pytest.mark.parametrize(
    "body",
    [
        {"structured_outputs": {"regex": BOMB}},
        {"structured_outputs": {"regex": "a{1,999999999999999999999}"}},
        {"structured_outputs": {"regex": "(" * 4000 + "a" + "){2}" * 4000}},
        {"structured_outputs": {"regex": "x" * 5000}},
        {"structured_outputs": {"json": json.dumps({"type": "string", "pattern": BOMB})}},
        {"structured_outputs": {"json": {"type": "string", "pattern": BOMB}}},
        {"structured_outputs": {"grammar": f"root ::= {BOMB}"}},
        {"structured_outputs": {"structural_tag": json.dumps({"format": {"type": "regex", "pattern": BOMB}})}},
        {"guided_regex": BOMB},
        {"guided_json": {"type": "array", "maxItems": 10**9}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "string", "maxLength": 10**9}},
            }
        },
        {"tools": [{"function": {"parameters": {"type": "array", "minItems": 10**12}}}], "tool_choice": "required"},
        {"response_format": {"x": {f"p{i}": 1 for i in range(5000)}}},
    ],
    ids=range(13),
)
@pytest.mark.parametrize("filler", ["", "a"])
def test_grammars_of_catastrophic_size_are_refused_before_an_engine_compiles_them(
    body: dict[str, Any], filler: str, settings: Settings
) -> None:
    (field,) = {"body." + name for name in body if name != "tool_choice"}
    assert field in message_of(check({**body, "user": filler}, settings))


def test_ordinary_schemas_and_patterns_pass(settings: Settings) -> None:
    schema = {
        "type": "object",
        "properties": {
            "email": {"type": "string", "pattern": r"^[^@\s]{1,64}@[^@\s]{1,255}$"},
            "tags": {"type": "array", "maxItems": 20, "items": {"type": "string", "maxLength": 40}},
            "pattern": {"type": "string"},
        },
    }
    for body in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"structured_outputs": {"json": schema}},
        {"structured_outputs": {"regex": r"(\+\d{1,3})?\d{4,14}"}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"tools": [{"function": {"name": "f", "parameters": schema}}], "tool_choice": "required"},
        {"chat_template_kwargs": {"enable_thinking": False, "budget": 5, "style": "short"}},
    ):
        assert isinstance(check(body, settings), Request), body


def test_customers_do_not_share_a_prefix_cache() -> None:
    plain = b'{"model":"m","messages":[]} '
    one, same, other = salted(plain, "acme"), salted(plain, "acme"), salted(plain, "bolt")
    assert one == same != other
    body = json.loads(one)
    assert re.fullmatch(r"[0-9a-f]{32}", body.pop("cache_salt"))
    assert body == json.loads(plain)
    assert json.loads(salted(b"{}", "acme")).keys() == {"cache_salt"}
