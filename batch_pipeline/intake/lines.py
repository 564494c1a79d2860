"""Checks lines, one by one. Pure: what a line is told depends on its bytes and the rules alone.

One pass of msgspec over the envelope leaves the body raw, a second one reads the body as its endpoint has it; both
stop at whatever no JSON parser should accept. Only what they do not see is looked for here: text that is not UTF-8
(in parts that are skipped), and nesting. A line that they refuse is read again, slowly, to find out what to tell the
customer.

Which of two lines with one `custom_id` keeps it is for the whole file to say (`duplicates`).
"""

from __future__ import annotations

import unicodedata

import msgspec

from batch_pipeline.intake import prefixes, problems
from batch_pipeline.intake.blocks import BYTE_ORDER_MARK
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
from batch_pipeline.intake.rows import Request, id_hash
from batch_pipeline.intake.rules import Rules
from batch_pipeline.intake.values import NOTHING
from batch_pipeline.wire import codes
from batch_pipeline.wire.nesting import is_nested_beyond


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


def check_line(
    line: bytes, number: int, offset: int, rules: Rules, *, is_cut: bool = False
) -> Request | LineProblem | None:
    """Return the request that a line is, or what is wrong with it; None for a blank line.

    Never raises for what it holds. `number` is 0-based, `offset` where the line starts in the file; `is_cut`: it is the
    beginning of one that is too long.
    """
    if not line.strip() and not is_cut:
        return None
    try:
        if is_cut or len(line) > rules.max_line_bytes:
            raise _Refused(*problems.too_long(rules.max_line_bytes))
        if not line.isascii():
            line.decode()
        if is_nested_beyond(line, rules.max_depth + 1):
            raise _Refused(*problems.too_deep(rules.max_depth))
        return _request(line, number, offset, rules)
    except (_Refused, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        code, message = (error.code, error.message) if isinstance(error, _Refused) else problems.not_json(error)
        custom_id = None if code == codes.LINE_TOO_LONG else readable_custom_id(line)
        return LineProblem(number + 1, custom_id, code, message)


def readable_custom_id(line: bytes) -> str | None:
    """Return the custom_id of a line, or None where it cannot be read: no JSON object, or no text in it."""
    try:
        raw = _objects.decode(line.removeprefix(BYTE_ORDER_MARK)).get("custom_id")
        return None if raw is None else msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


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
    of_64, of_256, of_1024, of_4096 = map(int.from_bytes, prefixes.hashes(_first_rendered(body, texts)))
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
        of_64,
        of_256,
        of_1024,
        of_4096,
        prompt_tokens,
        max_tokens,
        int.from_bytes(id_hash(id_bytes)),
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
    room = prefixes.PREFIX_BYTES[-1]
    first = texts[0]
    if isinstance(first, list):
        return " ".join(map(str, first[:room])).encode()[:room]
    is_conversation = isinstance(body, Conversation)
    (read,) = prefixes.beginnings([[text for text in texts if isinstance(text, str)]], is_conversation)
    if isinstance(body, Conversation) and body.tools is not NOTHING:
        return (bytes(body.tools)[:room] + b"\0" + read)[:room]
    return read
