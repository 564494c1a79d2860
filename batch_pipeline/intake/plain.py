"""Plain requests, many at once: the lines of a block that have nothing but what most lines have (`plain_bodies`).

A line is decoded twice, its envelope and its body, into as few fields as that takes; all else is done for the whole
block together. What is accepted here is accepted by `lines.check_line` with the same numbers (a test compares both),
and every other line, good or bad, is left to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from batch_pipeline.intake import fit, prefixes
from batch_pipeline.intake.bodies import CONVERSATIONS
from batch_pipeline.intake.plain_bodies import PLAIN_BODIES, PLAIN_DEPTH, PlainBody
from batch_pipeline.intake.rows import ROW, Array, id_hash
from batch_pipeline.intake.rules import Rules


class PlainLines(NamedTuple):
    """The plain requests of a block, in their order, and the lines that were left, by their position in the block."""

    models: list[str]
    rows: Array
    left: list[int]


class _Envelope(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    custom_id: str
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


_Line = tuple[int, bytes, str, bytes, PlainBody]
"""A line that is plain: its position in the block, its bytes, its custom_id, its body as bytes and decoded."""

_envelopes = msgspec.json.Decoder(_Envelope)
_LEAST = b'{"custom_id":"","method":"POST","url":"%s","body":}'
"""What stands around a body at least."""
_bodies: dict[str, msgspec.json.Decoder[PlainBody]] = {
    endpoint: msgspec.json.Decoder(body) for endpoint, body in PLAIN_BODIES.items()
}


def take_plain(lines: Sequence[bytes], rules: Rules) -> PlainLines:
    """Return the plain requests among lines, which must be UTF-8 and may hold anything else.

    The rows' `index` is a position in `lines`, and their `line_offset` is 0: where the block lies is for the caller.
    """
    if rules.max_depth < PLAIN_DEPTH:
        return PlainLines([], np.zeros(0, dtype=ROW), [*range(len(lines))])
    read, left = _read(lines, rules)
    rows = np.zeros(len(read), dtype=ROW)
    if not read:
        return PlainLines([], rows, left)
    positions, own_lines, custom_ids, raw, bodies = zip(*read, strict=True)
    ids = [custom_id.encode() for custom_id in custom_ids]
    named = [body.model for body in bodies]
    models = {name: number for number, name in enumerate(dict.fromkeys(named))}
    rows["index"] = positions
    rows["line_bytes"] = _numbers(map(len, own_lines), len(rows))
    rows["body_start"] = [_find_body(line, body) for line, body in zip(own_lines, raw, strict=True)]
    rows["body_bytes"] = _numbers(map(len, raw), len(rows))
    rows["id_start"] = [line.find(custom_id) for line, custom_id in zip(own_lines, ids, strict=True)]
    rows["id_bytes"] = _numbers(map(len, ids), len(rows))
    rows["id_hash"] = _hashes(map(id_hash, ids))
    rows["model"] = [models[name] for name in named]
    texts = PLAIN_BODIES[rules.endpoint].texts(bodies)
    beginnings = prefixes.beginnings(texts, rules.endpoint in CONVERSATIONS)
    for column, hashes in zip(prefixes.COLUMNS, zip(*map(prefixes.hashes, beginnings), strict=True), strict=True):
        rows[column] = _hashes(hashes)
    fits = _fit(rows, bodies, texts, list(models), rules)
    left += rows["index"][~fits].tolist()
    return PlainLines(list(models), rows[fits], left)


def _read(lines: Sequence[bytes], rules: Rules) -> tuple[list[_Line], list[int]]:
    """Return what was read of the lines that are plain, and the positions of the others."""
    read: list[_Line] = []
    left: list[int] = []
    decode_envelope, decode_body, endpoint = _envelopes.decode, _bodies[rules.endpoint].decode, rules.endpoint
    longest_id, longest = rules.max_custom_id_characters, rules.max_line_bytes
    # A key may be there twice, and the first value be nested as deeply as it likes; but not in fewer bytes than that.
    most_around = len(_LEAST % endpoint.encode()) + 2 * rules.max_depth
    for position, line in enumerate(lines):
        try:
            envelope = decode_envelope(line)
            raw = bytes(envelope.body)
            body = decode_body(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            left.append(position)
            continue
        custom_id = envelope.custom_id
        is_plain_id = custom_id.isprintable() and 0 < len(custom_id) <= longest_id
        is_plain_line = len(line) <= longest and len(line) - len(raw) - len(custom_id) <= most_around
        if is_plain_id and is_plain_line and envelope.url == endpoint:
            read.append((position, line, custom_id, raw, body))
        else:
            left.append(position)
    return read, left


def _find_body(line: bytes, body: bytes) -> int:
    """Return where the body starts; nearly always it is the line's last member."""
    start = len(line) - len(body) - 1
    return start if line[start:-1] == body else line.find(body)


def _fit(
    rows: Array, bodies: Sequence[PlainBody], texts: Sequence[Sequence[str]], models: Sequence[str], rules: Rules
) -> npt.NDArray[np.bool_]:
    """Write the requests' sizes in tokens, as `fit.fit` has them; return which of them surely fit their model."""
    count = len(rows)
    form = PLAIN_BODIES[rules.endpoint]
    messages = _numbers(map(len, texts), count) if rules.endpoint in CONVERSATIONS else np.zeros(count, dtype=np.int64)
    asked, choices = (np.array(numbers, dtype=np.int64) for numbers in (form.asked(bodies), form.choices(bodies)))
    body_bytes = rows["body_bytes"].astype(np.int64)
    fits = np.zeros(count, dtype=np.bool_)
    answers = asked.copy()
    for code, name in enumerate(models):
        served = rules.models.get(name)
        if served is None:
            continue
        of_model = rows["model"] == code
        room = served.model.context_length - np.where(asked < 0, 1, asked)
        is_short = served.counter.all_at_most(body_bytes, messages) <= room
        fits |= of_model & (room >= 1) & is_short & (choices <= served.model.max_choices)
        unsaid = of_model & (asked < 0)
        answers[unsaid] = np.minimum(served.model.default_output_tokens, room[unsaid])
    prompts = messages * fit.MESSAGE_TOKENS + _numbers(map(fit.estimate, texts), count)
    rows["prompt_tokens"] = np.maximum(prompts, 1)
    rows["max_tokens"] = np.minimum(answers * choices, fit.MOST)
    return fits


def _numbers(values: Iterable[int], count: int) -> npt.NDArray[np.int64]:
    return np.fromiter(values, dtype=np.int64, count=count)


def _hashes(digests: Iterable[bytes]) -> npt.NDArray[np.uint64]:
    return np.frombuffer(b"".join(digests), dtype=">u8").astype(np.uint64)
