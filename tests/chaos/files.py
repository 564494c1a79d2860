"""The files that a chaos run drops: several customers, different sizes, bad lines, a cancel, a short deadline."""

from __future__ import annotations

import json

import msgspec

MODEL = "chaos"
_WORDS = "the quick brown fox says a word to the helpful assistant"
_EVERY_BAD, _EVERY_REFUSED = 97, 101


class Dropped(msgspec.Struct, frozen=True):
    """One file. Every `_EVERY_BAD`th line is bad (by turns: not JSON, no body, a model that is unknown)."""

    customer: str
    name: str
    requests: int
    window: str = "2h"
    cancel_after: float | None = None
    """Cancelled by its customer when this share of the kills is done; None for never."""

    def lines(self) -> list[str]:
        """Return the lines of the file; the prompt's last line names the request in the engines' journal."""
        return [self._line(index) for index in range(self.requests)]

    def expected(self) -> list[str]:
        """Return what must come back once, for each line: its custom_id, or its number where that is unreadable."""
        return [f"line {index + 1}" if _is_broken(index) else self.label(index) for index in range(self.requests)]

    def label(self, index: int) -> str:
        """Return the custom_id of a line."""
        return f"{self.customer}-{self.name}-{index}"

    def _line(self, index: int) -> str:
        if _is_broken(index):
            return '{"custom_id": "broken'
        directive = "[[400]] " if index % _EVERY_REFUSED == 7 else ""
        prompt = f"{_WORDS} {directive}{index % 13}\n{self.label(index)}"
        body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": 16}
        line = {"custom_id": self.label(index), "method": "POST", "url": "/v1/chat/completions", "body": body}
        if index % _EVERY_BAD == 1:
            del line["body"]
        if index % _EVERY_BAD == 2:
            body["model"] = "unknown"
        return json.dumps(line)


def _is_broken(index: int) -> bool:
    return index % _EVERY_BAD == 0


def workload(size: int) -> list[Dropped]:
    """Return the files; `size` is about how many requests are to be finished while things are killed."""
    return [
        Dropped("acme", "endless", 4 * size, cancel_after=0.9),
        Dropped("acme", "notes", size // 4),
        Dropped("globex", "invoices", size // 2),
        Dropped("globex", "hurried", size, window="110s"),
        Dropped("initech", "tickets", size // 8),
        Dropped("initech", "few", 40),
    ]
