"""What the body of OpenAI's /v1/responses must look like, as far as vLLM serves it without keeping anything.

`input` is a text or a list of items; of those that OpenAI knows, vLLM reads messages, calls of the customer's own tools
with what they gave, and reasoning. The rules are those of `bodies`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw

from batch_pipeline.intake.values import NOTHING, Count, Sampled, TopLogprobs, is_given

Status = Literal["in_progress", "completed", "incomplete"]


class ContentPart(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A part of an item's content, with these fields only. A `refusal` is not among them: vLLM 0.32 breaks at it."""

    type: Literal["input_text", "output_text", "input_image", "reasoning_text", "summary_text"]
    text: str = ""
    image_url: str | None = None
    detail: str | None = None
    file_id: None = None
    annotations: Raw = NOTHING
    logprobs: Raw = NOTHING
    prompt_cache_breakpoint: Raw = NOTHING


Content = str | list[ContentPart]


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An item of the input. Those that point to what a server keeps, or are of tools that it runs, are not taken."""

    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
    ] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None
    output: Content | None = None
    summary: list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    id: str | None = None
    status: Status | None = None
    phase: str | None = None
    encrypted_content: None = None
    caller: Raw = NOTHING
    is_async: Raw = msgspec.field(default=NOTHING, name="async")

    def text(self) -> str:
        """Return what a chat template surely gets of it: a message, or what a tool gave."""
        given = self.content if self.type == "message" else self.output
        if given is None or isinstance(given, str):
            return given or ""
        return "\n".join(part.text for part in given)

    def media(self) -> list[str]:
        """Return what the engine would fetch or unpack, whatever the types of item and part are."""
        lists = (given for given in (self.content, self.output, self.summary) if isinstance(given, list))
        return [part.image_url or "" for parts in lists for part in parts if _is_image(part)]

    @property
    def is_plain(self) -> bool:
        """Whether it is a message of text that is not to be continued, in a role that every template knows."""
        is_known = self.type == "message" and self.role != "developer"
        return is_known and self.status in (None, "completed") and not self.media()


def _is_image(part: ContentPart) -> bool:
    return part.type == "input_image" or part.image_url is not None


class Tool(msgspec.Struct, frozen=True, gc=False):
    """A tool of the customer's own: the engine asks for a call of it and runs nothing."""

    type: Literal["function", "custom"]
    name: str


class ToolChoice(msgspec.Struct, frozen=True, gc=False):
    """Which of the customer's own tools is to be called."""

    type: Literal["function", "custom", "allowed_tools"]


class ResponsesBody(Sampled, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/responses."""

    input: str | Annotated[list[Item], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    background: bool | None = None
    top_logprobs: TopLogprobs | None = None
    truncation: Literal["auto", "disabled"] | None = "disabled"
    max_tool_calls: Count | None = None
    include: Raw = NOTHING
    include_reasoning: Raw = NOTHING
    reasoning: Raw = NOTHING
    text: Raw = NOTHING
    structured_outputs: Raw = NOTHING
    tools: Raw = NOTHING
    tool_choice: Raw = NOTHING
    parallel_tool_calls: Raw = NOTHING
    metadata: Raw = NOTHING
    chat_template_kwargs: Raw = NOTHING
    enable_response_messages: Raw = NOTHING
    ignore_eos: Raw = NOTHING
    include_stop_str_in_output: Raw = NOTHING
    skip_special_tokens: Raw = NOTHING
    user: Raw = NOTHING
    watermarking: Raw = NOTHING
    # Refused, see `fields`.
    previous_response_id: Raw = NOTHING
    previous_input_messages: Raw = NOTHING
    conversation: Raw = NOTHING
    prompt: Raw = NOTHING
    vllm_xargs: Raw = NOTHING
    mm_processor_kwargs: Raw = NOTHING
    media_io_kwargs: Raw = NOTHING

    @property
    def items(self) -> list[Item]:
        """Return the input as items: a text is a message of the user."""
        return [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    def texts(self) -> list[str]:
        """Return the contents of the conversation, the instructions first."""
        return [*([self.instructions] if self.instructions else []), *(item.text() for item in self.items)]

    @property
    def is_cut(self) -> bool:
        """Whether the engine cuts a prompt that is too long; vLLM does so also where it says null."""
        return self.truncation != "disabled"

    def plain_messages(self) -> list[dict[str, str]] | None:
        """Return the messages that vLLM makes of it, or None where only the engine can tell."""
        if any(is_given(raw) for raw in (self.tools, self.reasoning, self.chat_template_kwargs)):
            return None
        if not all(item.is_plain for item in self.items):
            return None
        messages = [{"role": item.role or "user", "content": item.text()} for item in self.items]
        return [*([{"role": "system", "content": self.instructions}] if self.instructions else []), *messages]
