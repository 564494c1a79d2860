"""An engine without a model: OpenAI's protocol as vLLM speaks it, answers that follow from the prompt, faults on order.

As a program, in a process of its own that can be killed (all options of it are optional):

    python tests/fakes/engine.py --port 8000 --model m --delay 0.01 --journal calls.txt

Faults that one request brings along stand in its prompt, so that they survive a restart:

    [[die]] the process ends at once     [[hang]] no answer, ever      [[slow:0.5]] an answer after so many seconds
    [[400]] [[500]] [[503]] ...          that status, always           [[reset]]    the connection is closed without one
    [[failed]]                           a response (/v1/responses) with status 200 that says that it failed

Faults of the whole engine are set through `POST /fake/control`, a `Control`; `GET /fake/stats` tells what it saw.
The journal gets one line, the prompt's last line, for each request that arrives, before anything else happens. It is
a file, or tcp://HOST:PORT where it is kept by somebody else.
`tests/integration/test_engine_real.py` holds it against the real vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import http.client
import os
import re
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import msgspec
from aiohttp import web

MODEL = "smollm2-135m"
CONTEXT = 2048
VERSION = "0.32.0"
_EMPTY_IN_CHOICES = ("logprobs", "stop_reason", "token_ids", "routed_experts")
_EMPTY_IN_MESSAGES = ("refusal", "annotations", "audio", "function_call", "reasoning")
STARVED_SECONDS = 10.0
"""After so long without new requests, an engine that wants more of them has been starved."""
_DIRECTIVE = re.compile(r"\[\[([a-z0-9]+)(?::([0-9.]+))?\]\]")
_MESSAGES = "/v1/messages"
_RESPONSES = "/v1/responses"
_ENDPOINTS = {
    "/v1/chat/completions": "chatcmpl",
    "/v1/completions": "cmpl",
    _MESSAGES: "chatcmpl",
    _RESPONSES: "resp",
}
_EMPTY_IN_RESPONSES = (
    *("max_tool_calls", "previous_response_id", "prompt", "reasoning", "text", "top_logprobs", "user"),
    *("kv_transfer_params", "ec_transfer_params", "input_messages", "output_messages"),
)


class Control(msgspec.Struct, forbid_unknown_fields=True):
    """Faults of the whole engine; what is left out is ended."""

    refuse_status: int = 0
    """Answer this status to every request, 0 for none."""
    refuse_calls: int = -1
    """So many times, then answer again; -1 for until told otherwise."""
    refuse_seconds: float = 0.0
    """For so long; 0 for until told otherwise."""
    retry_after: str = ""
    health_status: int = 200
    delay_seconds: float | None = None
    """Time that each answer takes from now on; null leaves it as it is."""
    hold_after: int = -1
    """Keep all calls waiting that come after so many since the start, until told otherwise; -1 for none. What is in
    flight then does not hang on who was scheduled first."""
    live_running: int = 0
    """Live requests of others that run, as its metrics tell it; and those that wait."""
    live_waiting: int = 0
    kv_cache_usage: float = 0.0
    live_seconds: float = 0.0
    """How much longer each live request takes: one without a priority."""
    batch_seconds: float = 0.0
    """How much longer each batch request takes: one with a priority."""
    live_seconds_each: float = 0.0
    """And a live one for each batch request that is in flight when it comes."""
    metrics_status: int = 200
    takes_priority: bool = True


class Stats(msgspec.Struct):
    """What the engine saw since its start."""

    calls: int = 0
    answered: int = 0
    in_flight: int = 0
    max_in_flight: int = 0
    batch_in_flight: int = 0
    """Of those in flight, the ones with a priority behind live requests."""
    max_batch_in_flight: int = 0
    abandoned: int = 0
    """Requests whose client went away before the answer."""
    live_calls: int = 0
    connections: int = 0
    """That requests have come on."""
    starved: int = 0
    """How often it waited in vain for more requests (see `--want`)."""


class FakeEngine:
    """The server's state and its answers."""

    def __init__(self, options: argparse.Namespace, journal: TextIO | None) -> None:
        self._model = options.model
        self._delay_seconds = options.delay
        self._spread = options.spread
        self._best = options.best
        self._want = options.want
        self._want_until = options.want_until
        self._waiting: deque[asyncio.Event] = deque()
        self._journal = journal
        self._control = Control(hold_after=options.hold_after)
        self._control_until = float("inf")
        self._was_told = asyncio.Event()
        """Set, and replaced, whenever faults are set."""
        self._stats = Stats()
        self._peers: set[Any] = set()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one HTTP request."""
        if request.path in _ENDPOINTS:
            return await self._complete(request.path, request)
        if request.path == "/fake/control":
            self._set(msgspec.json.decode(await request.read(), type=Control))
        card = {"id": self._model, "object": "model", "max_model_len": CONTEXT, "owned_by": "vllm"}
        answers: dict[str, Any] = {
            "/version": {"version": VERSION},
            "/v1/models": {"object": "list", "data": [card]},
            "/fake/stats": self._stats,
            "/fake/control": {},
        }
        if request.path == "/health":
            return web.Response(status=self._control.health_status)
        if request.path == "/metrics":
            return web.Response(status=self._control.metrics_status, text=self._metrics())
        if request.path not in answers:
            return _json({"detail": "Not Found"}, 404)
        return _json(answers[request.path])

    def _set(self, control: Control) -> None:
        self._control = control
        self._was_told.set()
        self._was_told = asyncio.Event()
        self._control_until = time.monotonic() + control.refuse_seconds if control.refuse_seconds else float("inf")
        if control.delay_seconds is not None:
            self._delay_seconds = control.delay_seconds

    async def _complete(self, path: str, request: web.BaseRequest) -> web.StreamResponse:
        stats = self._stats
        stats.calls += 1
        call = stats.calls
        self._peers.add(request.transport and request.transport.get_extra_info("peername"))
        stats.connections = len(self._peers)
        stats.in_flight += 1
        stats.max_in_flight = max(stats.max_in_flight, stats.in_flight)
        is_batch = int(request.headers.get("X-Vllm-Priority", "0")) > 0
        stats.live_calls += not is_batch
        stats.batch_in_flight += is_batch
        stats.max_batch_in_flight = max(stats.max_batch_in_flight, stats.batch_in_flight)
        try:
            await self._crowd()
            if is_batch and not self._control.takes_priority:
                return _error(400, "Got priority 100 but Priority scheduling is not enabled.", path=path)
            control = self._control
            slower = control.live_seconds + control.live_seconds_each * stats.batch_in_flight
            slower = control.batch_seconds if is_batch else slower
            if slower:
                await asyncio.sleep(slower)
            response = await self._answer(path, request, await request.read(), call)
            stats.answered += 1
            return response
        except asyncio.CancelledError:
            stats.abandoned += 1
            raise
        finally:
            stats.in_flight -= 1
            stats.batch_in_flight -= is_batch

    def _metrics(self) -> str:
        """Return what vLLM tells about its load, as the governor reads it."""
        control = self._control
        figures = {
            "vllm:num_requests_running": self._stats.in_flight + control.live_running,
            "vllm:num_requests_waiting": control.live_waiting,
            "vllm:kv_cache_usage_perc": control.kv_cache_usage,
            "vllm:num_preemptions_total": 0,
        }
        labels = f'engine="0",model_name="{self._model}"'
        return "".join(f"{name}{{{labels}}} {float(value)}\n" for name, value in figures.items())

    async def _crowd(self) -> None:
        """Hold requests back until `want` of them are in flight; then let one go for each that arrives."""
        if not self._want:
            return
        if self._stats.calls > self._want_until:
            self._want = 0
            while self._waiting:
                self._waiting.popleft().set()
            return
        mine = asyncio.Event()
        self._waiting.append(mine)
        if self._stats.in_flight >= self._want:
            self._waiting.popleft().set()
        try:
            await asyncio.wait_for(mine.wait(), STARVED_SECONDS)
        except TimeoutError:
            self._stats.starved += 1
        finally:
            if mine in self._waiting:
                self._waiting.remove(mine)

    async def _answer(self, path: str, request: web.BaseRequest, raw: bytes, call: int) -> web.StreamResponse:
        try:
            body = msgspec.json.decode(raw)
        except msgspec.DecodeError as error:
            return _error(400, f"There was an error parsing the body: {error}")
        prompt = _prompt(path, body)
        if self._journal is not None:
            self._journal.write(prompt.rpartition("\n")[2] + "\n")
            self._journal.flush()
        while 0 <= self._control.hold_after < call:
            await self._was_told.wait()
        if (refusal := self._refusal()) is not None:
            return refusal
        problem = _problem(path, body, self._model)
        if problem is not None:
            return problem
        for word, number in _DIRECTIVE.findall(prompt):
            if word == "die":
                os._exit(1)
            elif word == "hang":
                await asyncio.Event().wait()
            elif word == "slow":
                await asyncio.sleep(float(number))
            elif word == "reset" and request.transport is not None:
                request.transport.abort()
            elif word.isdigit():
                return _error(int(word), f"asked for by the prompt: {word}", path=path)
        if self._delay_seconds:
            await asyncio.sleep(self._delay_seconds * self._crowding() * (1 + self._spread * _share(prompt)))
        make = {_MESSAGES: _message, _RESPONSES: _response}.get(path, _completion)
        return make(path, body, prompt, self._model)

    def _crowding(self) -> float:
        """Return how many times longer an answer takes than in an engine that is not too full."""
        return max(1.0, self._stats.in_flight / self._best) ** 1.5 if self._best else 1.0

    def _refusal(self) -> web.StreamResponse | None:
        control = self._control
        if not control.refuse_status or control.refuse_calls == 0 or time.monotonic() > self._control_until:
            return None
        control.refuse_calls -= control.refuse_calls > 0
        response = _error(control.refuse_status, "the engine is overloaded")
        if control.retry_after:
            response.headers["Retry-After"] = control.retry_after
        return response


def _prompt(path: str, body: Any) -> str:
    if not isinstance(body, dict):
        return ""
    if path == "/v1/completions":
        return str(body.get("prompt", ""))
    messages = body.get("input" if path == _RESPONSES else "messages")
    if path == _RESPONSES and isinstance(messages, str):
        return messages
    if not isinstance(messages, list):
        return ""
    return "\n".join(str(message.get("content", "")) for message in messages if isinstance(message, dict))


def _share(prompt: str) -> float:
    """Return a number from 0 to 1 that follows from the prompt."""
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=2).digest()) / 65535


def _problem(path: str, body: Any, model: str) -> web.Response | None:
    """Return the answer to a body that vLLM refuses, as far as tests need it."""
    if not isinstance(body, dict):
        return _error(400, "Input should be a valid dictionary")
    wanted = body.get("max_tokens", body.get("max_completion_tokens", body.get("max_output_tokens", 16)))
    temperature = body.get("temperature", 1.0)
    if path in ("/v1/chat/completions", _MESSAGES) and not isinstance(body.get("messages"), list):
        return _error(400, "messages: Field required")
    missing = {
        "input: Field required": path == _RESPONSES
        and not (body.get("input") and isinstance(body["input"], str | list)),
        "Either prompt or prompt_embeds must be provided and non-empty.": path == "/v1/completions"
        and "prompt" not in body,
        "max_tokens: Field required, and positive": path == _MESSAGES
        and not (isinstance(body.get("max_tokens"), int) and body["max_tokens"] > 0),
    }
    if any(missing.values()):
        return _error(400, next(message for message, is_so in missing.items() if is_so))
    if body.get("model", model) != model:
        said = f"The model `{body['model']}` does not exist."
        return _error(404, said, kind="NotFoundError", param="model", path=path)
    problems = {
        f"temperature must be non-negative, got {temperature}.": not isinstance(temperature, int | float)
        or temperature < 0,
        f"max_tokens must be at least 1, got {wanted}.": not isinstance(wanted, int) or wanted < 1,
        f"This model's maximum context length is {CONTEXT} tokens.": isinstance(wanted, int)
        and wanted + len(_prompt(path, body).split()) > CONTEXT,
    }
    found = [message for message, is_so in problems.items() if is_so]
    return _error(400, found[0], path=path) if found else None


def _completion(path: str, body: dict[str, Any], prompt: str, model: str) -> web.Response:
    digest = hashlib.sha256(prompt.encode()).hexdigest()
    text = f"The answer is {digest[:12]}."
    count = body.get("n") or 1
    given, made = len(prompt.split()) + 4, 6 * count
    details = {"cached_tokens": given // 2, "created_cache_tokens": 0, "multimodal_tokens": None}
    answer: dict[str, Any] = {
        "id": f"{_ENDPOINTS[path]}-{digest[:16]}",
        "created": int(time.time()),
        "model": model,
        "service_tier": None,
        "system_fingerprint": f"vllm-{VERSION}-fake",
        "usage": {
            "prompt_tokens": given,
            "total_tokens": given + made,
            "completion_tokens": made,
            "prompt_tokens_details": details,
            "completion_tokens_details": None,
        },
        **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "metrics")),
    }
    choices: list[dict[str, Any]] = [
        {"index": index, "finish_reason": "stop", **dict.fromkeys(_EMPTY_IN_CHOICES)} for index in range(count)
    ]
    if path == "/v1/chat/completions":
        answer |= {"object": "chat.completion", **dict.fromkeys(("prompt_logprobs", "prompt_token_ids", "prompt_text"))}
        for choice in choices:
            choice["message"] = {"role": "assistant", "content": text, **dict.fromkeys(_EMPTY_IN_MESSAGES)}
    else:
        answer["object"] = "text_completion"
        for choice in choices:
            choice |= {"text": text, "prompt_logprobs": None, "prompt_token_ids": None}
    return _json({**answer, "choices": choices})


def _message(path: str, body: dict[str, Any], prompt: str, model: str) -> web.Response:
    """Return the answer of Anthropic's endpoint: fields without a value are left out."""
    digest = hashlib.sha256(prompt.encode()).hexdigest()
    given = len(prompt.split()) + 4
    return _json(
        {
            "id": f"{_ENDPOINTS[path]}-{digest[:16]}",
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": f"The answer is {digest[:12]}."}],
            "model": model,
            "stop_reason": "max_tokens" if body["max_tokens"] < 6 else "end_turn",
            "usage": {
                "input_tokens": given - given // 2,
                "output_tokens": 6,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": given // 2,
            },
        }
    )


