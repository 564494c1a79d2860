"""Our objects have every field of the SDK's types, and docs/compatibility.md says what becomes of each."""

from __future__ import annotations

import re
from pathlib import Path

import openai.types as sdk
import pytest
from openai.types.batch_create_params import BatchCreateParams
from openai.types.file_create_params import FileCreateParams
from openai.types.upload_complete_params import UploadCompleteParams
from openai.types.upload_create_params import UploadCreateParams
from openai.types.uploads import UploadPart
from pydantic import BaseModel

from batch_pipeline.api import openai_objects as ours

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "compatibility.md").read_text(encoding="utf-8")
OBJECTS: list[tuple[type[BaseModel], type[BaseModel]]] = [
    (sdk.Batch, ours.BatchObject),
    (sdk.BatchError, ours.BatchError),
    (sdk.BatchRequestCounts, ours.RequestCounts),
    (sdk.BatchUsage, ours.BatchUsage),
    (sdk.FileObject, ours.FileObject),
    (sdk.FileDeleted, ours.FileDeleted),
    (sdk.Upload, ours.UploadObject),
    (UploadPart, ours.UploadPart),
]


@pytest.mark.parametrize(("theirs", "mine"), OBJECTS, ids=lambda kind: kind.__name__)
def test_no_field_of_the_sdk_is_missing(theirs: type[BaseModel], mine: type[BaseModel]) -> None:
    assert theirs.model_fields.keys() - mine.model_fields.keys() == set()


def section(title: str) -> str:
    found = re.search(rf"^### {title}.*?(?=^### |\Z)", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found.group()


@pytest.mark.parametrize(
    ("title", "fields"),
    [
        ("The batch object", sdk.Batch.model_fields.keys() | ours.BatchObject.model_fields.keys()),
        ("`POST /v1/batches`", set(BatchCreateParams.__annotations__) | {"on_invalid", "name"}),
        ("Files", sdk.FileObject.model_fields.keys() | set(FileCreateParams.__annotations__) - {"file"}),
        ("Uploads", sdk.Upload.model_fields.keys() | set(UploadCompleteParams.__annotations__) | {"mime_type"}),
    ],
)
def test_the_document_says_what_becomes_of_each_field(title: str, fields: set[str]) -> None:
    named = set(re.findall(r"[a-z_0-9]+", " ".join(re.findall(r"`([^`]*)`", section(title)))))
    assert fields - named == set()


def test_every_parameter_of_a_creation_is_taken() -> None:
    assert set(BatchCreateParams.__annotations__) - ours.CreateBatch.model_fields.keys() == set()
    assert set(UploadCreateParams.__annotations__) - ours.CreateUpload.model_fields.keys() == set()
    assert set(UploadCompleteParams.__annotations__) - ours.CompleteUpload.model_fields.keys() == set()
