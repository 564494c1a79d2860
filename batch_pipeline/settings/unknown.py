"""Fields of a TOML file that do not exist: where each is, and which one is likely meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import msgspec
from msgspec import inspect


def unknown_fields(table: Mapping[str, Any], of: type[msgspec.Struct]) -> list[str]:
    """Return a sentence for each field that is in the table, or in one within it, and not in its struct.

    Values of a wrong type are passed over: converting the table says what is wrong with them.
    """
    return list(_look(table, inspect.type_info(of), ""))


def _look(value: object, kind: inspect.Type, where: str) -> Iterator[str]:
    if isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from _look(value, one, where)
    elif isinstance(kind, inspect.StructType) and isinstance(value, Mapping):
        fields = {field.encode_name: field.type for field in kind.fields}
        for name, within in value.items():
            if name in fields:
                yield from _look(within, fields[name], f"{where}{name}.")
            else:
                likely = get_close_matches(str(name), fields, n=1)
                there = f"is {likely[0]} meant?" if likely else f"there are {', '.join(sorted(fields))}"
                yield f"{where}{name}: no such field; {there}"
    elif isinstance(kind, inspect.DictType) and isinstance(value, Mapping):
        for name, within in value.items():
            yield from _look(within, kind.value_type, f"{where}{name}.")
    elif isinstance(kind, inspect.ListType) and isinstance(value, list):
        for number, within in enumerate(value):
            name = within.get("name", number) if isinstance(within, Mapping) else number
            yield from _look(within, kind.item_type, f"{where}{name}.")
