"""Checks the lines of a file, one by one. Pure: what a line is told depends on its bytes and the rules alone.

One pass of msgspec over the envelope leaves the body raw, a second one reads the body as its endpoint has it; both
stop at whatever no JSON parser should accept. Only what they do not see is looked for here: text that is not UTF-8
(in parts that are skipped), and nesting. A line that they refuse is read again, slowly, to find out what to tell the
customer.

Which of two lines with one `custom_id` keeps it is for the whole file to say (`duplicates`).
"""

from __future__ import annotations

import unicodedata
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from batch_pipeline.intake import problems
from batch_pipeline.intake.blocks import BYTE_ORDER_MARK, Block
from batch_pipeline.intake.bodies import (
    BODIES,
    FORWARDED,
    Body,
    ChatBody,
    Conversation,
    MessagesBody,
    prompts,
)
from batch_pipeline.intake.fields import problem_of
from batch_pipeline.intake.fit import Prompt, fit
from batch_pipeline.intake.problems import LineProblem
from batch_pipeline.intake.responses import ResponsesBody
from batch_pipeline.intake.rules import Rules
from batch_pipeline.intake.values import NOTHING
from batch_pipeline.wire import codes
from batch_pipeline.wire.nesting import depth_of

PREFIX_BYTES = (64, 256, 1024, 4096)
"""Depths at which requests are compared: two that agree in so many bytes of what is rendered first share that prefix.
"""


class Request(NamedTuple):
    """A line that can be run: where its parts lie, what it shares, and its size. The columns of the request table."""

    line_index: int
    """0-based number of the line: the request's index."""
    line_offset: int
    """Where the line starts in the file."""
    line_bytes: int
    body_start: int
    """Where the body starts in the line."""
    body_bytes: int
    id_start: int
    """Where the custom_id stands in the line, letter by letter; -1 where it is only there with escapes."""
    id_bytes: int
    rewrite: bool
    """The body carries fields that must not reach the engine."""
    model: str
    prefix_64: int
    prefix_256: int
    prefix_1024: int
    prefix_4096: int
    """Hashes of so many first bytes of what is rendered first: tools, then the messages, or the prompt."""
    prompt_tokens: int
    max_tokens: int
    id_hash: int
    """Not in the table: a hash of the custom_id, to find duplicates."""


class Checked(NamedTuple):
    """What a block of lines holds: requests and problems together are its lines that are not blank."""

    requests: list[Request]
    problems: list[LineProblem]