def _response(path: str, body: dict[str, Any], prompt: str, model: str) -> web.Response:
    """Return the answer of OpenAI's endpoint of responses."""
    digest = hashlib.sha256(prompt.encode()).hexdigest()
    given, made = len(prompt.split()) + 4, 6
    most = body.get("max_output_tokens") or CONTEXT - given
    is_cut = most < made
    text = {"annotations": [], "text": f"The answer is {digest[:12]}.", "type": "output_text", "logprobs": None}
    message = {"id": f"msg_{digest[:16]}", "content": [text], "role": "assistant", "status": "completed"}
    return _json(
        {
            **dict.fromkeys(_EMPTY_IN_RESPONSES),
            "id": f"{_ENDPOINTS[path]}_{digest[:16]}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "failed" if "[[failed]]" in prompt else "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata"),
            "model": model,
            "output": [{**message, "type": "message", "phase": None}],
            "usage": {
                "input_tokens": given,
                "input_tokens_details": {
                    "cached_tokens": given // 2,
                    "cache_write_tokens": 0,
                    "input_tokens_per_turn": [],
                    "cached_tokens_per_turn": [],
                },
                "output_tokens": made,
                "output_tokens_details": {
                    "reasoning_tokens": 0,
                    "tool_output_tokens": 0,
                    "output_tokens_per_turn": [],
                    "tool_output_tokens_per_turn": [],
                },
                "total_tokens": given + made,
            },
            "parallel_tool_calls": True,
            "tool_choice": "none",
            "tools": [],
            "temperature": 1.0,
            "top_p": 1.0,
            "background": False,
            "max_output_tokens": most,
            "service_tier": "auto",
            "truncation": "disabled",
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }
    )


