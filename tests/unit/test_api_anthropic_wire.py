"""The body of a message batch is read piece by piece, exactly; results are ours in Anthropic's words."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import anthropic.types.messages as sdk
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from batch_pipeline.wire import codes
from batch_pipeline.wire.message_requests import BadRequests, RequestReader
from batch_pipeline.wire.message_results import error_type, result_line

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1000, 1000)
    | st.text(max_size=20)
    | st.sampled_from(['"', "\\", "}],", "\n"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
ONE = b'{"custom_id":"a","params":{}}'
adapter: TypeAdapter[Any] = TypeAdapter(sdk.MessageBatchIndividualResponse)


def read(body: bytes, size: int = 10**9, most: int = 100, line: int = 100_000) -> list[dict[str, Any]]:
    """The lines that a reader makes of a body which comes in pieces of some size."""
    reader = RequestReader(most, line)
    lines = b"".join(reader.feed(body[start : start + size]) for start in range(0, len(body), size))
    reader.finish()
    assert reader.count == lines.count(b"\n")
    return [json.loads(one) for one in lines.splitlines()]


@given(
    st.lists(st.dictionaries(st.text(max_size=8), json_values, max_size=3), min_size=1, max_size=5),
    st.integers(1, 50),
    st.sampled_from([None, 2]),
    st.booleans(),
    st.dictionaries(st.text(max_size=8).filter(lambda name: name != "requests"), json_values, max_size=2),
)
def test_every_cut_of_a_body_gives_the_same_requests(
    params: list[dict[str, Any]], size: int, indent: int | None, ascii_only: bool, others: dict[str, Any]
) -> None:
    requests = [{"custom_id": f"r-{number}", "params": given} for number, given in enumerate(params)]
    whole = {**others, "requests": requests, **{f"{name}_": value for name, value in others.items()}}
    lines = read(json.dumps(whole, indent=indent, ensure_ascii=ascii_only).encode(), size)
    assert [entry["body"] for entry in lines] == params
    assert [entry["custom_id"] for entry in lines] == [entry["custom_id"] for entry in requests]
    assert {(entry["method"], entry["url"]) for entry in lines} == {("POST", "/v1/messages")}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"[]", "must be an object"),
        (b'"requests"', "must be an object"),
        (b"{}", "requests: Field required"),
        (b'{"requests":{}}', "requests: Field required"),
        (b'{"inner":{"requests":[%s]}}' % ONE, "requests: Field required"),
        (b'{"requests":[]}', "at least 1 item"),
        (b'{"requests":[%s]' % ONE, "not valid JSON"),
        (b'{"requests":[%s' % ONE, "not valid JSON"),
        (b'{"requests":[%s}' % ONE, "not valid JSON"),
        (b'{"requests":[%s,]}' % ONE, "requests.1: not valid JSON"),
        (b'{"requests":[%s]} {}' % ONE, "not valid JSON"),
        (b'{"requests":[%s],"requests":[]}' % ONE, "given twice"),
        (b'{"requests":[%s %s]}' % (ONE, ONE), "requests.0: not valid JSON"),
        (b'{"requests":[1]}', "requests.0: Expected `object`"),
        (b'{"requests":[{"params":{}}]}', "requests.0.custom_id: Field required"),
        (b'{"requests":[{"custom_id":"a"}]}', "requests.0.params: Field required"),
        (b'{"requests":[%s,{"custom_id":"b b","params":{}}]}' % ONE, "requests.1.custom_id: String should match"),
        (b'{"requests":[{"custom_id":"","params":{}}]}', "requests.0.custom_id: String should match"),
        (b'{"requests":[{"custom_id":"%s","params":{}}]}' % (b"x" * 65), "requests.0.custom_id: String should match"),
        (b'{"requests":[{"custom_id":"a\\n","params":{}}]}', "requests.0.custom_id: String should match"),
        (b'{"requests":[%s,%s]}' % (ONE, ONE), "requests.1.custom_id: it is that of requests.0"),
        (b'{"requests":[{"custom_id":"a","params":{"x":"\xff"}}]}', "requests.0: not valid JSON"),
        (b'{"requests":[{"custom_id":"a","params":"%s"}]}' % (b"x" * 2000), "requests.0: it has more than 1000 bytes"),
        (b'{"requests":[{"custom_id":"a","params":"' + b"x" * 200_000, "requests.0: it has more than 1000 bytes"),
        (b'{"x":"%s","requests":[%s]}' % (b"x" * 70_000, ONE), "outside of the list"),
        (b'{"requests":[%s],"x":"%s"}' % (ONE, b"x" * 70_000), "outside of the list"),
        (b'{"' + b"a" * 10**6, "outside of the list"),
        (b"{" * 10**6, "outside of the list"),
        (b'{"requests":[' + b"[" * 10**6, "more than 1000 bytes"),
        (
            b'{"requests":[%s]}' % b",".join(b'{"custom_id":"%d","params":{}}' % n for n in range(101)),
            "at most 100 items",
        ),
    ],
    ids=range(31),
)
@pytest.mark.parametrize("size", [3001, 10**9])
def test_body_that_cannot_be_is_refused_with_its_place(body: bytes, words: str, size: int) -> None:
    with pytest.raises(BadRequests) as refused:
        read(body, size, line=1000)
    assert words in str(refused.value)
    assert len(str(refused.value)) < 300


def test_memory_follows_the_largest_request_and_not_the_body() -> None:
    reader = RequestReader(10**6, 100_000)
    tracemalloc.start()
    reader.feed(b'{"requests":[')
    for number in range(2000):
        reader.feed(b'%s{"custom_id":"%d","params":"%s"}' % (b"," if number else b"", number, b"x" * 20_000))
    reader.feed(b"]}")
    reader.finish()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2_000_000


@pytest.mark.parametrize(
    ("response", "error", "kind", "detail"),
    [
        ((200, {"id": "m", "content": []}), None, "succeeded", None),
        (
            (400, {"type": "error", "error": {"type": "BadRequestError", "message": "no"}}),
            None,
            "errored",
            "invalid_request_error",
        ),
        ((404, {"error": {"message": "no", "type": "x", "code": 404}}), None, "errored", "not_found_error"),
        ((422, {"detail": "no"}), None, "errored", "invalid_request_error"),
        ((500, "no"), None, "errored", "api_error"),
        (None, codes.BATCH_EXPIRED, "expired", None),
        (None, codes.BATCH_CANCELLED, "canceled", None),
        (None, codes.INVALID_REQUEST, "errored", "invalid_request_error"),
        (None, codes.CONTEXT_LENGTH_EXCEEDED, "errored", "invalid_request_error"),
        (None, codes.MODEL_NOT_FOUND, "errored", "not_found_error"),
        (None, codes.TOKEN_LIMIT_EXCEEDED, "errored", "rate_limit_error"),
        (None, codes.REQUEST_TIMEOUT, "errored", "timeout_error"),
        (None, codes.ENGINE_CRASH, "errored", "api_error"),
    ],
    ids=range(13),
)
def test_each_line_is_one_result_of_the_sdks_types(
    response: tuple[int, Any] | None, error: str | None, kind: str, detail: str | None
) -> None:
    line = {
        "id": "batch_req_1",
        "custom_id": "a",
        "response": response and {"status_code": response[0], "request_id": "r", "body": response[1]},
        "error": error and {"code": error, "message": "body.max_tokens is 0"},
    }
    raw = result_line(json.dumps(line).encode())
    assert raw.endswith(b"\n")
    result = json.loads(raw)
    assert (result["custom_id"], result["result"]["type"]) == ("a", kind)
    if kind == "succeeded":
        assert result["result"] == {"type": "succeeded", "message": response and response[1]}
    else:
        adapter.validate_python(result)
    if detail:
        assert result["result"]["error"]["error"]["type"] == detail
        assert result["result"]["error"]["error"]["message"]
    if detail == "invalid_request_error" and error:
        assert result["result"]["error"]["error"]["message"] == "params.max_tokens is 0"


def test_statuses_have_anthropics_words() -> None:
    assert [error_type(status) for status in (400, 401, 404, 413, 429, 500, 529)] == [
        "invalid_request_error",
        "authentication_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "api_error",
        "overloaded_error",
    ]
