"""How many workers for which model: within the pools and the GPUs, and one for each before several for any."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batch_pipeline.scheduling.placement import Backlog, Capacity, Launch, plan_workers


def backlog(model: str, pending: int, tokens: int = 0, leased: int = 0, deadline: float = 1000.0) -> Backlog:
    return Backlog(
        model=model, pending=pending, pending_tokens=tokens or pending * 100, leased=leased, first_deadline_at=deadline
    )


def capacity(model: str, workers: int = 0, pool_limit: int = 8, gpus: int = 1) -> Capacity:
    return Capacity(model=model, workers=workers, pool_limit=pool_limit, gpus_per_worker=gpus)


MODELS = ["a", "b", "c"]
backlogs_of = st.lists(
    st.builds(backlog, st.sampled_from(MODELS), st.integers(0, 50), st.integers(0, 10**9), st.integers(0, 9)),
    max_size=3,
    unique_by=lambda made: made.model,
)
capacities_of = st.lists(
    st.builds(capacity, st.sampled_from(MODELS), st.integers(0, 3), st.integers(1, 6), st.integers(1, 4)),
    max_size=3,
    unique_by=lambda made: made.model,
)


def test_a_dedicated_worker_is_none_for_the_batches_that_it_does_not_serve() -> None:
    own = Capacity(model="a", workers=1, dedicated=1, pool_limit=2, gpus_per_worker=1)
    assert plan_workers([backlog("a", 3)], [own], 2, 8) == [Launch(model="a", workers=1)]
    assert plan_workers([backlog("a", 3)], [own], 1, 8) == [], "its GPU is not there for others"
    full = Capacity(model="a", workers=1, dedicated=1, pool_limit=1, gpus_per_worker=1)
    assert plan_workers([backlog("a", 3)], [full], 2, 8) == [], "nor is its place in the pool"


@given(backlogs_of, capacities_of, st.integers(0, 12), st.integers(1, 8))
def test_it_never_exceeds_a_pool_or_the_gpus_and_launches_nothing_without_work(
    backlogs: list[Backlog], capacities: list[Capacity], total_gpus: int, per_worker: int
) -> None:
    launches = plan_workers(backlogs, capacities, total_gpus, per_worker)
    by_model = {made.model: made for made in capacities}
    pending = {made.model: made.pending for made in backlogs}
    for launch in launches:
        assert launch.workers >= 1
        assert by_model[launch.model].workers + launch.workers <= by_model[launch.model].pool_limit
        assert pending[launch.model] > 0
    used = sum(made.workers * made.gpus_per_worker for made in capacities)
    asked = sum(launch.workers * by_model[launch.model].gpus_per_worker for launch in launches)
    assert asked <= max(total_gpus - used, 0)
    assert len({launch.model for launch in launches}) == len(launches)


@given(backlogs_of, capacities_of, st.integers(0, 12), st.integers(1, 8))
def test_no_model_waits_without_a_worker_while_another_is_given_its_second(
    backlogs: list[Backlog], capacities: list[Capacity], total_gpus: int, per_worker: int
) -> None:
    launched = {launch.model: launch.workers for launch in plan_workers(backlogs, capacities, total_gpus, per_worker)}
    by_model = {made.model: made for made in capacities}
    several = [model for model, count in launched.items() if by_model[model].workers + count > 1]
    for waiting in backlogs:
        room = by_model.get(waiting.model)
        if room is None or not waiting.pending or room.workers + launched.get(waiting.model, 0) > 0:
            continue
        # It got nothing: then what the others got beyond their first is too small for it, all together.
        spare = total_gpus - sum(made.workers * made.gpus_per_worker for made in capacities)
        firsts = sum(by_model[model].gpus_per_worker for model in launched if by_model[model].workers == 0)
        assert not several or spare - firsts < room.gpus_per_worker


@given(backlogs_of, capacities_of, st.integers(0, 12), st.integers(1, 8))
def test_it_leaves_no_gpu_idle_that_waiting_work_could_use(
    backlogs: list[Backlog], capacities: list[Capacity], total_gpus: int, per_worker: int
) -> None:
    launched = {launch.model: launch.workers for launch in plan_workers(backlogs, capacities, total_gpus, per_worker)}
    workers = {made.model: made.workers + launched.get(made.model, 0) for made in capacities}
    free = total_gpus - sum(workers[made.model] * made.gpus_per_worker for made in capacities)
    by_model = {made.model: made for made in capacities}
    for waiting in backlogs:
        room = by_model.get(waiting.model)
        if room is not None and waiting.pending > workers[waiting.model] * per_worker:
            assert workers[waiting.model] >= room.pool_limit or room.gpus_per_worker > free


def test_a_small_model_gets_its_worker_beside_an_endless_backlog() -> None:
    launches = plan_workers(
        [backlog("huge", 10_000, 10**9), backlog("small", 1, 10)], [capacity("huge"), capacity("small")], 4, 4
    )
    assert launches == [Launch(model="huge", workers=3), Launch(model="small", workers=1)]


def test_what_is_left_goes_where_most_work_waits_per_worker() -> None:
    launches = plan_workers([backlog("a", 100, 900), backlog("b", 100, 300)], [capacity("a"), capacity("b")], 4, 4)
    assert {launch.model: launch.workers for launch in launches} == {"a": 3, "b": 1}


def test_of_two_alike_the_one_with_the_nearer_deadline_goes_first() -> None:
    far, near = backlog("a", 5, deadline=900.0), backlog("b", 5, deadline=100.0)
    assert plan_workers([far, near], [capacity("a"), capacity("b")], 1, 4) == [Launch(model="b", workers=1)]


def test_workers_follow_the_chunks_there_are() -> None:
    assert plan_workers([backlog("a", 5)], [capacity("a")], 8, 4) == [Launch(model="a", workers=2)]
    assert plan_workers([backlog("a", 4)], [capacity("a", workers=1)], 8, 4) == []
    assert plan_workers([backlog("a", 0, leased=9)], [capacity("a")], 8, 4) == []


def test_a_model_of_several_gpus_does_not_hold_those_it_cannot_use() -> None:
    capacities = [capacity("large", gpus=4), capacity("small")]
    launches = plan_workers([backlog("large", 9), backlog("small", 1)], capacities, 3, 4)
    assert launches == [Launch(model="small", workers=1)]


def test_of_models_without_a_worker_the_one_that_was_served_longest_ago_goes_first() -> None:
    """Else the model whose worker has just left for another would get its GPU back, as it has more to do."""
    work = [backlog("big", 100, 10**8), backlog("tiny", 1, 1000), backlog("new", 1, 1)]
    room = [
        Capacity(model="big", workers=0, pool_limit=8, gpus_per_worker=1, served_at=500.0),
        Capacity(model="tiny", workers=0, pool_limit=8, gpus_per_worker=1, served_at=100.0),
        capacity("new"),
    ]
    assert plan_workers(work, room, 1, 4) == [Launch(model="new", workers=1)]
    assert plan_workers(work[:2], room, 1, 4) == [Launch(model="tiny", workers=1)]


def test_free_gpus_are_kept_for_a_model_of_several_while_workers_leave_for_it() -> None:
    work = [backlog("small", 100, 10**9), backlog("large", 100)]
    room = [capacity("small", workers=1), capacity("large", gpus=2)]
    assert plan_workers(work, room, 2, 4, leaving_gpus=1) == []
    assert plan_workers(work, room, 3, 4, leaving_gpus=1) == [Launch(model="large", workers=1)]
    assert plan_workers(work, room, 2, 4) == [Launch(model="small", workers=1)], "nobody leaves for it"
    gone = [capacity("small"), capacity("large", gpus=2)]
    served = [Capacity(model="small", workers=0, pool_limit=8, gpus_per_worker=1, served_at=5.0), gone[1]]
    assert plan_workers(work, served, 2, 4) == [Launch(model="large", workers=1)]


def test_a_model_with_late_batches_goes_before_one_with_more_work_for_as_many_as_it_needs() -> None:
    late = Backlog(model="late", pending=50, pending_tokens=5_000, leased=0, first_deadline_at=1000.0, late_workers=2)
    work = [backlog("lazy", 1000, 10**9), late]
    room = [capacity("lazy", workers=2), capacity("late", workers=1)]
    assert plan_workers(work, room, 4, 4) == [Launch(model="late", workers=1)]
    launched = {launch.model: launch.workers for launch in plan_workers(work, room, 7, 4)}
    assert launched == {"late": 2, "lazy": 2}
    assert plan_workers([*work, backlog("new", 1)], [*room, capacity("new")], 4, 4) == [Launch(model="new", workers=1)]
