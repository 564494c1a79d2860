"""Our objects have every field of the SDK's types, and docs/compatibility.md says what becomes of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_type_hints

import anthropic.types as sdk
import anthropic.types.messages as batches
import pytest
from anthropic.types.messages import batch_create_params, batch_list_params

from batch_pipeline.api.anthropic_objects import MessageBatch, MessageBatchDeleted, RequestCounts

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"


def section() -> str:
    """What the page says of Anthropic's API."""
    return DOCUMENT.read_text(encoding="utf-8").partition("\n## Anthropic\n")[2]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (MessageBatch, batches.MessageBatch),
        (RequestCounts, batches.MessageBatchRequestCounts),
        (MessageBatchDeleted, batches.DeletedMessageBatch),
    ],
)
def test_objects_have_the_fields_of_the_sdks_types_and_no_others(ours: Any, theirs: Any) -> None:
    assert ours.model_fields.keys() == theirs.model_fields.keys()
    for field in theirs.model_fields:
        assert f"`{field}`" in section(), field


@pytest.mark.parametrize(
    "asked",
    [
        sdk.message_create_params.MessageCreateParamsBase,
        batch_create_params.BatchCreateParams,
        batch_list_params.BatchListParams,
        batch_create_params.Request,
    ],
)
def test_page_says_what_becomes_of_every_parameter(asked: type) -> None:
    said = section()
    missing = [field for field in get_type_hints(asked, include_extras=True) if f"`{field}`" not in said]
    assert missing == []


def test_page_names_every_kind_of_result_and_error() -> None:
    said = section()
    for kind in ("succeeded", "errored", "canceled", "expired"):
        assert f"result `{kind}`" in said or f"`{kind}`" in said
    for error in ("invalid_request_error", "not_found_error", "rate_limit_error", "api_error", "timeout_error"):
        assert f"`{error}`" in said
