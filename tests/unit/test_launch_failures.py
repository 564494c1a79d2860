"""What a launch that cannot be done says, and what may be tried again."""

from __future__ import annotations

import dagster as dg
import pytest

from assets.chunk_results import ChunkResultsConfig
from assets.failures import in_one_sentence
from batch_pipeline.errors import (
    BatchPipelineError,
    EngineError,
    NotAllowedInState,
    NotFound,
    OperatorError,
    ProofFailed,
    StoreError,
)
from batch_pipeline.results.demand import StillOpen
from batch_pipeline.store import ObjectMissing


@pytest.mark.parametrize(
    "error",
    [
        NotFound("no batch b"),
        NotAllowedInState("batch b\nis over"),
        StillOpen("after 60 s"),
        OperatorError("no key"),
        EngineError("it died"),
        ProofFailed(["one line too many"]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_our_errors_end_a_run_in_one_sentence_and_are_not_tried_again(error: BatchPipelineError) -> None:
    with pytest.raises(dg.Failure) as failed, in_one_sentence():
        raise error
    assert failed.value.description is not None
    assert failed.value.description.startswith(str(error).replace("\n", " "))
    assert "\n" not in failed.value.description
    assert failed.value.allow_retries is False


@pytest.mark.parametrize("error", [StoreError("it is away"), ObjectMissing("gone"), TimeoutError("of a socket")])
def test_an_outage_stays_an_error_that_may_be_tried_again(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, in_one_sentence():
        raise error
    assert raised.value is error


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"wait_minutes": 0}, "wait_minutes is 0: input should be greater than 0"),
        ({"priority": 1001}, "priority is 1001: input should be less than or equal to 1000"),
        ({"priority": -1001}, "priority is -1001: input should be greater than or equal to -1000"),
        (
            {"run_again_model_version": "2"},
            "run_again_model_version is 2 without run_again: true, so nothing would run again; give both, or neither",
        ),
    ],
)
def test_a_value_out_of_its_bounds_is_one_sentence(given: dict[str, object], said: str) -> None:
    with pytest.raises(dg.Failure) as failed:
        ChunkResultsConfig(**given)
    assert failed.value.description == f"the config of this launch cannot be used, and nothing was changed: {said}"
    assert failed.value.__suppress_context__, "and no traceback of pydantic"


def test_values_within_their_bounds_are_taken() -> None:
    config = ChunkResultsConfig(priority=-1000, run_again=True, run_again_model_version="2", wait_minutes=0.5)
    assert (config.priority, config.run_again_model_version) == (-1000, "2")
