"""The page on reliability names tests: each of them exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "reliability.md").read_text(encoding="utf-8")


def defined_tests() -> set[str]:
    """The names of all test functions in the integration tests."""
    return {
        node.name
        for file in (REPOSITORY / "tests" / "integration").glob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }


def test_every_fault_has_a_test_that_exists() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", PAGE, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 21))
    named = {number: re.findall(r"`(test_\w+)`", tests) for number, tests in rows}
    assert [number for number, tests in named.items() if not tests] == []


def test_every_test_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert named - defined_tests() == set()
