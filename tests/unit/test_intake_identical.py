"""Identical are requests whose answer does not depend on chance: only these may share one call of the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batch_pipeline.intake.identical import first_twins
from batch_pipeline.models import MESSAGES, RESPONSES

CHAT = "/v1/chat/completions"


def _is_shared(folder: Path, endpoint: str, **body: Any) -> bool:
    """Whether the second of two requests with this body takes the result of the first."""
    raw = json.dumps(body).encode()
    file = folder / "bodies"
    file.write_bytes(raw * 2)
    places = {"line_offset": [0, len(raw)], "body_start": [0, 0], "body_bytes": [len(raw)] * 2}
    with file.open("rb") as opened:
        return first_twins(pa.table(places), opened.fileno(), endpoint).tolist() == [0, 0]


@pytest.mark.parametrize("endpoint", [CHAT, "/v1/completions", RESPONSES])
def test_a_seed_leaves_nothing_to_chance_where_it_reaches_the_engine(tmp_path: Path, endpoint: str) -> None:
    assert _is_shared(tmp_path, endpoint, seed=5)
    assert not _is_shared(tmp_path, endpoint, seed=None)


def test_a_seed_that_anthropics_api_does_not_have_is_none(tmp_path: Path) -> None:
    """It is left out of the body: each of them is drawn by chance."""
    assert not _is_shared(tmp_path, MESSAGES, seed=5)
    assert _is_shared(tmp_path, MESSAGES, temperature=0)
