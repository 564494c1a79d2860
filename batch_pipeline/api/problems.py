"""Errors as answers: the status and words of each, and its body in the shape that the door's SDK expects.

    OpenAI      {"error": {"message", "type", "param", "code"}}
    Anthropic   {"type": "error", "error": {"type", "message"}, "request_id"}

What a customer did wrong is a 4xx whose message says what to mend. What is ours is a 5xx that names the request's id
and nothing of the inside; the log has the rest under that id.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from batch_pipeline.errors import CustomerError, LimitReached, NotFound, ProofFailed, StoreError
from batch_pipeline.plain import printable
from batch_pipeline.wire import codes

_log = logging.getLogger(__name__)

RETRY_SECONDS = 5
"""What a client is told to wait when a part of the service is away."""


class DoorShape(StrEnum):
    """Which SDK speaks to us."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One error, before it has a shape."""

    status: int
    message: str
    code: str | None = None
    """A stable word; OpenAI's where it has one."""
    param: str | None = None
    """The field or parameter that it is about."""
    headers: dict[str, str] = {}


class RequestRefused(CustomerError):
    """A request that the HTTP service refuses by itself, with the status that says so."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(code, message, param=param)
        self.status = status
        self.headers = dict(headers or {})


def shape_of(path: str) -> DoorShape:
    """Return by which SDK a path is asked for."""
    is_anthropic = path == "/v1/messages" or path.startswith("/v1/messages/")
    return DoorShape.ANTHROPIC if is_anthropic else DoorShape.OPENAI


def problem_of(error: Exception, request_id: str) -> Problem:
    """Return what an exception means to the client. What is no error of the client's is logged."""
    if isinstance(error, CustomerError):
        return _customers(error)
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, HTTPException):
        return Problem(status=error.status_code, message=str(error.detail), headers=dict(error.headers or {}))
    if isinstance(error, ClientDisconnect):
        return Problem(status=400, message="the connection was closed before the body was whole")
    if isinstance(error, StoreError | OperationalError | InterfaceError | PoolTimeout):
        _log.warning("request %s: a part of the service cannot be used", request_id, exc_info=error)
        return Problem(
            status=503,
            message=f"The service cannot reach a part of itself at the moment; try again. (request {request_id})",
            code="service_unavailable",
            headers={"Retry-After": str(RETRY_SECONDS)},
        )
    _log.error("request %s failed", request_id, exc_info=error)
    kind = "proof_failed" if isinstance(error, ProofFailed) else "internal_error"
    return Problem(status=500, message=f"This is a fault of the service, not yours. (request {request_id})", code=kind)


def _customers(error: CustomerError) -> Problem:
    """Return what a customer's mistake means."""
    if isinstance(error, RequestRefused):
        return Problem(
            status=error.status, message=error.message, code=error.code, param=error.param, headers=error.headers
        )
    if isinstance(error, LimitReached):
        # Trying again at once does not help: what is used up is not a rate.
        return Problem(status=429, message=error.message, code=error.code, headers={"x-should-retry": "false"})
    status = 404 if isinstance(error, NotFound) else 413 if error.code == codes.FILE_TOO_LARGE else 400
    return Problem(status=status, message=error.message, code=error.code, param=error.param)


def _invalid(error: RequestValidationError) -> Problem:
    """Return what FastAPI found wrong with parameters or a body: the first of it, where it is, in plain words."""
    first = error.errors()[0] if error.errors() else {"loc": (), "msg": "the request is not as the API takes it"}
    if first.get("type") == "json_invalid":
        return Problem(status=400, message="the body is not valid JSON", code="invalid_request")
    if tuple(first["loc"]) == ("body",):
        said = "the body is missing" if first.get("type") == "missing" else "the body must be a JSON object"
        return Problem(status=400, message=f"{said}; its Content-Type is application/json", code="invalid_request")
    where = [str(part) for part in first["loc"] if part not in ("body", "query", "path", "header")]
    param = printable(".".join(where)[:200], kept="") or None
    said = str(first["msg"])
    words = printable((said[:1].lower() + said[1:])[:300], kept="")
    return Problem(
        status=400,
        message=f"{param}: {words}" if param else words,
        code="missing_required_parameter" if first.get("type") == "missing" else "invalid_request",
        param=param,
    )


def body_of(problem: Problem, shape: DoorShape, request_id: str) -> dict[str, Any]:
    """Return an error's body in the shape of a door."""
    if shape is DoorShape.ANTHROPIC:
        error = {"type": _anthropic_type(problem.status), "message": problem.message}
        return {"type": "error", "error": error, "request_id": request_id}
    return {
        "error": {
            "message": problem.message,
            "type": _openai_type(problem.status),
            "param": problem.param,
            "code": problem.code,
        }
    }


def _openai_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def _anthropic_type(status: int) -> str:
    kinds = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
    }
    return kinds.get(status, "api_error" if status >= 500 else "invalid_request_error")


def answer(error: Exception, path: str, request_id: str) -> JSONResponse:
    """Return the response that an exception means."""
    problem = problem_of(error, request_id)
    body = body_of(problem, shape_of(path), request_id)
    return JSONResponse(body, status_code=problem.status, headers=problem.headers)


def install(app: FastAPI) -> None:
    """Answer every exception of a route in its door's shape."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        return answer(error, request.url.path, request.state.request_id)

    for kind in (
        CustomerError,
        StoreError,
        RequestValidationError,
        HTTPException,
        OperationalError,
        InterfaceError,
        PoolTimeout,
    ):
        app.add_exception_handler(kind, handle)
