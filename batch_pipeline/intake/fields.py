"""What of a body no customer may ask for, although each field is of the right type and in range.

An engine trusts whoever speaks to it: some fields are programs, name hosts to fetch from, unpack tensors, or make it
busy for minutes. Those are refused here, each with what to do instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from batch_pipeline.intake import grammars, media
from batch_pipeline.intake.bodies import (
    MAX_EMBEDDING_INPUTS,
    RULES,
    Body,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    MessagesBody,
    prompts,
)
from batch_pipeline.intake.responses import Item, ResponsesBody, Tool, ToolChoice
from batch_pipeline.intake.values import NOTHING, is_given
from batch_pipeline.models import Model

REFUSED = {
    "chat_template": "a template is a program; the model's own is used",
    "vllm_xargs": "they are parameters of the engine's extensions",
    "logits_processors": "they name code for the engine to load",
    "mm_processor_kwargs": "they change what the engine does with media",
    "media_io_kwargs": "they change what the engine does with media",
    "prompt_embeds": "give the prompt as a text or as token ids",
}
"""Fields that no customer may set, and why: with them a request could run code, load the engine or crash it."""
STATEFUL = {
    "previous_response_id": "nothing is kept from one request to the next; put the conversation into body.input",
    "previous_input_messages": "put the conversation into body.input",
    "conversation": "nothing is kept from one request to the next; put the conversation into body.input",
    "prompt": "no templates of prompts are kept; write the text into body.instructions and body.input",
}
"""Fields of /v1/responses that name what a server keeps, and what to do instead."""
_REFUSED_RESPONSES = (*STATEFUL, "vllm_xargs", "mm_processor_kwargs", "media_io_kwargs")
_REFUSED_SAMPLING = tuple(REFUSED)
_NOT_REFUSED = (NOTHING,) * len(REFUSED)
_TEMPLATES_OWN = frozenset(
    {
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "messages"),
        *("max_length", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize"),
        *("tokenizer_kwargs", "tools", "truncation"),
    }
)
"""Names that chat_template_kwargs must not set: they would replace what was checked."""
MAX_TEMPLATE_VARIABLES = 32
_tools = msgspec.json.Decoder(list[Tool] | None)
_tool_choice = msgspec.json.Decoder(Literal["none", "auto", "required"] | ToolChoice | None)
_template_variables = msgspec.json.Decoder(dict[str, bool | int | float | Annotated[str, Meta(max_length=1024)] | None])

_SCHEMA_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
_NO_SCHEMAS = (NOTHING,) * len(_SCHEMA_FIELDS)


def problem_of(body: Body, model: Model) -> str | None:
    """Return what is wrong with a body whose fields are each of the right type and in range, or None."""
    max_choices = model.max_choices
    if body.stream:
        return "body.stream must be false or absent: a batch has no streams"
    if isinstance(body, EmbeddingBody | MessagesBody | ResponsesBody):
        return _other_problem(body, model.allowed_media_hosts)
    if (body.n is not None and body.n > max_choices) or (body.best_of is not None and body.best_of > max_choices):
        field = "n" if body.n is not None and body.n > max_choices else "best_of"
        return f"body.{field} must be at most {max_choices} for this model; ask again in further lines for more answers"
    refused = (
        body.chat_template,
        body.vllm_xargs,
        body.logits_processors,
        body.mm_processor_kwargs,
        body.media_io_kwargs,
        body.prompt_embeds,
    )
    if refused != _NOT_REFUSED and (problem := _refused_field(body, _REFUSED_SAMPLING)) is not None:
        return problem
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
            if (problem := grammars.problem_of(field, bytes(raw))) is not None:
                return problem
    return (
        _chat_problem(body, model.allowed_media_hosts)
        if isinstance(body, ChatBody)
        else _completion_problem(body, max_choices)
    )


def _other_problem(body: EmbeddingBody | MessagesBody | ResponsesBody, media_hosts: Sequence[str]) -> str | None:
    if isinstance(body, ResponsesBody):
        return _responses_problem(body, media_hosts)
    return _messages_problem(body, media_hosts) if isinstance(body, MessagesBody) else _embedding_problem(body)


def _refused_field(body: Body, fields: Sequence[str]) -> str | None:
    for field in fields:
        if is_given(getattr(body, field)):
            return f"body.{field} is not taken: {STATEFUL.get(field) or REFUSED[field]}"
    return None


def _embedding_problem(body: EmbeddingBody) -> str | None:
    if is_given(body.messages):
        return "body.messages is not taken by /v1/embeddings: give the texts as body.input"
    problem = _refused_field(body, ("chat_template", "mm_processor_kwargs", "media_io_kwargs"))
    if problem is not None:
        return problem
    given = prompts(body)
    if given is None:
        return f"body.input must be {RULES['input']}, and not empty"
    if len(given) > MAX_EMBEDDING_INPUTS:
        return f"body.input has {len(given)} texts: at most {MAX_EMBEDDING_INPUTS} fit in one request; use more lines"
    return None


def _completion_problem(body: CompletionBody, max_choices: int) -> str | None:
    given = prompts(body)
    if given is None:
        return f"body.prompt must be {RULES['prompt']}, and not empty"
    if len(given) * (body.n or 1) > max_choices:
        return f"body.prompt and body.n ask for more than {max_choices} answers in one request: use more lines"
    return None


def _chat_problem(body: ChatBody, media_hosts: Sequence[str]) -> str | None:
    for number, message in enumerate(body.messages):
        if message.content is None and message.role != "assistant":
            return f"body.messages[{number}].content is missing: it must be a text or a list of text parts"
        if message.content.__class__ is list:
            for url in message.media():
                if (problem := media.problem_of(url, media_hosts)) is not None:
                    return f"body.messages[{number}].content must be a text or a list of text parts: {problem}"
    if body.chat_template_kwargs is not NOTHING and (problem := _variables_problem(body.chat_template_kwargs)):
        return problem
    if body.tool_choice is not NOTHING and bytes(body.tool_choice) not in (b"null", b'"none"', b'"auto"'):
        return grammars.problem_of("tools", bytes(body.tools))
    return None


def _messages_problem(body: MessagesBody, media_hosts: Sequence[str]) -> str | None:
    problem = _refused_field(body, ("vllm_xargs",))
    if problem is not None:
        return problem
    if isinstance(body.system, list) and any(block.type != "text" for block in body.system):
        return f"body.system must be {RULES['system']}"
    for number, turn in enumerate(body.messages):
        for block in turn.content if isinstance(turn.content, list) else ():
            for url in block.media():
                if (problem := media.problem_of(url, media_hosts)) is not None:
                    return f"body.messages[{number}].content must be a text or a list of text blocks: {problem}"
    for field in ("output_config", "thinking", "tool_choice", "metadata"):
        if is_given(raw := getattr(body, field)) and (problem := grammars.problem_of(field, bytes(raw))) is not None:
            return problem
    if is_given(body.tools) and _compiles_tools(body):
        problem = grammars.problem_of("tools", bytes(body.tools))
    return problem or _variables_problem(body.chat_template_kwargs)


def _responses_problem(body: ResponsesBody, media_hosts: Sequence[str]) -> str | None:
    if body.background:
        return "body.background must be false or absent: a batch as a whole is in the background"
    problem = _refused_field(body, _REFUSED_RESPONSES)
    if problem is not None:
        return problem
    for number, item in enumerate(body.items):
        if (problem := _item_problem(item, media_hosts)) is not None:
            return f"body.input[{number}]{problem}"
    for field, decoder, rule in (
        ("tools", _tools, "a list of tools of the types function and custom: no others are run for a batch"),
        ("tool_choice", _tool_choice, '"none", "auto", "required", or one of your own tools'),
    ):
        try:
            decoder.decode(getattr(body, field))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return f"body.{field} must be {rule}"
    for field in ("text", "structured_outputs", "reasoning", "tool_choice", "metadata"):
        if is_given(raw := getattr(body, field)) and (problem := grammars.problem_of(field, bytes(raw))) is not None:
            return problem
    if is_given(body.tools) and _compiles_tools(body):
        problem = grammars.problem_of("tools", bytes(body.tools))
    return problem or _variables_problem(body.chat_template_kwargs)


_NEEDED: dict[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "custom_tool_call": ("call_id", "name", "input"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call_output": ("call_id", "output"),
    "reasoning": ("summary",),
}
"""What an item of each type has to have."""


def _item_problem(item: Item, media_hosts: Sequence[str]) -> str | None:
    """Return what is wrong with an item of the input, to be read after its place."""
    for field in _NEEDED[item.type]:
        if getattr(item, field) is None:
            return f".{field} is missing: an item of the type {item.type} has one"
    is_first_only = item.role == "assistant" or item.type == "reasoning"
    if is_first_only and isinstance(item.content, list) and len(item.content) > 1:
        return ".content has more than one part, and the engine would read the first one only; join them"
    if (item.type == "message" and item.content == []) or item.output == []:
        return " has an empty list of parts: give a text or at least one part"
    for url in item.media():
        if (problem := media.problem_of(url, media_hosts)) is not None:
            return f" must be of text parts: {problem}"
    return None


def _compiles_tools(body: MessagesBody | ResponsesBody) -> bool:
    """Return whether an engine may make a grammar of the tools: a call is demanded, or one of them is strict."""
    tools = bytes(body.tools)
    return is_given(body.tool_choice) or b"strict" in tools or b"\\u" in tools


def _variables_problem(raw: Raw) -> str | None:
    """Return what is wrong with the variables of the chat template: plain values, and none that replaces its input."""
    if not is_given(raw):
        return None
    where = "body.chat_template_kwargs"
    try:
        variables: dict[str, Any] = _template_variables.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return f"{where} must be an object of texts of at most 1024 characters, numbers, true or false"
    if len(variables) > MAX_TEMPLATE_VARIABLES:
        return f"{where} has {len(variables)} names, and at most {MAX_TEMPLATE_VARIABLES} are allowed"
    own = sorted(_TEMPLATES_OWN & variables.keys())
    return f"{where} must not set {own[0]}" if own else None
