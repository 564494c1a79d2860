"""What every request passes through: it gets an id, its body is bounded, and an unexpected error becomes an answer.

Plain ASGI, so that nothing that is streamed, in or out, is gathered in memory on the way.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batch_pipeline.api import problems

MOST_BODY_BYTES = 1024 * 1024
"""Of a body that is read as a whole. Those that are streamed have limits of their own."""
WHOLE_BODY_SECONDS = 300.0
"""In which such a body has to come: it is read before the key is looked at, so anybody can begin one."""
_STREAMED = re.compile(r"/v1/(?:files|uploads/[^/]+/parts|messages/batches)/?")
_ID_HEADERS = (b"x-request-id", b"request-id")
"""OpenAI's name of it, and Anthropic's."""


class Requests:
    """The middleware. `idle_seconds`: how long a client may send nothing of a body that it has not finished.

    One that is read as a whole may not take longer than WHOLE_BODY_SECONDS either, however steadily it comes.
    """

    def __init__(self, app: ASGIApp, idle_seconds: float) -> None:
        self._app = app
        self._idle_seconds = idle_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id
        has_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                value = request_id.encode()
                message = {**message, "headers": [*message["headers"], *((name, value) for name in _ID_HEADERS)]}
            await send(message)

        try:
            await self._app(scope, self._bounded(scope, receive), send_with_id)
        except Exception as error:
            # Once a part of the answer has gone out the only truth left to tell is that it breaks off.
            if has_begun:
                raise
            await problems.answer(error, scope["path"], request_id)(scope, receive, send_with_id)

    def _bounded(self, scope: Scope, receive: Receive) -> Receive:
        is_streamed = scope["method"] == "POST" and _STREAMED.fullmatch(scope["path"]) is not None
        is_whole = False
        size = 0
        loop = asyncio.get_running_loop()
        give_up_at = math.inf if is_streamed else loop.time() + WHOLE_BODY_SECONDS

        async def bounded() -> Message:
            nonlocal is_whole, size
            if is_whole:
                return await receive()
            left_seconds = give_up_at - loop.time()
            try:
                message = await asyncio.wait_for(receive(), min(self._idle_seconds, left_seconds))
            except TimeoutError as error:
                said = f"nothing of the body came for {self._idle_seconds:.0f} seconds"
                if left_seconds < self._idle_seconds:
                    said = f"the body was not there after {WHOLE_BODY_SECONDS:.0f} seconds"
                raise HTTPException(408, f"{said}; send it again") from error
            is_whole = not message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > MOST_BODY_BYTES and not is_streamed:
                raise HTTPException(413, f"the body has more than {MOST_BODY_BYTES} bytes")
            return message

        return bounded