def _json(content: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), status=status, content_type="application/json")


def _error(
    status: int, message: str, kind: str = "BadRequestError", param: str | None = None, path: str = ""
) -> web.Response:
    # vLLM answers at /v1/messages as Anthropic does, but for bodies that are none of its requests.
    if path == _MESSAGES:
        return _json({"type": "error", "error": {"type": kind, "message": message}}, status)
    return _json({"error": {"message": message, "type": kind, "param": param, "code": status}}, status)


class RunningFake:
    """A fake engine in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process = process
        self.url = url

    def stats(self) -> Stats:
        """Return what it saw so far."""
        return msgspec.json.decode(self._call("GET", "/fake/stats"), type=Stats)

    def control(self, **faults: Any) -> None:
        """Set faults of the whole engine; without any, end them."""
        self._call("POST", "/fake/control", msgspec.json.encode(Control(**faults)))

    def _call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=10)
        try:
            connection.request(method, path, body)
            return connection.getresponse().read()
        finally:
            connection.close()


def command(port: int, *options: str) -> list[str]:
    """Return the command that runs a fake engine on a port."""
    return [sys.executable, str(Path(__file__).resolve()), "--port", str(port), *options]


@contextmanager
def running(*options: str) -> Iterator[RunningFake]:
    """A fake engine on a free port, ready; killed at the end."""
    with subprocess.Popen(command(0, *options), stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield RunningFake(process, process.stdout.readline().decode().strip())
        finally:
            process.kill()


def _opened(journal: str) -> TextIO:
    """Open a journal for writing."""
    if journal.startswith("tcp://"):
        host, _, port = journal.removeprefix("tcp://").rpartition(":")
        return socket.create_connection((host, int(port))).makefile("w", encoding="utf-8")
    return Path(journal).open("a", encoding="utf-8")


async def _serve(options: argparse.Namespace) -> None:
    with _opened(options.journal or os.devnull) as journal:
        engine = FakeEngine(options, journal if options.journal else None)
        runner = web.ServerRunner(web.Server(engine.handle, access_log=None, handler_cancellation=True))
        await runner.setup()
        await asyncio.sleep(options.start_seconds)
        await web.TCPSite(runner, options.host, options.port, backlog=4096).start()
        print("http://{}:{}".format(*runner.addresses[0]), flush=True)
        await asyncio.Event().wait()


def main() -> None:
    """Run the server until it is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that each answer takes")
    parser.add_argument("--spread", type=float, default=1.0, help="largest share by which an answer takes longer")
    parser.add_argument("--best", type=int, default=0, help="requests at once with which it does most")
    parser.add_argument("--want", type=int, default=0, help="answer only while so many are in flight")
    parser.add_argument("--want-until", type=int, default=0, help="so many calls; afterwards answer anyway")
    parser.add_argument("--hold-after", type=int, default=-1, help="see Control.hold_after")
    parser.add_argument("--journal", help="a file, or tcp://HOST:PORT")
    parser.add_argument("--start-seconds", type=float, default=0.0, help="how long it takes to listen")
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
