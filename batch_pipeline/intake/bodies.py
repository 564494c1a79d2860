"""What a request's body must look like, endpoint by endpoint: only what must not reach an engine is refused.

Unknown fields pass through, because engines have many. Ranges are those of OpenAI's API where it and vLLM agree, else
the narrower. Bodies are decoded by msgspec, the fastest exact parser here; `RULES` says in words what its constraints
say.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Unit = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
NOTHING = Raw(b"null")
MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_MEMBERS = 2_000
"""Members of a schema's objects, all levels together: 5,000 properties held up every guided request for minutes."""
MAX_EMBEDDING_INPUTS = 2_048

STRIPPED = ("priority", "request_id", "kv_transfer_params", "ec_transfer_params")
"""Fields that are the operator's: ignored, and never forwarded. With them a customer could go before live traffic,
collide with another's request, or have the engine fetch from a host."""


class TextPart(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A part of a message's content. Only text, and only these fields: vLLM reads a part of any type that has both a
    `uuid` and an `image_url` as an image, and fetches it.
    """

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str = ""
    refusal: str = ""
    cache_control: Raw = NOTHING
    annotations: Raw = NOTHING


class Message(msgspec.Struct, frozen=True, gc=False):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[str | TextPart] | None = None
    tool_calls: Raw = NOTHING

    def text(self) -> str:
        """Return its content as the string that a chat template gets."""
        if self.content is None:
            return ""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part if isinstance(part, str) else part.text or part.refusal for part in self.content)


class Sampling(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What chat and completions have in common."""

    model: str
    stream: bool | None = None
    n: Count | None = None
    best_of: Count | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Unit | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: dict[str, Bias] | None = None
    prompt_logprobs: TopLogprobs | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    response_format: Raw = NOTHING
    structured_outputs: Raw = NOTHING
    guided_json: Raw = NOTHING
    guided_regex: Raw = NOTHING
    guided_choice: Raw = NOTHING
    guided_grammar: Raw = NOTHING
    priority: Raw = NOTHING
    request_id: Raw = NOTHING
    kv_transfer_params: Raw = NOTHING
    ec_transfer_params: Raw = NOTHING


class ChatBody(Sampling, frozen=True, gc=False, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Raw = NOTHING
    tool_choice: Raw = NOTHING
    documents: Raw = NOTHING
    chat_template: Raw = NOTHING
    chat_template_kwargs: Raw = NOTHING
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    continue_final_message: bool | None = None


class CompletionBody(Sampling, frozen=True, gc=False, kw_only=True):
    """Body of /v1/completions."""

    prompt: str | list[str | TokenId | list[TokenId]]
    suffix: str | None = None
    logprobs: TopLogprobs | None = None
    add_special_tokens: bool | None = None
    prompt_embeds: Raw = NOTHING


class EmbeddingBody(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Body of /v1/embeddings."""

    model: str
    input: str | list[str | TokenId | list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    stream: bool | None = None
    add_special_tokens: bool | None = None
    messages: Raw = NOTHING
    priority: Raw = NOTHING
    request_id: Raw = NOTHING
    kv_transfer_params: Raw = NOTHING
    ec_transfer_params: Raw = NOTHING


Body = ChatBody | CompletionBody | EmbeddingBody

BODIES: dict[str, type[ChatBody] | type[CompletionBody] | type[EmbeddingBody]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingBody,
}

_SCHEMA_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
_NO_SCHEMAS = (NOTHING,) * len(_SCHEMA_FIELDS)

_TOKEN_COUNT = "a whole number from 1 to 2147483647"  # noqa: S105 - a rule in words
_TEXT_OR_TOKENS = "a text, a list of texts, a list of token ids, or a list of such lists"
RULES = {
    "model": "a text: the name of a model",
    "messages": "a list of at least one message",
    "stream": "false or absent",
    "n": "a whole number of at least 1",
    "best_of": "a whole number of at least 1",
    "max_tokens": _TOKEN_COUNT,
    "max_completion_tokens": _TOKEN_COUNT,
    "min_tokens": "a whole number of at least 0",
    "temperature": "a number from 0 to 2",
    "top_p": "a number above 0 and at most 1",
    "top_k": "a whole number of at least -1",
    "min_p": "a number from 0 to 1",
    "frequency_penalty": "a number from -2 to 2",
    "presence_penalty": "a number from -2 to 2",
    "repetition_penalty": "a number above 0 and at most 10",
    "logit_bias": "an object of token ids, each with a number from -100 to 100",
    "prompt_logprobs": "a whole number from 0 to 20",
    "top_logprobs": "a whole number from 0 to 20",
    "seed": "a whole number of 64 bits",
    "stop": "a text or a list of texts",
    "stop_token_ids": "a list of token ids",
    "truncate_prompt_tokens": "a whole number of at least -1",
    "prompt": _TEXT_OR_TOKENS,
    "suffix": "a text",
    "input": _TEXT_OR_TOKENS,
    "encoding_format": '"float" or "base64"',
    "dimensions": "a whole number of at least 1",
}
LOGPROBS_RULES = {"/v1/chat/completions": "true or false", "/v1/completions": "a whole number from 0 to 20"}


def is_given(raw: Raw) -> bool:
    """Return whether a field that is kept raw is there and not null."""
    return raw is not NOTHING and bytes(raw) != b"null"


def output_tokens(body: Body) -> int | None:
    """Return the most tokens that one answer may have, or None where the body does not say."""
    if isinstance(body, ChatBody):
        return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return body.max_tokens if isinstance(body, CompletionBody) else 0


def prompts(body: CompletionBody | EmbeddingBody) -> list[str | list[int]] | None:
    """Return the prompts that one body holds, each a text or token ids, or None where they are mixed or none at all."""
    given = body.prompt if isinstance(body, CompletionBody) else body.input
    if isinstance(given, str):
        return [given]
    kinds = {type(item) for item in given}
    if kinds == {int}:
        return [[item for item in given if isinstance(item, int)]]
    if kinds == {str}:
        return [item for item in given if isinstance(item, str)]
    if kinds == {list} and all(given):
        return [item for item in given if isinstance(item, list)]
    return None


def carries_operators_fields(body: Body) -> bool:
    """Return whether the body has one of the fields that are never forwarded."""
    return (
        body.priority is not NOTHING
        or body.request_id is not NOTHING
        or body.kv_transfer_params is not NOTHING
        or body.ec_transfer_params is not NOTHING
    )


def problem_of(body: Body, max_choices: int) -> str | None:
    """Return what is wrong with a body whose fields are each of the right type and in range, or None."""
    if body.stream:
        return "body.stream must be false or absent: a batch has no streams"
    if isinstance(body, EmbeddingBody):
        return _embedding_problem(body)
    if (body.n is not None and body.n > max_choices) or (body.best_of is not None and body.best_of > max_choices):
        field = "n" if body.n is not None and body.n > max_choices else "best_of"
        return f"body.{field} must be at most {max_choices} for this model; ask again in further lines for more answers"
    schemas = (
        body.response_format,
        body.structured_outputs,
        body.guided_json,
        body.guided_regex,
        body.guided_choice,
        body.guided_grammar,
    )
    if schemas != _NO_SCHEMAS:
        for field, raw in zip(_SCHEMA_FIELDS, schemas, strict=True):
            if (problem := _schema_problem(field, bytes(raw))) is not None:
                return problem
    return _chat_problem(body) if isinstance(body, ChatBody) else _completion_problem(body, max_choices)


def _embedding_problem(body: EmbeddingBody) -> str | None:
    if is_given(body.messages):
        return "body.messages is not taken by /v1/embeddings: give the texts as body.input"
    given = prompts(body)
    if given is None:
        return f"body.input must be {RULES['input']}, and not empty"
    if len(given) > MAX_EMBEDDING_INPUTS:
        return f"body.input has {len(given)} texts: at most {MAX_EMBEDDING_INPUTS} fit in one request; use more lines"
    return None


def _completion_problem(body: CompletionBody, max_choices: int) -> str | None:
    if is_given(body.prompt_embeds):
        return "body.prompt_embeds is not taken: give the prompt as a text or as token ids"
    given = prompts(body)
    if given is None:
        return f"body.prompt must be {RULES['prompt']}, and not empty"
    if len(given) * (body.n or 1) > max_choices:
        return f"body.prompt and body.n ask for more than {max_choices} answers in one request: use more lines"
    return None


def _chat_problem(body: ChatBody) -> str | None:
    for number, message in enumerate(body.messages):
        if message.content is None and message.role != "assistant":
            return f"body.messages[{number}].content is missing: it must be a text or a list of text parts"
    if body.tool_choice is not NOTHING and bytes(body.tool_choice) not in (b"null", b'"none"', b'"auto"'):
        return _schema_problem("tools", bytes(body.tools))
    return None


def _schema_problem(field: str, raw: bytes) -> str | None:
    if len(raw) > MAX_SCHEMA_BYTES:
        return (
            f"body.{field} has {len(raw)} bytes, and at most {MAX_SCHEMA_BYTES} are allowed: larger schemas hold up "
            "the engine for minutes; make the schema smaller"
        )
    members = raw.count(b":")
    if members > MAX_SCHEMA_MEMBERS:
        return (
            f"body.{field} has about {members} members, and at most {MAX_SCHEMA_MEMBERS} are allowed: larger schemas "
            "hold up the engine for minutes; make the schema smaller"
        )
    return None
