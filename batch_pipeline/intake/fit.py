"""Whether a request fits its model's context: exact where it matters, cheap where it does not.

Prompt and answer together must fit. A request of few bytes fits whatever its tokens are, and a huge one does not;
only what lies between is counted with the model's own tokenizer. Where this machine has none, and where making the
prompt is the engine's business (tools, documents), the engine decides: it answers 400, which is an error line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from batch_pipeline.intake.bodies import Body, ChatBody, Conversation, EmbeddingBody, MessagesBody, output_tokens
from batch_pipeline.intake.responses import ResponsesBody
from batch_pipeline.intake.tokens import TokenCounter
from batch_pipeline.models import Model

Prompt = str | list[int]

_BYTES_PER_TOKEN = 4
"""An estimate for plain text, where nothing has to be counted."""
_WIDE_BYTES_PER_TOKEN = 3
MESSAGE_TOKENS = 6
MOST = 2**31 - 1


class Fit(NamedTuple):
    """The size of a request in tokens: estimates for the scheduler, and what is wrong with it, if anything."""

    prompt_tokens: int
    max_tokens: int
    """Of all its answers together."""
    problem: str | None = None


def fit(body: Body, raw: bytes, texts: list[Prompt], model: Model, counter: TokenCounter) -> Fit:
    """Return the size of a request, given its body as it was read and as the JSON it came as.

    `texts` are the contents of its messages, or its prompts.
    """
    asked = output_tokens(body)
    room = model.context_length - (1 if asked is None else asked)
    if room < 1:
        context = f"the context of {body.model} is {model.context_length} tokens, prompt and answer together"
        return Fit(0, 0, f"{_field(body)} is {asked}, and {context}; ask for fewer")
    is_chat = isinstance(body, Conversation)
    messages = len(texts) if is_chat else 0
    counted = None
    if counter.at_most(raw, messages) > room and not _is_cut(body):
        counted = _longest(body, texts, counter, room)
        if counted is not None and counted > room:
            return Fit(0, 0, _too_long(body, model, counted, asked))
    if counted is None or not is_chat:
        counted = messages * MESSAGE_TOKENS + estimate(texts)
    answer = min(model.default_output_tokens, room) if asked is None else asked
    if isinstance(body, EmbeddingBody):
        return Fit(max(1, min(counted, MOST)), 0)
    choices = 1 if isinstance(body, MessagesBody | ResponsesBody) else body.n or 1
    answers = answer * choices * (1 if is_chat else len(texts))
    return Fit(counted or 1, answers if answers < MOST else MOST)


def estimate(texts: Sequence[Prompt]) -> int:
    """Return about how many tokens some prompts have."""
    counted = 0
    for text in texts:
        if isinstance(text, list):
            counted += len(text)
        elif text.isascii():
            counted += len(text) // _BYTES_PER_TOKEN
        else:
            counted += len(text.encode()) // _WIDE_BYTES_PER_TOKEN
    return counted


def _is_cut(body: Body) -> bool:
    """Return whether the engine cuts a prompt that is too long."""
    if isinstance(body, ResponsesBody):
        return body.is_cut
    return not isinstance(body, MessagesBody) and body.truncate_prompt_tokens is not None


def _longest(body: Body, texts: list[Prompt], counter: TokenCounter, room: int) -> int | None:
    """Return the tokens of the body's longest prompt, or some number above `room`, or None where only the engine
    knows.
    """
    if isinstance(body, Conversation):
        least = counter.at_least(sum(map(len, texts)))
        if least > room:
            return least
        prompt = counter.prompt_of(body)
        if prompt is None or not counter.is_exact:
            return None
        # vLLM's own defaults: what it puts around a template is put around that of a response, and of no other.
        asked = isinstance(body, ChatBody) and bool(body.add_special_tokens)
        special_tokens = asked or isinstance(body, ResponsesBody)
        return counter.count(prompt, special_tokens=special_tokens, limit=room)
    longest = 0
    for text in texts:
        if isinstance(text, list):
            longest = max(longest, len(text))
        elif counter.is_exact:
            least = counter.at_least(len(text))
            special = body.add_special_tokens is not False
            longest = max(longest, least if least > room else counter.count(text, special_tokens=special, limit=room))
        if longest > room:
            break
    return longest or None


def _field(body: Body) -> str:
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        return "body.max_completion_tokens"
    if isinstance(body, ResponsesBody):
        return "body.max_output_tokens"
    return "body.max_tokens"


def _too_long(body: Body, model: Model, tokens: int, asked: int | None) -> str:
    context = f"but the context of {body.model} is {model.context_length} tokens"
    if isinstance(body, EmbeddingBody) or asked is None:
        return f"the prompt has {tokens} tokens or more, {context}; shorten the prompt"
    field = _field(body)
    return (
        f"the prompt has {tokens} tokens or more and {field} asks for {asked}, {context}; shorten it or lower {field}"
    )
