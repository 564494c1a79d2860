"""Counts the tokens of a model's prompts: bounds that cost nothing, and the exact number from the model's own
tokenizer.

A token stands for at least one byte of text, so there are never more tokens than bytes (`TokenCounter.at_most`); and
none stands for more bytes than the longest one of the vocabulary, so there are never fewer than bytes by that
(`at_least`).
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from batch_pipeline.intake.bodies import Conversation, MessagesBody
from batch_pipeline.intake.responses import ResponsesBody
from batch_pipeline.intake.templates import ChatTemplate, TemplateFailed
from batch_pipeline.intake.values import is_given

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_GROWTH = {
    **{"NFC": 3, "NFD": 4, "NFKC": 11, "NFKD": 11, "Precompiled": 11, "BertNormalizer": 4, "Lowercase": 2},
    **dict.fromkeys(("Prepend", "Strip", "StripAccents", "Replace", "Nmt"), 1),
}
"""How many times more bytes a normalizer can make of text that is not ASCII (Unicode's FAQ on normalization)."""
_UNKNOWN_GROWTH = 16
_SLICE_CHARACTERS = 128 * 1024
_SEAM_TOKENS = 64
"""More tokens than cutting a text in two can add at the seam."""
_UNKNOWN_TEMPLATE = (4096, 512)
_DROPPED = "x-anthropic-billing-header"
"""vLLM leaves out system blocks that begin with it."""
_ENGINES_BUSINESS = ("tools", "documents", "chat_template", "chat_template_kwargs")

Counts = npt.NDArray[np.int64]


class _Description(msgspec.Struct, frozen=True):
    """The part of a tokenizer.json that bounds need."""

    normalizer: dict[str, Any] | None = None


class TokenCounter:
    """Counts for the model in a folder, which may be missing on this machine: then only `at_most` is of use.

    The tokenizer is loaded when the first text has to be counted.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "tokenizer.json"
        self.is_exact = self._file.is_file()
        """Whether texts can be counted on this machine."""
        try:
            self._template = ChatTemplate.of(folder) if self.is_exact else None
        except TemplateFailed:
            self._template = None
        self._base, self._per_message = _template_bytes(self._template)
        self._growth = _growth(_read_normalizer(self._file)) if self.is_exact else 1

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        if not self.is_exact:
            raise ValueError("the model has no tokenizer on this machine")
        tokenizer = Tokenizer.from_file(str(self._file))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def _longest(self) -> int:
        return _longest_token(self._tokenizer) if self.is_exact else 0

    def at_most(self, body: bytes, messages: int) -> int:
        """Return a number that a prompt's tokens never exceed, from the JSON that holds it.

        JSON never writes a text in fewer bytes than it has. `messages` is 0 for a prompt that no template is put
        around.
        """
        size = len(body)
        if self._growth != 1 and (not body.isascii() or b"\\u" in body):
            size *= self._growth
        return size + (self._base + messages * self._per_message if messages else 8)

    def all_at_most(self, body_bytes: Counts, messages: Counts) -> Counts:
        """Return what `at_most` does for bodies of so many bytes, or more where it would look at their characters."""
        around: Counts = np.where(messages > 0, self._base + messages * self._per_message, 8)
        return body_bytes * self._growth + around

    def at_least(self, characters: int) -> int:
        """Return a number that the tokens of a text never fall below; 0 where that cannot be known without counting."""
        return characters // self._longest if self._longest else 0

    def count(self, text: str, *, special_tokens: bool, limit: int) -> int:
        """Return the tokens of a text; where there are more than `limit`, some number above it.

        Memory follows `limit` and not the text. Raises ValueError where this machine has no tokenizer.
        """
        if len(text) > _SLICE_CHARACTERS:
            surely = 0
            for start in range(0, len(text), _SLICE_CHARACTERS):
                part = text[start : start + _SLICE_CHARACTERS]
                surely += max(0, self._encoded(part, special_tokens=False) - _SEAM_TOKENS)
                if surely > limit:
                    return surely
        return self._encoded(text, special_tokens=special_tokens)

    def _encoded(self, text: str, *, special_tokens: bool) -> int:
        # "Fast" leaves out where in the text each token is, which takes a quarter of the time.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)
        return len(encoding)

    def prompt_of(self, body: Conversation) -> str | None:
        """Return the text that the engine makes of a conversation, or None where only the engine can tell."""
        if isinstance(body, MessagesBody):
            return self._prompt_of_messages(body)
        if isinstance(body, ResponsesBody):
            made = body.plain_messages()
            return None if made is None else self._rendered(made, add_generation_prompt=True)
        if self._template is None or body.continue_final_message:
            return None
        if any(is_given(getattr(body, field)) for field in _ENGINES_BUSINESS):
            return None
        if any(is_given(message.tool_calls) or message.media() for message in body.messages):
            return None
        messages = [{"role": message.role, "content": message.text()} for message in body.messages]
        return self._rendered(messages, add_generation_prompt=body.add_generation_prompt is not False)

    def _prompt_of_messages(self, body: MessagesBody) -> str | None:
        """As `prompt_of`: vLLM makes a conversation of it in which the system prompt is the first message."""
        if any(
            is_given(getattr(body, field)) for field in ("tools", "thinking", "output_config", "chat_template_kwargs")
        ):
            return None
        system = body.system_text()
        if _DROPPED in system or any(turn.role == "system" or not turn.is_plain for turn in body.messages):
            return None
        messages = [{"role": turn.role, "content": turn.text()} for turn in body.messages]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        return self._rendered(messages, add_generation_prompt=True)

    def _rendered(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str | None:
        if self._template is None:
            return None
        try:
            return self._template.render(messages, add_generation_prompt=add_generation_prompt)
        except TemplateFailed:
            return None


def _template_bytes(template: ChatTemplate | None) -> tuple[int, int]:
    """Return how many bytes a template puts around a conversation, and around each of its messages, at most."""
    if template is None:
        return _UNKNOWN_TEMPLATE
    user, assistant, system = ({"role": role, "content": "x"} for role in ("user", "assistant", "system"))
    try:
        base = _rendered_bytes(template, [user])
        longer = _rendered_bytes(template, [user, assistant, user]) - base
        with_system = _rendered_bytes(template, [system, user]) - base
    except TemplateFailed:
        return _UNKNOWN_TEMPLATE
    return base, max(longer, with_system, 0) + 64


def _rendered_bytes(template: ChatTemplate, messages: list[dict[str, str]]) -> int:
    return len(template.render(messages, add_generation_prompt=True).encode())


def _growth(normalizer: dict[str, Any] | None) -> int:
    if normalizer is None:
        return 1
    kind = normalizer.get("type", "")
    if kind == "Sequence":
        factor = 1
        for part in normalizer.get("normalizers", []):
            factor *= _growth(part)
        return factor
    return _GROWTH.get(kind, _UNKNOWN_GROWTH)


def _read_normalizer(file: Path) -> dict[str, Any] | None:
    return msgspec.json.decode(file.read_bytes(), type=_Description).normalizer


def _longest_token(tokenizer: Tokenizer) -> int:
    """Return the bytes of the vocabulary's longest token, or 0 where one token may stand for a text of any length."""
    description = json.loads(tokenizer.to_str())
    model, text = description["model"], json.dumps(description.get("pre_tokenizer"))
    every_byte_counts = model.get("byte_fallback") or '"ByteLevel"' in text
    drops_text = '"Removed"' in text or description.get("normalizer") is not None
    swallows = any(token.get("lstrip") or token.get("rstrip") for token in description.get("added_tokens", []))
    if model.get("type") != "BPE" or not every_byte_counts or drops_text or swallows:
        return 0
    return max(len(token.encode()) for token in tokenizer.get_vocab(with_added_tokens=True))
