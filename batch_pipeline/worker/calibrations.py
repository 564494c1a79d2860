"""What calibrations have found, kept in the object store for the workers that come later.

One object for each subject. Written with one put: killed before, there is none, or the one from before; after it, it
counts. Of two that were made at the same time the later one stays, and either is as good.
"""

from __future__ import annotations

import hashlib
import logging
from enum import StrEnum

import msgspec

from batch_pipeline.engine import machine
from batch_pipeline.engine.calibration import Search, Step
from batch_pipeline.models import Model
from batch_pipeline.store import ObjectMissing, ObjectStore, keys

log = logging.getLogger(__name__)


class LimitBy(StrEnum):
    """Where a worker has the number of requests from that it keeps in the engine."""

    CONFIGURED = "configured"
    """`max_in_flight` of its model."""
    CALIBRATED = "calibrated"
    DEFAULT = "default"
    """Nobody has said or measured anything."""


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What was calibrated: where one of these differs, another number may be the best."""

    model: str
    model_version: str
    engine_version: str
    engine_arguments: list[str]
    engine_environment_sha256: str
    """A hash, since it may hold secrets."""
    machine: str

    @property
    def key(self) -> str:
        """Where its calibration lies."""
        return keys.calibration(self.model, _sha256(self)[:32])


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests to have in flight, and what was measured."""

    subject: Subject
    in_flight: int
    per_second: float
    """Tokens, prompt and answer, with so many."""
    steps: list[Step]
    at: float
    """When it was made: seconds since the epoch."""


def subject_of(name: str, model: Model, engine_version: str, machine_kind: str) -> Subject:
    """Return what a calibration made here is of; `machine_kind` is found out where it is empty."""
    return Subject(
        model=name,
        model_version=model.version,
        engine_version=engine_version,
        engine_arguments=model.engine_arguments,
        engine_environment_sha256=_sha256(model.engine_environment),
        machine=machine_kind or machine.kind(),
    )


def concluded(subject: Subject, search: Search, at: float) -> Calibration:
    """Return what a search that is over has found; `at` in seconds since the epoch."""
    found = search.found()
    return Calibration(
        subject=subject, in_flight=found.in_flight, per_second=found.per_second, steps=search.steps(), at=at
    )


def recorded(store: ObjectStore, subject: Subject) -> Calibration | None:
    """Return the calibration of a subject, None where there is none. Raises StoreError."""
    try:
        return msgspec.json.decode(store.get(subject.key), type=Calibration)
    except ObjectMissing:
        return None
    except msgspec.DecodeError as error:
        log.warning("%s is not a calibration of this version, and does not count: %s", subject.key, error)
        return None


def record(store: ObjectStore, calibration: Calibration) -> None:
    """Keep a calibration for the workers to come. Raises StoreError."""
    store.put(calibration.subject.key, msgspec.json.encode(calibration), content_type="application/json")


def _sha256(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()