class _Envelope(msgspec.Struct, frozen=True, gc=False):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Refused(Exception):
    """A line cannot be run."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


_envelopes = msgspec.json.Decoder(_Envelope)
_objects = msgspec.json.Decoder(dict[str, msgspec.Raw])
_bodies: dict[str, msgspec.json.Decoder[Body]] = {
    endpoint: msgspec.json.Decoder(body) for endpoint, body in BODIES.items()
}
_hash = xxhash.xxh3_64_intdigest


def check_block(block: Block, rules: Rules) -> Checked:
    """Return what the lines of a block are. Never raises for what a file holds."""
    if block.is_cut:
        problem = problems.too_long(rules.max_line_bytes)
        return Checked([], [LineProblem(block.first_line + 1, None, *problem)])
    data = block.data
    if not data.strip():
        return Checked([], [])
    is_text = _is_utf8(data)
    requests, found = [], []
    starts, ends, brackets = _outline(data)
    most, longest = rules.max_depth + 1, rules.max_line_bytes
    for number, (start, end, nesting) in enumerate(zip(starts, ends, brackets, strict=True), block.first_line):
        line = data[start:end]
        try:
            if end - start > longest:
                raise _Refused(*problems.too_long(longest))
            if not is_text:
                line.decode()
            if nesting > most and depth_of(line, most) > most:
                raise _Refused(*problems.too_deep(rules.max_depth))
            requests.append(_request(line, number, block.offset + start, rules))
        except (_Refused, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if not line.strip():
                continue
            code, message = (error.code, error.message) if isinstance(error, _Refused) else problems.not_json(error)
            custom_id = None if code == codes.LINE_TOO_LONG else readable_custom_id(line)
            found.append(LineProblem(number + 1, custom_id, code, message))
    return Checked(requests, found)


def readable_custom_id(line: bytes) -> str | None:
    """Return the custom_id of a line, or None where it cannot be read: no JSON object, or no text in it."""
    try:
        raw = _objects.decode(line.removeprefix(BYTE_ORDER_MARK)).get("custom_id")
        return None if raw is None else msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _outline(data: bytes) -> tuple[list[int], list[int], list[int]]:
    """Return where each line starts and ends, and how many brackets it opens."""
    characters = np.frombuffer(data, dtype=np.uint8)
    ends = np.flatnonzero(characters == 0x0A)
    if not data.endswith(b"\n"):
        ends = np.append(ends, len(data))
    starts = np.concatenate(([0], ends[:-1] + 1))
    opening = np.flatnonzero((characters == 0x7B) | (characters == 0x5B))
    counts = np.searchsorted(opening, ends) - np.searchsorted(opening, starts)
    return starts.tolist(), ends.tolist(), counts.tolist()


def _is_utf8(data: bytes) -> bool:
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _request(line: bytes, index: int, offset: int, rules: Rules) -> Request:
    try:
        envelope = _envelopes.decode(line)
    except msgspec.ValidationError:
        envelope = _slow_envelope(line)
    custom_id = envelope.custom_id
    if not custom_id.isprintable() or not 1 <= len(custom_id) <= rules.max_custom_id_characters:
        _check_custom_id(custom_id, rules)
    if envelope.method != "POST":
        raise _Refused(codes.INVALID_REQUEST, f'method is {problems.shown(envelope.method)} and must be "POST"')
    if envelope.url != rules.endpoint:
        raise _Refused(
            codes.URL_MISMATCH,
            f"url is {problems.shown(envelope.url)}, but this batch is for {rules.endpoint}; "
            "put requests for another endpoint into a batch of their own",
        )
    raw = bytes(envelope.body)
    rewrite = False
    try:
        body = _bodies[rules.endpoint].decode(raw)
    except msgspec.ValidationError as error:
        body, rewrite = _slow_body(raw, error, rules)
    served = rules.models.get(body.model)
    if served is None:
        raise _Refused(codes.MODEL_NOT_FOUND, rules.no_such_model(body.model))
    problem = problem_of(body, served.model)
    if problem is not None:
        raise _Refused(codes.INVALID_REQUEST, problem)
    texts = _texts(body)
    prompt_tokens, max_tokens, problem = fit(body, raw, texts, served.model, served.counter)
    if problem is not None:
        raise _Refused(codes.CONTEXT_LENGTH_EXCEEDED, problem)
    id_bytes = custom_id.encode()
    body_start = len(line) - len(raw) - 1
    if line[body_start:-1] != raw:
        body_start = line.find(raw)
    return Request(
        index,
        offset,
        len(line),
        body_start,
        len(raw),
        line.find(id_bytes),
        len(id_bytes),
        rewrite,
        body.model,
        *_prefixes(_first_rendered(body, texts)),
        prompt_tokens,
        max_tokens,
        _hash(id_bytes),
    )


def _slow_envelope(line: bytes) -> _Envelope:
    """Return the envelope of a line that the fast decoder refused, or say what is wrong with it.

    A key that is given twice counts as it was given last, whatever the first one was.
    """
    try:
        msgspec.json.decode(line)
        fields = _objects.decode(line)
    except msgspec.ValidationError as error:
        fields = _fields_of(line, error)
    texts = {}
    for name in ("custom_id", "method", "url"):
        if name not in fields:
            raise _Refused(codes.INVALID_REQUEST, f"{name} is missing; {_EXPECTED[name]}")
        try:
            texts[name] = msgspec.json.decode(fields[name], type=str)
        except msgspec.ValidationError:
            raise _Refused(codes.INVALID_REQUEST, f"{name} is not a text; {_EXPECTED[name]}") from None
    if "body" not in fields:
        raise _Refused(codes.INVALID_REQUEST, "body is missing; it must be an object with the request's parameters")
    return _Envelope(texts["custom_id"], texts["method"], texts["url"], fields["body"])


_EXPECTED = {
    "custom_id": "it must be a text of your own that names the request",
    "method": 'it must be "POST"',
    "url": "it must be the endpoint of the batch",
}


def _fields_of(line: bytes, error: msgspec.ValidationError) -> dict[str, msgspec.Raw]:
    """Return the fields of a line that has numbers out of all range; raise where it is no object."""
    try:
        return _objects.decode(line)
    except msgspec.ValidationError:
        what = str(error) if "out of range" in str(error) else "it is JSON, but not an object"
        raise _Refused(
            codes.INVALID_REQUEST, f"the line must be an object with custom_id, method, url and body: {what}"
        ) from None


def _slow_body(raw: bytes, error: msgspec.ValidationError, rules: Rules) -> tuple[Body, bool]:
    """Return a body without the fields that do not reach an engine, and whether it had any; or say what is wrong.

    A key that is given twice counts as it was given last.
    """
    decoder = _bodies[rules.endpoint]
    try:
        fields = _objects.decode(raw)
        kept = {name: value for name, value in fields.items() if name in FORWARDED[rules.endpoint]}
        raw = msgspec.json.encode(kept)
        rewrite = len(kept) < len(fields)
        try:
            return decoder.decode(raw), rewrite
        except msgspec.ValidationError as again:
            error = again
        return decoder.decode(msgspec.json.encode(msgspec.json.decode(raw))), rewrite
    except msgspec.ValidationError as again:
        said = error if "out of range" in str(again) else again
        raise _Refused(codes.INVALID_REQUEST, problems.wrong_body(said, rules.endpoint)) from None


def _check_custom_id(custom_id: str, rules: Rules) -> None:
    if not custom_id:
        raise _Refused(codes.INVALID_REQUEST, f"custom_id is empty; {_EXPECTED['custom_id']}")
    if len(custom_id) > rules.max_custom_id_characters:
        raise _Refused(
            codes.INVALID_REQUEST,
            f"custom_id has {len(custom_id)} characters, and at most {rules.max_custom_id_characters} are allowed",
        )
    if any(unicodedata.category(character) == "Cc" for character in custom_id):
        raise _Refused(codes.INVALID_REQUEST, "custom_id has a control character (such as a line feed); leave it out")


def _texts(body: Body) -> list[Prompt]:
    """Return the contents of a conversation's messages, or the prompts of another body."""
    if isinstance(body, ChatBody):
        return [m.content if m.content.__class__ is str else m.text() for m in body.messages]
    if isinstance(body, MessagesBody):
        system = body.system_text()
        return [*([system] if system else []), *(turn.text() for turn in body.messages)]
    if isinstance(body, ResponsesBody):
        return [*body.texts()]
    return prompts(body) or []


def _first_rendered(body: Body, texts: list[Prompt]) -> bytes:
    """Return the beginning of what the engine reads first: tools, then the messages in turn, or the prompt."""
    room = PREFIX_BYTES[-1]
    first = texts[0]
    if isinstance(first, list):
        return " ".join(map(str, first[:room])).encode()[:room]
    is_chat = isinstance(body, Conversation)
    if len(texts) > 1 and len(first) < room and is_chat:
        first = "\0".join([text for text in texts[:room] if isinstance(text, str)])
    beginning = first[:room].encode()[:room]
    if isinstance(body, Conversation) and body.tools is not NOTHING:
        return (bytes(body.tools)[:room] + b"\0" + beginning)[:room]
    return beginning


def _prefixes(text: bytes) -> tuple[int, int, int, int]:
    """Return a hash of the first bytes of the text for each depth; a text that ends before stands for itself."""
    first = _hash(text[:64])
    if len(text) <= 64:
        return first, first, first, first
    second = _hash(text[:256])
    if len(text) <= 256:
        return first, second, second, second
    third = _hash(text[:1024])
    return (first, second, third, third) if len(text) <= 1024 else (first, second, third, _hash(text[:4096]))
