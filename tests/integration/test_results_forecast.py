"""What is expected of a batch whose model has lost its workers for good, on a ledger with a stepped clock."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import WorkerState
from batch_pipeline.live import LiveHours
from batch_pipeline.models import Model
from batch_pipeline.results.status import StatusDocument, current_status
from batch_pipeline.settings import Live, Scheduling, Settings
from tests.fakes.clock import SteppedClock
from tests.fakes.ledger_values import MODEL, intake_result, new_batch

CATALOGUE = Settings(models={MODEL: Model(source="none", context_length=64)})
NO_WORKER = f"it cannot be done by its deadline, since no worker of {MODEL} can run"
REMOVED = f"{NO_WORKER}: the service's catalogue has no model {MODEL} (any more)"


class Service:
    """One batch in progress, and its status under one configuration or another."""

    def __init__(self, ledger: Ledger, clock: SteppedClock) -> None:
        self.ledger = ledger
        self.clock = clock
        self.batch = ledger.batches.create(new_batch("acme/notes"))
        ledger.batches.record_intake(self.batch.batch_id, intake_result([MODEL] * 4))

    def has_worker(self, state: WorkerState = WorkerState.READY) -> None:
        """A worker of the model has measured 1,000 tokens a second, and is in this state."""
        self.ledger.workers.register("w", MODEL, None, "here")
        self.ledger.workers.set_state("w", WorkerState.READY)
        self.ledger.workers.heartbeat("w", tokens_per_second=1000.0)
        self.ledger.workers.set_state("w", state)

    def status(self, settings: Settings) -> StatusDocument:
        """The status by what the queues hold now: an earlier look at them counts for some seconds."""
        self.clock.advance(6)
        return current_status(self.batch.batch_id, ledger=self.ledger, settings=settings)


@pytest.fixture
def service(sqlite_url: str) -> Iterator[Service]:
    clock = SteppedClock()
    ledger = Ledger.open(sqlite_url, lease_seconds=60, clock=clock)
    yield Service(ledger, clock)
    ledger.close()


def needing(gpus: int) -> Settings:
    """A configuration with one GPU, and a model whose workers need so many."""
    model = CATALOGUE.models[MODEL]
    needed = msgspec.structs.replace(model.kubernetes, gpus=gpus)
    return Settings(
        models={MODEL: msgspec.structs.replace(model, kubernetes=needed)}, scheduling=Scheduling(total_gpus=1)
    )


@pytest.mark.parametrize("was_measured", [True, False])
def test_a_batch_whose_model_has_left_the_catalogue_is_warned_of(service: Service, was_measured: bool) -> None:
    assert service.status(CATALOGUE).warning is None
    if was_measured:
        service.has_worker(WorkerState.STOPPED)
    document = service.status(Settings(models={}))
    assert (document.warning, document.estimated_finish_at) == (REMOVED, None)
    assert service.status(CATALOGUE).warning is None, "it is back"


@pytest.mark.parametrize("was_measured", [True, False])
def test_a_batch_whose_model_needs_more_gpus_than_there_are_is_warned_of(service: Service, was_measured: bool) -> None:
    if was_measured:
        service.has_worker(WorkerState.STOPPED)
    warning = service.status(needing(8)).warning
    assert warning == f"{NO_WORKER}: each needs 8 GPUs, and the service has 1 (scheduling.total_gpus)"
    assert service.status(needing(1)).warning is None


@pytest.mark.parametrize("state", [WorkerState.STARTING, WorkerState.READY, WorkerState.DRAINING])
def test_a_worker_that_is_there_goes_on_whatever_the_catalogue_says_by_now(
    service: Service, state: WorkerState
) -> None:
    service.has_worker(state)
    for settings in (Settings(models={}), needing(8)):
        assert service.status(settings).warning is None
    service.clock.advance(61)
    assert service.status(Settings(models={})).warning == REMOVED, "it is lost"


def test_gpus_that_live_traffic_has_by_the_schedule_are_no_free_ones(service: Service) -> None:
    service.has_worker(WorkerState.STOPPED)
    assert service.status(CATALOGUE).estimated_finish_at is not None, "a worker is to come, as fast as the one before"
    always = Live(schedule=[LiveHours(hours="00:00-24:00", gpus=1)])
    assert service.status(msgspec.structs.replace(CATALOGUE, live=always)).estimated_finish_at is None
