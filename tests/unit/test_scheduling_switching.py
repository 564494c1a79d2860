"""Who gives GPUs up: to live traffic at once, to another model when it is worth its loading, and never to and fro."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from batch_pipeline.scheduling.placement import Backlog, Capacity, plan_workers
from batch_pipeline.scheduling.switching import Cluster, Departure, Holder, Rules, departures

RULES = Rules(loading_seconds={}, default_loading_seconds=100.0, chunks_per_worker=4, turn=10.0)
NOW = 10_000.0


def backlog(model: str, pending: int, tokens: int = 0) -> Backlog:
    return Backlog(
        model=model, pending=pending, pending_tokens=tokens or pending * 100, leased=0, first_deadline_at=1e9
    )


def capacity(model: str, workers: int, *, limit: int = 8, gpus: int = 1) -> Capacity:
    return Capacity(model=model, workers=workers, pool_limit=limit, gpus_per_worker=gpus)


def holder(name: str, model: str, age: float | None = 5000.0, *, leaving: bool = False, own: bool = False) -> Holder:
    ready_at = None if age is None else NOW - age
    return Holder(worker_id=name, model=model, ready_at=ready_at, is_leaving=leaving, is_dedicated=own)


def ask(
    work: list[Backlog], room: list[Capacity], workers: list[Holder], gpus: int, rules: Rules = RULES
) -> list[Departure]:
    cluster = Cluster(backlogs=work, capacities=room, holders=workers, gpus=gpus, now=NOW)
    return departures(cluster, rules)


def names(asked: list[Departure]) -> list[str]:
    return [departure.worker_id for departure in asked]


def test_two_models_on_one_gpu_take_turns_of_ten_times_the_loading_time() -> None:
    work = [backlog("a", 100), backlog("b", 100)]
    room = [capacity("a", 1), capacity("b", 0)]
    assert ask(work, room, [holder("w", "a", 999.0)], 1) == []
    assert names(ask(work, room, [holder("w", "a", 1000.0)], 1)) == ["w"]
    slow = Rules(loading_seconds={"b": 300.0}, default_loading_seconds=100.0, chunks_per_worker=4, turn=10.0)
    assert ask(work, room, [holder("w", "a", 1000.0)], 1, slow) == []


def test_a_model_whose_one_worker_is_dedicated_gets_a_turn_like_one_without() -> None:
    work = [backlog("a", 100), backlog("b", 3)]
    own = Capacity(model="b", workers=1, dedicated=1, pool_limit=8, gpus_per_worker=1)
    workers = [holder("w", "a", 1000.0), holder("own", "b", own=True)]
    assert names(ask(work, [capacity("a", 1), own], workers, 2)) == ["w"]
    assert names(ask(work, [capacity("a", 1), own], workers, 1)) == ["w"], "live traffic: a dedicated one goes last"
    assert names(ask(work, [capacity("a", 1), own], workers, 0)) == ["w", "own"]


def test_a_worker_with_nothing_left_to_do_goes_at_once_and_one_that_loads_is_left_alone() -> None:
    work = [backlog("b", 100)]
    room = [capacity("a", 1), capacity("b", 0)]
    assert names(ask(work, room, [holder("w", "a", 1.0)], 1)) == ["w"]
    assert ask(work, room, [holder("w", "a", None)], 1) == []


def test_nobody_is_asked_where_a_gpu_is_free_or_about_to_be() -> None:
    work = [backlog("a", 100), backlog("b", 100)]
    assert ask(work, [capacity("a", 1), capacity("b", 0)], [holder("w", "a")], 2) == []
    two = [holder("w1", "a", leaving=True), holder("w2", "a")]
    assert ask(work, [capacity("a", 2), capacity("b", 0)], two, 2) == []


def test_live_traffic_gets_its_gpus_at_once_from_those_that_lose_least() -> None:
    work = [backlog("a", 100), backlog("b", 10)]
    room = [capacity("a", 2), capacity("b", 1)]
    workers = [holder("a1", "a", 5.0), holder("a2", "a", 5.0), holder("b1", "b", 5.0)]
    asked = ask(work, room, workers, 1)
    assert names(asked) == ["b1", "a1"]
    assert all("live traffic" in departure.reason for departure in asked)


def test_dedicated_workers_are_left_to_their_batches_but_not_by_live_traffic() -> None:
    work = [backlog("b", 100)]
    room = [capacity("a", 1), capacity("b", 0)]
    workers = [holder("w", "a", own=True)]
    assert ask(work, room, workers, 1) == []
    assert names(ask(work, room, workers, 0)) == ["w"]


def test_a_large_model_gets_as_many_workers_to_leave_as_it_needs_or_none() -> None:
    work = [backlog("small", 100), backlog("large", 100)]
    room = [capacity("small", 4), capacity("large", 0, gpus=4)]
    workers = [holder(f"w{n}", "small") for n in range(4)]
    assert len(ask(work, room, workers, 4)) == 4
    young = [*workers[:3], holder("w3", "small", 10.0)]
    assert ask(work, room, young, 4) == []


def test_a_served_model_gets_another_worker_only_from_one_that_has_much_less_to_do() -> None:
    room = [capacity("a", 3), capacity("b", 1)]
    workers = [*(holder(f"a{n}", "a") for n in range(3)), holder("b1", "b")]
    assert ask([backlog("a", 90), backlog("b", 100)], room, workers, 4) == []
    assert len(ask([backlog("a", 9), backlog("b", 100)], room, workers, 4)) == 1


def test_a_served_model_with_late_batches_gets_a_worker_of_one_that_has_time() -> None:
    """Which has had its turn, keeps another, and is not late itself."""
    late = msgspec.structs.replace(backlog("b", 100), late_workers=1)
    room = [capacity("a", 2), capacity("b", 1)]
    workers = [holder("a1", "a"), holder("a2", "a", 10.0), holder("b1", "b")]
    assert ask([backlog("a", 900), backlog("b", 100)], room, workers, 3) == []
    assert names(ask([backlog("a", 900), late], room, workers, 3)) == ["a1"]
    assert ask([backlog("a", 900), late], room, [holder("a1", "a", 10.0), *workers[1:]], 3) == []
    assert ask([backlog("a", 900), late], [capacity("a", 1), room[1]], [workers[0], workers[2]], 2) == []
    hurried = msgspec.structs.replace(backlog("a", 900), late_workers=1)
    assert ask([hurried, late], room, workers, 3) == []
    leaving = [holder("a1", "a", leaving=True), *workers[1:]]
    assert ask([backlog("a", 900), late], room, leaving, 3) == [], "one is on its way"


def test_a_full_pool_asks_nobody() -> None:
    work = [backlog("a", 1), backlog("b", 100)]
    room = [capacity("a", 1), capacity("b", 1, limit=1)]
    assert ask(work, room, [holder("a1", "a"), holder("b1", "b")], 2) == []


models = st.sampled_from(["a", "b", "c"])
worlds = st.tuples(
    st.lists(st.builds(backlog, models, st.integers(0, 50)), max_size=3, unique_by=lambda made: made.model),
    st.lists(st.tuples(models, st.floats(0, 9000), st.booleans()), max_size=8),
    st.integers(0, 8),
)


@given(worlds)
def test_after_the_departures_the_launches_fit_and_asking_again_asks_nobody_more(
    world: tuple[list[Backlog], list[tuple[str, float, bool]], int],
) -> None:
    work, running, gpus = world
    workers = [holder(f"w{n}", model, age, own=own) for n, (model, age, own) in enumerate(running)]
    counts = {model: sum(1 for other, _, _ in running if other == model) for model in ("a", "b", "c")}
    room = [capacity(model, count) for model, count in counts.items()]
    asked = set(names(ask(work, room, workers, gpus)))
    left = [made for made in workers if made.worker_id not in asked]
    if len(workers) > gpus:
        assert len(left) <= gpus
    marked = [
        Holder(
            worker_id=made.worker_id,
            model=made.model,
            ready_at=made.ready_at,
            is_leaving=made.worker_id in asked,
            is_dedicated=made.is_dedicated,
        )
        for made in workers
    ]
    assert ask(work, room, marked, gpus) == []
    after = [capacity(model, sum(1 for made in left if made.model == model)) for model in counts]
    launched = plan_workers(work, after, gpus, 4)
    assert len(left) + sum(launch.workers for launch in launched) <= max(gpus, len(left))


@given(worlds)
def test_a_model_without_a_worker_gets_the_gpus_of_those_that_were_asked_to_leave_for_it(
    world: tuple[list[Backlog], list[tuple[str, float, bool]], int],
) -> None:
    work, running, gpus = world
    workers = [holder(f"w{n}", model, age, own=own) for n, (model, age, own) in enumerate(running)]

    def room(those: list[Holder]) -> list[Capacity]:
        return [
            Capacity(
                model=model,
                workers=sum(made.model == model for made in those),
                dedicated=sum(made.model == model and made.is_dedicated for made in those),
                pool_limit=8,
                gpus_per_worker=1,
                # Whoever had a worker has it, or had it a moment ago.
                served_at=NOW if any(made.model == model and not made.is_dedicated for made in workers) else 0.0,
            )
            for model in ("a", "b", "c")
        ]

    asked = ask(work, room(workers), workers, gpus)
    left = [made for made in workers if made.worker_id not in names(asked)]
    without = {"a", "b", "c"} - {made.model for made in workers if not made.is_dedicated}
    wanted = {departure.reason.partition(" waits")[0] for departure in asked} & without
    launched = {launch.model for launch in plan_workers(work, room(left), gpus, RULES.chunks_per_worker)}
    assert wanted <= launched


def test_the_turn_of_a_worker_that_took_long_to_load_is_longer() -> None:
    """What it costs to have it back counts as well as what the other's start takes."""
    slow = Rules(loading_seconds={"a": 600.0, "b": 10.0}, default_loading_seconds=100.0, chunks_per_worker=4, turn=10.0)
    room = [capacity("a", 1), capacity("b", 0)]
    assert ask([backlog("a", 100), backlog("b", 1)], room, [holder("w", "a", 5999.0)], 1, slow) == []
    assert names(ask([backlog("a", 100), backlog("b", 1)], room, [holder("w", "a", 6000.0)], 1, slow)) == ["w"]


def test_a_worker_whose_run_has_just_ended_may_still_be_heard_of() -> None:
    """Its run is not counted any more; the plan must not count below nothing."""
    room = [capacity("a", 0), capacity("b", 0)]
    asked = ask([backlog("b", 100), backlog("a", 100)], room, [holder("w", "a")], 0)
    assert names(asked) == ["w"]
