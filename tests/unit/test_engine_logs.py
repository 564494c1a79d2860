"""What an operator reads when an engine does not start: the reason, and no more."""

from __future__ import annotations

import pytest

from batch_pipeline.engine.logs import telling_lines

CASES = {
    "a bad option": (
        "usage: api_server.py [-h] [--headless]\n                     [--model MODEL]\n"
        "api_server.py: error: unrecognized arguments: --no-such-option\n",
        "api_server.py: error: unrecognized arguments: --no-such-option",
    ),
    "a validation error goes on in the next line": (
        "(APIServer pid=7) Traceback (most recent call last):\n"
        "(APIServer pid=7) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "(APIServer pid=7)   Value error, User-specified max_model_len (9) is greater than 8\n",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig: "
        "Value error, User-specified max_model_len (9) is greater than 8",
    ),
    "the root cause and not what follows from it, once": (
        "(EngineCore pid=9) ERROR 11-29 20:05:24 [core.py:12] ValueError: not enough memory for the cache\n"
        "(EngineCore pid=9) RuntimeError: Worker failed with error 'not enough memory for the cache'\n"
        "(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above. Failed: {}\n",
        "ValueError: not enough memory for the cache",
    ),
    "no error at all": ("starting\nloading weights\nstill loading\n", "loading weights | still loading"),
    "an empty log": ("", "its log is empty"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_reason_is_found_in_the_log(case: str) -> None:
    log, reason = CASES[case]
    assert telling_lines(log) == reason


def test_a_long_reason_is_shortened() -> None:
    told = telling_lines("ValueError: " + "x" * 5000)
    assert len(told) <= 600
    assert told.endswith("…")
