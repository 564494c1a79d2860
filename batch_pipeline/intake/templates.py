"""Chat templates as the model's folder has them, rendered as transformers renders them, without importing it (seconds).

See `transformers.utils.chat_template_utils`: a sandboxed, immutable Jinja environment with trimmed blocks, loop
controls and the `generation` tag. A test compares both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class TemplateFailed(Exception):
    """The template cannot be read, or refuses this conversation. The engine will say what it thinks of it."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant said, for training; for rendering it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - the base class has it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """The chat template of one model, with the names of its special tokens."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateFailed(str(error)) from error
        self._special_tokens = special_tokens

    @classmethod
    def of(cls, folder: Path) -> ChatTemplate | None:
        """Return the template in a model's folder, or None where there is none. Raises TemplateFailed."""
        configuration = _read_json(folder / "tokenizer_config.json")
        own_file = folder / "chat_template.jinja"
        source = own_file.read_text(encoding="utf-8") if own_file.is_file() else configuration.get("chat_template")
        if isinstance(source, list):
            named = {entry.get("name"): entry.get("template") for entry in source}
            source = named.get("default")
        if not isinstance(source, str):
            return None
        return cls(source, _special_tokens(configuration))

    def render(
        self,
        messages: Sequence[dict[str, str]],
        *,
        add_generation_prompt: bool,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """Return the prompt of a conversation. Raises TemplateFailed where the template refuses it."""
        try:
            return self._template.render(
                {
                    **(variables or {}),
                    **self._special_tokens,
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                    "tools": None,
                    "documents": None,
                }
            )
        # A template is a program of the model's maker, run on a customer's values: any of its statements may fail.
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise TemplateFailed(str(error)) from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TemplateFailed(f"{file.name}: {error}") from error
    return found if isinstance(found, dict) else {}


def _special_tokens(configuration: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name, value in configuration.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
