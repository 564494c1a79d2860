"""What is wrong with a line, in words that say where and how to mend it, and repeat little of a customer's data."""

from __future__ import annotations

import json
import re

import msgspec

from batch_pipeline.intake.bodies import OWN_RULES, RULES
from batch_pipeline.models import RESPONSES
from batch_pipeline.plain import printable
from batch_pipeline.wire import codes

_SHOWN_CHARACTERS = 60
_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]*)`")
_BYTE = re.compile(r" \(byte \d+\)$")


class LineProblem(msgspec.Struct, frozen=True):
    """A line that cannot be run. `line` is its 1-based number; `custom_id` is null where it cannot be read."""

    line: int
    custom_id: str | None
    code: str
    message: str


def shown(value: str) -> str:
    """Return a customer's text escaped, in quotes, and cut to a length that suits a message."""
    text = json.dumps(value[:_SHOWN_CHARACTERS], ensure_ascii=False)[1:-1]
    escaped = "".join(character if character.isprintable() else f"\\u{ord(character):04x}" for character in text)
    is_whole = len(value) <= _SHOWN_CHARACTERS and len(escaped) <= _SHOWN_CHARACTERS
    return f'"{escaped}"' if is_whole else f'"{escaped[: _SHOWN_CHARACTERS - 1]}…"'


def not_json(error: Exception) -> tuple[str, str]:
    """Return the code and message of a line that is no JSON, from what the parser said."""
    if isinstance(error, RecursionError):
        return codes.INVALID_JSON_LINE, "the line's JSON is nested too deeply; flatten it"
    if isinstance(error, UnicodeDecodeError):
        return codes.INVALID_JSON_LINE, f"the line is not UTF-8 at its byte {error.start + 1}; write the file as UTF-8"
    said = str(error).removeprefix("JSON is malformed: ")
    return codes.INVALID_JSON_LINE, f"the line is not valid JSON: {said}; write one JSON object on each line"


def too_deep(max_depth: int) -> tuple[str, str]:
    """Return the code and message of a line whose JSON is nested more deeply than is allowed."""
    return codes.INVALID_JSON_LINE, f"the line's JSON is nested more than {max_depth} levels deep; flatten it"


def too_long(max_line_bytes: int) -> tuple[str, str]:
    """Return the code and message of a line that has too many bytes."""
    return codes.LINE_TOO_LONG, f"the line has more than {max_line_bytes} bytes; shorten the request"


def duplicate(line: int, custom_id: str, first_line: int) -> LineProblem:
    """Return the problem of a line whose custom_id an earlier line has."""
    message = f"custom_id {shown(custom_id)} is already that of line {first_line}; give each request an id of its own"
    return LineProblem(line, custom_id, codes.DUPLICATE_CUSTOM_ID, message)


def wrong_body(error: msgspec.ValidationError, endpoint: str) -> str:
    """Return what is wrong with a body, from what the decoder said and where it said it."""
    match = _PATH.match(str(error))
    what, path = (match["what"], match["path"] or "") if match else (str(error), "")
    missing = _MISSING.match(what)
    if missing:
        path = f"{path}.{missing['field']}" if path else missing["field"]
        what = "it is missing"
    field = re.split(r"[.\[]", path, maxsplit=1)[0]
    where = f"body.{path}" if path else "body"
    if ".content" in path:
        return f"{where} must be a text or a list of text parts (images, audio and files are not taken): {_plain(what)}"
    rule = OWN_RULES.get((endpoint, field), RULES.get(field))
    is_inside = path != field and ((field == "messages" and not missing) or (endpoint, field) == (RESPONSES, "input"))
    if rule is None or is_inside:
        return f"{where} is not as {endpoint} takes it: {_plain(what)}"
    return f"{where} must be {rule}: {_plain(what)}"


def _plain(what: str) -> str:
    """Return the decoder's words without what repeats a customer's value at length."""
    what = printable(_BYTE.sub("", what), kept="")
    what = what[:1].lower() + what[1:]
    return what if len(what) <= 2 * _SHOWN_CHARACTERS else what[: 2 * _SHOWN_CHARACTERS - 1] + "…"
