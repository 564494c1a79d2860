"""Plain bodies, by endpoint: a text prompt or messages of text, and what of the other fields needs no look beyond its
type.

Whatever is decoded here is also a body of the endpoint (`bodies`) in which no rule of `fields` finds a fault, but for
the number of answers. A body with another field is not plain. Each form is asked about many of its bodies at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from batch_pipeline.intake.values import Count, Penalty, Seed, Temperature, TopLogprobs, TopP, Words
from batch_pipeline.models import MESSAGES, RESPONSES


class _Message(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str
    name: str | None = None


class _Turn(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    role: Literal["user", "assistant"]
    content: str


class PlainBody(msgspec.Struct, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True):
    """What all have in common."""

    model: str

    @staticmethod
    def texts(bodies: Sequence[Any]) -> list[list[str]]:
        """Return for each body the contents of its messages, or its prompt: at least one text."""
        raise NotImplementedError

    @staticmethod
    def asked(bodies: Sequence[Any]) -> list[int]:
        """Return for each body the most tokens of one answer, -1 where it does not say."""
        raise NotImplementedError

    @staticmethod
    def choices(bodies: Sequence[Any]) -> list[int]:
        """Return how many answers each body asks for."""
        return [1] * len(bodies)


class _Generating(PlainBody, frozen=True, gc=False, kw_only=True):
    temperature: Temperature | None = None
    top_p: TopP | None = None


class _Sampled(_Generating, frozen=True, gc=False, kw_only=True):
    max_tokens: Count | None = None
    n: Count | None = None
    seed: Seed | None = None
    stop: str | Words | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    user: str | None = None

    @staticmethod
    def choices(bodies: Sequence[_Sampled]) -> list[int]:
        return [body.n or 1 for body in bodies]


class _Chat(_Sampled, frozen=True, gc=False, kw_only=True):
    messages: Annotated[list[_Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    @staticmethod
    def texts(bodies: Sequence[_Chat]) -> list[list[str]]:
        return [[message.content for message in body.messages] for body in bodies]

    @staticmethod
    def asked(bodies: Sequence[_Chat]) -> list[int]:
        return [body.max_completion_tokens or body.max_tokens or -1 for body in bodies]


class _Completion(_Sampled, frozen=True, gc=False, kw_only=True):
    prompt: str
    logprobs: TopLogprobs | None = None

    @staticmethod
    def texts(bodies: Sequence[_Completion]) -> list[list[str]]:
        return [[body.prompt] for body in bodies]

    @staticmethod
    def asked(bodies: Sequence[_Completion]) -> list[int]:
        return [body.max_tokens or -1 for body in bodies]


class _Embedding(PlainBody, frozen=True, gc=False, kw_only=True):
    input: str
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None

    @staticmethod
    def texts(bodies: Sequence[_Embedding]) -> list[list[str]]:
        return [[body.input] for body in bodies]

    @staticmethod
    def asked(bodies: Sequence[_Embedding]) -> list[int]:
        return [0] * len(bodies)


class _Messages(_Generating, frozen=True, gc=False, kw_only=True):
    messages: Annotated[list[_Turn], Meta(min_length=1)]
    max_tokens: Count
    system: str | None = None
    stop_sequences: Words | None = None

    @staticmethod
    def texts(bodies: Sequence[_Messages]) -> list[list[str]]:
        return [[*([body.system] if body.system else []), *[turn.content for turn in body.messages]] for body in bodies]

    @staticmethod
    def asked(bodies: Sequence[_Messages]) -> list[int]:
        return [body.max_tokens for body in bodies]


class _Response(_Generating, frozen=True, gc=False, kw_only=True):
    input: str
    instructions: str | None = None
    max_output_tokens: Count | None = None

    @staticmethod
    def texts(bodies: Sequence[_Response]) -> list[list[str]]:
        return [[body.instructions, body.input] if body.instructions else [body.input] for body in bodies]

    @staticmethod
    def asked(bodies: Sequence[_Response]) -> list[int]:
        return [body.max_output_tokens or -1 for body in bodies]


PLAIN_DEPTH = 3
"""How deeply the JSON of a plain body is nested at most: the body, its list of messages, a message."""
PLAIN_BODIES: dict[str, type[PlainBody]] = {
    "/v1/chat/completions": _Chat,
    "/v1/completions": _Completion,
    "/v1/embeddings": _Embedding,
    MESSAGES: _Messages,
    RESPONSES: _Response,
}
