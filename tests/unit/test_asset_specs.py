"""Every asset tells an operator what it is, who owns it, what makes it, and what its columns mean."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest

from assets.partitions import OWNERS, RUNS_ON_TAG
from batch_pipeline import settings as configuration
from batch_pipeline.definitions import make_definitions

DEFINITIONS = make_definitions(configuration.load(Path(__file__).resolve().parents[2] / "batch-pipeline.toml"))
SPECS = {spec.key.to_user_string(): spec for spec in DEFINITIONS.resolve_all_asset_specs()}


def test_the_assets_are_these() -> None:
    assert SPECS.keys() == {"uploads", "request_chunks", "chunk_results", "batch_results", "usage_report"}


@pytest.mark.parametrize("asset", sorted(SPECS))
def test_an_asset_has_a_description_owners_kinds_and_a_tag_of_ours(asset: str) -> None:
    spec = SPECS[asset]
    assert spec.description
    assert list(spec.owners) == OWNERS
    assert spec.kinds
    assert spec.tags.get(RUNS_ON_TAG)


@pytest.mark.parametrize("asset", sorted(SPECS))
def test_every_column_of_an_asset_is_described(asset: str) -> None:
    schema = SPECS[asset].metadata["dagster/column_schema"]
    assert isinstance(schema, dg.TableSchema)
    assert schema.columns
    assert [column.name for column in schema.columns if not column.description] == []
