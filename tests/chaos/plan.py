"""The plan of a chaos run: what is killed, how, after which pause. It follows from the seed alone."""

from __future__ import annotations

import random
from collections.abc import Mapping
from enum import StrEnum

import msgspec


class Part(StrEnum):
    """What can be killed."""

    WORKER = "worker"
    ENGINE = "engine"
    STORE = "S3 server"
    LEDGER = "Postgres"
    DAEMON = "Dagster daemon"
    CODE_SERVER = "Dagster code server"
    """With it die the runs in progress, which are its children: intakes, merges, workers."""


class Kill(msgspec.Struct, frozen=True):
    """One entry of the plan."""

    part: Part
    pause_seconds: float
    """From the kill before it."""
    down_seconds: float
    """Until the part is started again (its start comes on top)."""
    sleeps: bool = False
    """SIGSTOP until after its lease has run out and then SIGCONT, instead of SIGKILL. Workers only."""
    pick: float = 0.0
    """Which one of several, as a share of their number, in the order of their process ids."""


SHORT: Mapping[Part, int] = {Part.WORKER: 17, Part.ENGINE: 17, Part.STORE: 6, Part.LEDGER: 6, Part.DAEMON: 4}
"""Shares of a plan of 50: a daemon needs seconds of processor time to start, a worker one."""
LONG: Mapping[Part, int] = {**SHORT, Part.CODE_SERVER: 2}
_SLEEPING_SHARE = 0.2


def make_plan(kills: int, seed: int, shares: Mapping[Part, int], pause_seconds: float) -> list[Kill]:
    """Return `kills` kills in a random order. Every part of `shares` is among them where there are enough kills.

    `pause_seconds`: the mean of the pauses, which lie between a quarter and seven quarters of it.
    """
    source = random.Random(seed)
    parts = list(shares)
    rest = source.choices(parts, weights=list(shares.values()), k=max(0, kills - len(parts)))
    order = [*parts, *rest][:kills]
    source.shuffle(order)
    return [
        Kill(
            part=part,
            pause_seconds=round(pause_seconds * source.uniform(0.25, 1.75), 2),
            down_seconds=round(source.uniform(0.0, 3.0), 2),
            sleeps=part is Part.WORKER and source.random() < _SLEEPING_SHARE,
            pick=source.random(),
        )
        for part in order
    ]
