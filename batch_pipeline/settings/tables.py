"""A TOML file's tables as structs: a field that does not exist is told with its place and the one likely meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from batch_pipeline.errors import SettingsError

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def converted(table: Mapping[str, Any], of: type[_Struct], where: str) -> _Struct:
    """Return the table as a struct. Raises SettingsError, whose one line begins with `where`.

    Unknown fields are told first, all of them; then the first value of a wrong type.
    """
    unknown = list(_unknown(table, inspect.type_info(of), ""))
    if unknown:
        raise SettingsError(f"{where}: {'; '.join(unknown)}")
    try:
        return msgspec.convert(table, of, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{where}: {error}") from error


def _unknown(value: object, kind: inspect.Type, where: str) -> Iterator[str]:
    if isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from _unknown(value, one, where)
    elif isinstance(kind, inspect.StructType) and isinstance(value, Mapping):
        fields = {field.encode_name: field.type for field in kind.fields}
        for name, within in value.items():
            if name in fields:
                yield from _unknown(within, fields[name], f"{where}{name}.")
            else:
                likely = get_close_matches(str(name), fields, n=1)
                there = f"is {likely[0]} meant?" if likely else f"there are {', '.join(sorted(fields))}"
                yield f"{where}{name}: no such field; {there}"
    elif isinstance(kind, inspect.DictType) and isinstance(value, Mapping):
        for name, within in value.items():
            yield from _unknown(within, kind.value_type, f"{where}{name}.")
    elif isinstance(kind, inspect.ListType) and isinstance(value, list):
        for number, within in enumerate(value):
            name = within.get("name", number) if isinstance(within, Mapping) else number
            yield from _unknown(within, kind.item_type, f"{where}{name}.")
