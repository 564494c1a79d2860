"""What a request's body must look like, endpoint by endpoint, and which of its fields reach an engine.

A field that is declared here is passed on as it was written, or refused where `fields.problem_of` says so. One that is
not declared is taken out: what an engine of tomorrow makes of a field is decided here before it gets one (the table of
all fields of vLLM is in docs/security.md, and a test holds both against the installed vLLM). Ranges are those of
OpenAI's API where it and vLLM agree, else the narrower. Bodies are decoded by msgspec, the fastest exact parser here;
`RULES` says in words what its constraints say.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw

from batch_pipeline.intake.responses import ResponsesBody
from batch_pipeline.intake.values import (
    NOTHING,
    Count,
    Sampled,
    Temperature,
    TokenId,
    TopK,
    TopLogprobs,
    TopP,
    Words,
)
from batch_pipeline.models import INLINE_MEDIA, MESSAGES, RESPONSES

MAX_EMBEDDING_INPUTS = 2_048


class MediaUrl(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Where an image, audio or video is."""

    url: str
    detail: str = "auto"


class InputAudio(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Audio in the request itself."""

    data: str
    format: str


class Part(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A part of a message's content, with these fields only: vLLM reads a part of any type that has both a `uuid` and
    an `image_url` as an image, and fetches it; and it unpacks tensors (`image_embeds`, `prompt_embeds`).
    """

    type: Literal["text", "input_text", "output_text", "refusal", "image_url", "audio_url", "video_url", "input_audio"]
    text: str = ""
    refusal: str = ""
    cache_control: Raw = NOTHING
    annotations: Raw = NOTHING
    image_url: MediaUrl | None = None
    audio_url: MediaUrl | None = None
    video_url: MediaUrl | None = None
    input_audio: InputAudio | None = None

    @property
    def urls(self) -> list[str]:
        """What the engine would fetch or unpack, whatever the part's type is."""
        found = [given.url for given in (self.image_url, self.audio_url, self.video_url) if given is not None]
        return found if self.input_audio is None else [*found, INLINE_MEDIA]


class RepetitionDetection(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """When to stop an answer that repeats itself; vLLM looks for each size of pattern after each token."""

    max_pattern_size: Annotated[int, Meta(ge=0, le=128)] = 0
    min_pattern_size: Annotated[int, Meta(ge=0, le=128)] = 0
    min_count: Annotated[int, Meta(ge=0, le=1024)] = 0


class Message(msgspec.Struct, frozen=True, gc=False):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[str | Part] | None = None
    tool_calls: Raw = NOTHING

    def text(self) -> str:
        """Return its content as the string that a chat template gets."""
        if self.content is None:
            return ""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part if isinstance(part, str) else part.text or part.refusal for part in self.content)

    def media(self) -> list[str]:
        """Return the URLs of its images, audio and video."""
        if not isinstance(self.content, list):
            return []
        return [url for part in self.content if not isinstance(part, str) for url in part.urls]


class Sampling(Sampled, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True):
    """What chat and completions have in common."""

    n: Count | None = None
    best_of: Count | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    prompt_logprobs: TopLogprobs | None = None
    bad_words: Words | None = None
    allowed_token_ids: list[TokenId] | None = None
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    repetition_detection: RepetitionDetection | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    response_format: Raw = NOTHING
    structured_outputs: Raw = NOTHING
    guided_json: Raw = NOTHING
    guided_regex: Raw = NOTHING
    guided_choice: Raw = NOTHING
    guided_grammar: Raw = NOTHING
    echo: Raw = NOTHING
    ignore_eos: Raw = NOTHING
    include_stop_str_in_output: Raw = NOTHING
    length_penalty: Raw = NOTHING
    return_token_ids: Raw = NOTHING
    return_tokens_as_token_ids: Raw = NOTHING
    skip_special_tokens: Raw = NOTHING
    spaces_between_special_tokens: Raw = NOTHING
    thinking_token_budget: Raw = NOTHING
    truncation_side: Raw = NOTHING
    use_beam_search: Raw = NOTHING
    user: Raw = NOTHING
    watermarking: Raw = NOTHING
    # Refused, see `fields`.
    vllm_xargs: Raw = NOTHING
    logits_processors: Raw = NOTHING
    mm_processor_kwargs: Raw = NOTHING
    media_io_kwargs: Raw = NOTHING
    chat_template: Raw = NOTHING
    prompt_embeds: Raw = NOTHING


class ChatBody(Sampling, frozen=True, gc=False, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Raw = NOTHING
    tool_choice: Raw = NOTHING
    parallel_tool_calls: Raw = NOTHING
    reasoning_effort: Raw = NOTHING
    include_reasoning: Raw = NOTHING
    return_prompt_text: Raw = NOTHING
    documents: Raw = NOTHING
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


class EmbeddingBody(msgspec.Struct, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/embeddings."""

    model: str
    input: str | list[str | TokenId | list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    stream: bool | None = None
    add_special_tokens: bool | None = None
    user: Raw = NOTHING
    truncation_side: Raw = NOTHING
    use_activation: Raw = NOTHING
    embed_dtype: Raw = NOTHING
    endianness: Raw = NOTHING
    padding: Raw = NOTHING
    # Refused, see `fields`.
    messages: Raw = NOTHING
    mm_processor_kwargs: Raw = NOTHING
    media_io_kwargs: Raw = NOTHING
    chat_template: Raw = NOTHING


class Source(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Where the image of a block is."""

    type: Literal["base64", "url"]
    media_type: str = ""
    data: str = ""
    url: str = ""


class Block(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A block of Anthropic's content. Those that name documents, searches or code to run are not served by vLLM."""

    type: Literal["text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str = ""
    source: Source | None = None
    id: str | None = None
    tool_use_id: str | None = None
    name: str | None = None
    input: Raw = NOTHING
    content: str | list[Block] | None = None
    is_error: bool | None = None
    thinking: str = ""
    signature: str = ""
    data: str = ""
    cache_control: Raw = NOTHING
    citations: Raw = NOTHING

    def all_text(self) -> str:
        """Return all text in it."""
        if self.content is None:
            return self.text or self.thinking
        return self.content if isinstance(self.content, str) else "\n".join(block.all_text() for block in self.content)

    def media(self) -> list[str]:
        """Return what the engine would fetch or unpack, whatever the block's type is."""
        inner = self.content if isinstance(self.content, list) else []
        found = [url for block in inner for url in block.media()]
        if self.source is not None:
            found.append(self.source.url if self.source.type == "url" else INLINE_MEDIA)
        return found


class Turn(msgspec.Struct, frozen=True):
    """A message of Anthropic's conversations."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    def text(self) -> str:
        """Return its content as the string that a chat template gets."""
        return self.content if isinstance(self.content, str) else "\n".join(b.all_text() for b in self.content)

    @property
    def is_plain(self) -> bool:
        """Whether it is text and nothing else."""
        return isinstance(self.content, str) or all(block.type == "text" for block in self.content)


class MessagesBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of Anthropic's /v1/messages: the `params` of a request in a message batch."""

    model: str
    messages: Annotated[list[Turn], Meta(min_length=1)]
    max_tokens: Count
    system: str | list[Block] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop_sequences: Words | None = None
    metadata: Raw = NOTHING
    thinking: Raw = NOTHING
    output_config: Raw = NOTHING
    tools: Raw = NOTHING
    tool_choice: Raw = NOTHING
    chat_template_kwargs: Raw = NOTHING
    watermarking: Raw = NOTHING
    # Refused, see `fields`.
    vllm_xargs: Raw = NOTHING

    def system_text(self) -> str:
        """Return what stands before the conversation, as vLLM puts it together."""
        if isinstance(self.system, list):
            return "".join(block.text for block in self.system)
        return self.system or ""


Body = ChatBody | CompletionBody | EmbeddingBody | MessagesBody | ResponsesBody
Conversation = ChatBody | MessagesBody | ResponsesBody
"""Bodies that an engine puts its model's chat template around."""

BODIES: dict[
    str,
    type[ChatBody] | type[CompletionBody] | type[EmbeddingBody] | type[MessagesBody] | type[ResponsesBody],
] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingBody,
    MESSAGES: MessagesBody,
    RESPONSES: ResponsesBody,
}

CONVERSATIONS = frozenset(endpoint for endpoint, body in BODIES.items() if issubclass(body, Conversation))
"""Endpoints of those bodies."""

FORWARDED = {endpoint: frozenset(body.__struct_fields__) for endpoint, body in BODIES.items()}
"""Fields that stay in a body, by endpoint; the refused ones are among them, but a body that has one never runs."""
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
    "max_output_tokens": _TOKEN_COUNT,
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
    "stop": "a text or a list of at most 256 texts",
    "stop_sequences": "a list of at most 256 texts",
    "system": "a text or a list of text blocks",
    "stop_token_ids": "a list of at most 1024 token ids",
    "bad_words": "a list of at most 256 texts",
    "allowed_token_ids": "a list of token ids",
    "logprob_token_ids": "a list of at most 128 token ids",
    "repetition_detection": "an object of max_pattern_size and min_pattern_size (at most 128) and min_count",
    "truncate_prompt_tokens": "a whole number of at least -1",
    "prompt": _TEXT_OR_TOKENS,
    "suffix": "a text",
    "input": _TEXT_OR_TOKENS,
    "encoding_format": '"float" or "base64"',
    "dimensions": "a whole number of at least 1",
}
OWN_RULES = {
    ("/v1/chat/completions", "logprobs"): "true or false",
    ("/v1/completions", "logprobs"): "a whole number from 0 to 20",
    (RESPONSES, "input"): "a text or a list of at least one item",
}
"""Those of fields that are not the same at each endpoint."""


def output_tokens(body: Body) -> int | None:
    """Return the most tokens that one answer may have, or None where the body does not say."""
    if isinstance(body, ChatBody):
        return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if isinstance(body, ResponsesBody):
        return body.max_output_tokens
    return 0 if isinstance(body, EmbeddingBody) else body.max_tokens


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
