"""The shorter way inside vLLM's server, with a small server and its handler; the real ones: test_engine_real.py."""

from __future__ import annotations

import asyncio
from typing import Any

import pydantic
import pytest
from starlette.datastructures import State
from starlette.types import Message, Receive, Scope, Send

from batch_pipeline.engine import shortcut

CHAT = "/v1/chat/completions"
JSON = (b"content-type", b"application/json")
HEADERS = [(b"host", b"127.0.0.1"), JSON]
BODY = b'{"words": "hello"}'


class Question(pydantic.BaseModel):
    words: str
    stream: bool = False

    @pydantic.field_validator("words")
    @classmethod
    def _has_words(cls, words: str) -> str:
        if not words:
            raise RuntimeError("vLLM's own kind of error, which is no ValueError")
        return words


class Answer(pydantic.BaseModel):
    words: str


class Refused(pydantic.BaseModel):
    class Error(pydantic.BaseModel):
        code: int

    error: Error


class Handler:
    """What vLLM's handlers are to the middleware."""

    def __init__(self) -> None:
        self.priorities: list[str | None] = []
        self.begun = asyncio.Event()
        self.aborted = False

    async def create_chat_completion(self, request: Question, raw: Any) -> Answer | Refused:
        self.priorities.append(raw.headers.get("X-Vllm-Priority"))
        if request.words == "wrong":
            raise ValueError("wrong")
        if request.words == "too long":
            return Refused(error=Refused.Error(code=400))
        if request.words == "slow":
            self.begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.aborted = True
                raise
        return Answer(words=request.words)


class Server:
    """An application with the middleware before it; it keeps the bodies that come through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **args: Any) -> None:
        way = shortcut._Way(Question, "openai_serving_chat", "create_chat_completion")
        monkeypatch.setattr(shortcut, "_ways", lambda: {CHAT: way})
        self.handler = Handler()
        self.came_through: list[bytes] = []
        self.state = State()
        self.state.args = State({"api_key": None, "enable_request_id_headers": False, **args})
        self.state.openai_serving_chat = self.handler
        self._middleware = shortcut.Shortcut(self._app)

    async def _app(self, _scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body"):
                break
        self.came_through.append(body)
        await send({"type": "http.response.start", "status": 299, "headers": []})

    async def ask(
        self, body: bytes = BODY, *, gone: asyncio.Event | None = None, whole: bool = True, **changes: Any
    ) -> list[Message]:
        """Return what is sent for a request; its client goes when `gone` is set, or within the body."""
        scope = {
            "type": "http",
            "method": "POST",
            "path": CHAT,
            "query_string": b"",
            "headers": HEADERS,
            "app": self,
            **changes,
        }
        half = len(body) // 2
        to_come: list[Message] = [{"type": "http.request", "body": body[:half], "more_body": True}]
        if whole:
            to_come.append({"type": "http.request", "body": body[half:]})
        sent: list[Message] = []

        async def receive() -> Message:
            if to_come:
                return to_come.pop(0)
            if whole:
                await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        await self._middleware(scope, receive, send)
        return sent


def test_a_plain_request_is_answered_by_the_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch)
    start, body = asyncio.run(server.ask(headers=[*HEADERS, (b"x-vllm-priority", b"5")]))
    assert (start["status"], body["body"]) == (200, b'{"words":"hello"}')
    assert dict(start["headers"])[b"content-length"] == b"17"
    assert (server.handler.priorities, server.came_through) == (["5"], [])


def test_what_the_handler_refuses_has_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    start, body = asyncio.run(Server(monkeypatch).ask(b'{"words": "too long"}'))
    assert (start["status"], body["body"]) == (400, b'{"error":{"code":400}}')


@pytest.mark.parametrize(
    "changes",
    [
        {"path": "/v1/models"},
        {"method": "GET"},
        {"query_string": b"a=1"},
        {"headers": [(b"content-type", b"text/plain")]},
        {"headers": [*HEADERS, (b"authorization", b"Bearer x")]},
        {"body": b'{"words": "hello", "stream": true}'},
        {"body": b'{"words": "\xff"}'},
        {"body": b"[]"},
        {"body": b'{"words": ""}'},
        {"body": b'{"words": "wrong"}'},
        {"body": b""},
    ],
    ids=str,
)
def test_anything_else_is_left_to_the_server_whole(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch)
    (start,) = asyncio.run(server.ask(**changes))
    assert start["status"] == 299
    assert server.came_through == [changes.get("body", BODY)]


@pytest.mark.parametrize("args", [{"api_key": ["secret"]}, {"enable_request_id_headers": True}], ids=str)
def test_a_server_that_asks_for_more_answers_everything_itself(
    args: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(monkeypatch, **args)
    (start,) = asyncio.run(server.ask())
    assert (start["status"], server.handler.priorities) == (299, [])


def test_a_vllm_with_its_handlers_elsewhere_answers_everything_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shortcut, "_PROTOCOLS", "no_such_vllm.{0}")
    assert shortcut._ways() == {}
    assert "every request goes its own" in caplog.text


def test_a_request_whose_client_goes_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch)

    async def go_away() -> list[Message]:
        gone = asyncio.Event()
        asking = asyncio.create_task(server.ask(b'{"words": "slow"}', gone=gone))
        await server.handler.begun.wait()
        gone.set()
        return await asking

    assert asyncio.run(go_away()) == []
    assert server.handler.aborted
    assert server.came_through == []


def test_a_client_that_goes_within_its_body_begins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch)
    assert asyncio.run(server.ask(whole=False)) == []
    assert (server.handler.priorities, server.came_through) == ([], [])
