"""Quarantine: suspects run alone, the culprit is found, everybody else is cleared."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batch_pipeline.worker.quarantine import Quarantine


class Request:
    """Told apart by identity."""

    def __init__(self, kills: bool = False) -> None:
        self.kills = kills
        self.runs_alone = 0


def judge(quarantine: Quarantine[Request]) -> list[Request]:
    """Run the suspects alone until none is left; return those that were found guilty."""
    guilty = []
    while (suspect := quarantine.next()) is not None:
        assert quarantine.next() is None, "one at a time"
        suspect.runs_alone += 1
        if suspect.kills:
            guilty += quarantine.engine_died([suspect])
        else:
            quarantine.cleared(suspect)
    return guilty


@given(st.lists(st.booleans(), min_size=2, max_size=30), st.integers(1, 5))
def test_exactly_the_killers_are_found_guilty_after_so_many_tries_alone(kills: list[bool], max_deaths: int) -> None:
    requests = [Request(kill) for kill in kills]
    quarantine: Quarantine[Request] = Quarantine(max_deaths)
    assert quarantine.engine_died(requests) == []
    assert len(quarantine) == len(requests)
    assert judge(quarantine) == [request for request in requests if request.kills]
    assert all(request.runs_alone == (max_deaths if request.kills else 1) for request in requests)
    assert len(quarantine) == 0


def test_a_request_that_was_alone_at_the_first_death_has_one_try_less() -> None:
    killer = Request(kills=True)
    quarantine: Quarantine[Request] = Quarantine(3)
    assert quarantine.engine_died([killer]) == []
    assert judge(quarantine) == [killer]
    assert killer.runs_alone == 2


def test_a_death_with_nothing_in_flight_accuses_nobody() -> None:
    quarantine: Quarantine[Request] = Quarantine(3)
    assert quarantine.engine_died([]) == []
    assert len(quarantine) == 0


def test_a_suspect_whose_chunk_was_lost_is_forgotten_also_while_it_runs() -> None:
    kept, dropped = Request(), Request()
    quarantine: Quarantine[Request] = Quarantine(3)
    quarantine.engine_died([dropped, kept])
    assert quarantine.next() is dropped
    quarantine.drop(lambda request: request is dropped)
    assert quarantine.next() is kept
    quarantine.cleared(kept)
    assert len(quarantine) == 0


def test_a_suspect_that_never_reached_the_engine_stays_a_suspect() -> None:
    suspect, other = Request(), Request()
    quarantine: Quarantine[Request] = Quarantine(3)
    quarantine.engine_died([suspect, other])
    assert quarantine.next() is suspect
    assert not quarantine.put_back(other)
    assert quarantine.put_back(suspect)
    assert quarantine.next() is suspect
