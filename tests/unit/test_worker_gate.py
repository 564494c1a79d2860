"""The gate: refusals of the engine as a whole are answered with growing pauses, single ones with none."""

from __future__ import annotations

import itertools
import random

from batch_pipeline.worker.gate import Gate, GateState
from batch_pipeline.worker.pauses import LONGEST_SECONDS, MOST_ASKED_SECONDS, pause_seconds


def refuse_all(gate: Gate, now: float, requests: int = 64) -> None:
    epochs = [gate.fed() for _ in range(requests)]
    for epoch in epochs:
        gate.refused(epoch, now)


def test_an_engine_that_refuses_for_an_hour_is_asked_a_handful_of_times_a_minute() -> None:
    gate = Gate(random.Random(1))
    now, tries = 0.0, []
    refuse_all(gate, now)
    while now < 3600:
        assert gate.state is GateState.CLOSED
        assert not gate.may_feed(gate.opens_at - 0.001)
        now = gate.opens_at
        assert gate.may_feed(now)
        epoch = gate.fed()
        assert not gate.may_feed(now), "one probe at a time"
        tries.append(now)
        assert gate.refused(epoch, now)
    assert len([at for at in tries if at < 60]) <= 6
    assert len(tries) < 100
    pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert max(pauses) <= LONGEST_SECONDS * 1.25
    assert min(pauses[6:]) >= LONGEST_SECONDS * 0.75


def test_the_first_answer_opens_the_gate_for_all() -> None:
    gate = Gate(random.Random(1))
    refuse_all(gate, 0.0)
    gate.fed()
    gate.answered()
    assert gate.state is GateState.OPEN
    assert all(gate.may_feed(gate.opens_at) for _ in range(100))


def test_late_refusals_of_requests_from_before_do_not_make_the_pause_longer() -> None:
    one, many = Gate(random.Random(1)), Gate(random.Random(1))
    refuse_all(one, 0.0, 4)
    refuse_all(many, 0.0, 64)
    assert many.opens_at == one.opens_at


def test_ten_refusals_among_five_thousand_answers_never_close_the_gate() -> None:
    gate = Gate(random.Random(1))
    for number in range(5000):
        epoch = gate.fed()
        if number % 500 == 7:
            gate.refused(epoch, 0.0)
        else:
            gate.answered()
        assert gate.state is GateState.OPEN


def test_half_of_the_requests_refused_means_the_engine() -> None:
    gate = Gate(random.Random(1))
    for number in range(16):
        epoch = gate.fed()
        if number % 2:
            gate.refused(epoch, 0.0)
        else:
            gate.answered()
    assert gate.state is GateState.CLOSED


def test_a_probe_that_ends_without_a_word_is_followed_by_another() -> None:
    gate = Gate(random.Random(1))
    refuse_all(gate, 0.0)
    now = gate.opens_at
    epoch = gate.fed()
    assert not gate.may_feed(now)
    gate.abandoned(epoch - 1)
    assert not gate.may_feed(now), "that was not the probe"
    gate.abandoned(epoch)
    assert gate.may_feed(now)


def test_retry_after_is_honoured_within_reason() -> None:
    gate = Gate(random.Random(1))
    for _ in range(4):
        gate.refused(gate.fed(), 100.0, asked_seconds=45.0)
    assert gate.opens_at >= 145.0
    assert pause_seconds(1, random.Random(1), asked_seconds=1e9) == MOST_ASKED_SECONDS


def test_pauses_of_many_who_wait_differ() -> None:
    source = random.Random(1)
    assert len({pause_seconds(3, source) for _ in range(50)}) == 50
    assert all(6.0 <= pause_seconds(3, source) <= 10.0 for _ in range(50))


def test_further_failures_of_one_request_close_nothing_but_count_as_a_probe() -> None:
    gate = Gate(random.Random(1))
    for _ in range(100):
        assert not gate.refused(gate.fed(), 0.0, has_failed_before=True)
    assert gate.state is GateState.OPEN
    refuse_all(gate, 0.0)
    assert gate.may_feed(gate.opens_at)
    assert gate.refused(gate.fed(), gate.opens_at, has_failed_before=True)
    assert gate.state is GateState.CLOSED
