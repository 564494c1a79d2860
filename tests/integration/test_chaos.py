"""The short chaos run: fifty kills of everything under the real stack. `make chaos` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.__main__ import run
from tests.chaos.plan import LONG, SHORT, Part, make_plan

KILLS = 50


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_fifty_kills_lose_nothing_and_double_nothing_and_no_checkpoint_is_run_again(tmp_path: Path) -> None:
    outcome = run(tmp_path, KILLS, seed=1)
    assert len(outcome.kills) == KILLS
    assert {kill.part for kill in outcome.kills} == set(SHORT)
    whole = outcome.whole
    assert (whole.lost, whole.doubled, whole.unknown, whole.unproved) == ([], [], [], [])
    assert outcome.holds
    # Whatever was asked twice was in flight, or in no checkpoint yet, when something was killed.
    assert outcome.calls.needless == []
    statuses = {name: tally.statuses[0] for name, tally in outcome.files.items()}
    assert {statuses.pop(name) for name in ("notes", "invoices", "tickets", "few")} == {"completed"}
    assert statuses.pop("endless") in {"cancelled", "completed"}
    assert statuses.pop("hurried") in {"expired", "completed"}
    assert not statuses


def test_the_plan_follows_from_the_seed_and_spares_no_part() -> None:
    plan = make_plan(KILLS, 1, SHORT, 2.0)
    assert plan == make_plan(KILLS, 1, SHORT, 2.0)
    assert plan != make_plan(KILLS, 2, SHORT, 2.0)
    assert {kill.part for kill in plan} == set(SHORT)
    assert {kill.part for kill in make_plan(KILLS, 1, LONG, 2.0)} == set(LONG) == set(Part)
    assert {kill.part for kill in plan if kill.sleeps} == {Part.WORKER}
