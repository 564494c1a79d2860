"""A workload on paper time: discrete events, decided by the service's own policy functions.

What is simulated is the life of chunks, workers and GPUs. A worker runs one chunk after the other without a pause
between them; a chunk takes what its requests add to the time of a full engine. Left out: intake and merge, the spread
of requests within a batch, and the few chunks that a worker leases ahead.

Cost: O(log n) for each chunk in n waiting batches, and for each step workers times models, and the square of the
customers that wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from batch_pipeline.scheduling.placement import plan_workers
from batch_pipeline.scheduling.switching import Cluster, departures
from batch_pipeline.scheduling.switching import Rules as SwitchingRules
from batch_pipeline.simulate import arrivals, outcome
from batch_pipeline.simulate.accuracy import Accuracy
from batch_pipeline.simulate.arrivals import SimulatedBatch
from batch_pipeline.simulate.fleet import Fleet, SimulatedWorker, State
from batch_pipeline.simulate.forecasting import Forecasting
from batch_pipeline.simulate.measures import Course, GpuMeasure, ServiceMeasure, fairness
from batch_pipeline.simulate.paper import PaperLease, PaperQueue
from batch_pipeline.simulate.policies import Policy
from batch_pipeline.simulate.report import Events, Gpus, LiveTraffic, Report
from batch_pipeline.simulate.workload import HOUR, Outage, Workload

Observer = Callable[[float, PaperLease], None]
"""Is told of every lease: the time, and the lease."""


def simulate(workload: Workload, policy: Policy, *, gpus: int | None = None, observe: Observer | None = None) -> Report:
    """Run a workload to its end under a policy, on its GPUs or on so many."""
    return _Simulation(workload, policy, workload.gpus if gpus is None else gpus, observe).run()


class _Simulation:
    """One run."""

    def __init__(self, workload: Workload, policy: Policy, gpus: int, observe: Observer | None) -> None:
        self._workload = workload
        self._policy = policy
        self._observe = observe
        self._batches = arrivals.draw(workload)
        weights = arrivals.weights_of(workload)
        self._fleet = Fleet(workload, gpus)
        self._queues = {model: self._queue(model, weights) for model in workload.models}
        self._idle: dict[str, list[SimulatedWorker]] = {model: [] for model in workload.models}
        self._generator = np.random.default_rng([workload.seed, 1_000_003])
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._planned = 0
        self._open = len(self._batches)
        self._services = {model: ServiceMeasure(weights) for model in workload.models}
        self._gpu = GpuMeasure()
        self._course = Course(list(workload.models))
        self._accuracy = Accuracy()
        self._forecasting = Forecasting(workload, policy, self._fleet, self._queues)
        self._estimated_at = -workload.estimate_seconds
        self._in_time: dict[str, int] = {}
        """How many shared workers the models with late batches need."""
        self._redone = self._leased = self._expired = self._died = self._engines_died = self._preempted = 0
        self._work_seconds = 0.0
        """GPU seconds that went into saved requests."""

    def _queue(self, model: str, weights: dict[str, float]) -> PaperQueue:
        queue = self._policy.queue(weights, self._workload.scheduling, self._workload.intake)
        return PaperQueue(
            model,
            queue,
            self._workload.speed_seconds,
            lambda now: self._fleet.ready_speed(model, now),
            has_habits=self._policy.has_habits,
        )

    def run(self) -> Report:
        for batch in self._batches:
            self._plan(batch.created_at, self._arrive, batch)
            self._plan(batch.deadline_at, self._deadline, batch)
        for outage in self._workload.failures.outages:
            self._plan(outage.at_hours * HOUR, self._begin_outage, outage)
        if self._open:
            self._plan(0.0, self._step)
        while self._events and self._open:
            self._now, _, happen, arguments = heapq.heappop(self._events)
            happen(*arguments)
        self._move()
        return self._report()

    def _plan(self, at: float, happen: Callable[..., None], *arguments: Any) -> None:
        self._planned += 1
        heapq.heappush(self._events, (at, self._planned, happen, arguments))

    def _after_mean(self, rate_per_hour: float, worker: SimulatedWorker, happen: Callable[..., None]) -> None:
        """Plan what happens to a worker at some time, as a Poisson process."""
        if rate_per_hour > 0:
            self._plan(self._now + float(self._generator.exponential(HOUR / rate_per_hour)), happen, worker)

    # Batches.

    def _arrive(self, batch: SimulatedBatch) -> None:
        self._queues[batch.model].arrive(batch, self._now)
        self._wake(batch.model)

    def _deadline(self, batch: SimulatedBatch) -> None:
        """What is finished stays; workers go on with something else."""
        if batch.ended_at is not None:
            return
        queue = self._queues[batch.model]
        holders = [worker for worker in self._fleet.workers.values() if worker.lease and worker.lease.batch is batch]
        done = {worker.lease.chunk: self._done(worker) for worker in holders if worker.lease}
        for lease in queue.leases_of(batch):
            saved = done.get(lease.chunk, lease.saved)
            self._count_work(lease, saved)
            self._take_back(lease, saved)
        queue.expire(batch, done, self._now)
        self._open -= 1
        for worker in holders:
            worker.lease = None
            worker.epoch += 1
            if worker.state is State.READY:
                self._next_chunk(worker)

    # Workers.

    def _launch(self, model: str, dedicated_to: SimulatedBatch | None = None) -> None:
        self._move()
        worker = self._fleet.launch(model, dedicated_to)
        worker.started_at = self._now
        self._plan(self._now + self._workload.models[model].loading_seconds, self._ready, worker)
        self._after_mean(self._workload.failures.workers_per_hour, worker, self._die)
        self._after_mean(self._workload.failures.preemptions_per_hour, worker, self._preempt)
        self._after_mean(self._workload.failures.engines_per_hour, worker, self._engine_dies)

    def _ready(self, worker: SimulatedWorker) -> None:
        if worker.state is State.STARTING:
            worker.state = State.READY
            worker.ready_at = self._now
            self._next_chunk(worker)

    def _next_chunk(self, worker: SimulatedWorker) -> None:
        worker.epoch += 1
        lease = self._queues[worker.model].lease(self._now, worker.dedicated_to)
        worker.lease = lease
        if lease is None and worker.dedicated_to is not None:
            self._gone(worker)
            return
        if lease is None:
            self._idle[worker.model].append(worker)
            self._plan(self._now + self._workload.worker.warm_seconds, self._idle_over, worker, worker.epoch)
            return
        self._leased += 1
        self._services[worker.model].count(lease.batch.customer, lease.left * lease.batch.real_each)
        if self._observe is not None:
            self._observe(self._now, lease)
        worker.started_at = self._now
        worker.seconds = lease.left * lease.batch.seconds_each
        self._plan(self._now + worker.seconds, self._committed, worker, worker.epoch)

    def _committed(self, worker: SimulatedWorker, epoch: int) -> None:
        lease = worker.lease
        if worker.epoch != epoch or lease is None:
            return
        self._count_work(lease, lease.left)
        if worker.seconds > 0:
            worker.speed = lease.batch.real_each / lease.batch.seconds_each
        self._queues[worker.model].commit(lease, self._now)
        self._open -= lease.batch.ended_at is not None
        self._next_chunk(worker)

    def _idle_over(self, worker: SimulatedWorker, epoch: int) -> None:
        if worker.epoch == epoch and worker.state is State.READY:
            self._idle[worker.model].remove(worker)
            self._gone(worker)

    def _wake(self, model: str) -> None:
        """Give what waits to workers that are idle, the one that began to be so last first: others may leave."""
        idle = self._idle[model]
        while idle and self._queues[model].pending:
            self._next_chunk(idle.pop())

    def _preempt(self, worker: SimulatedWorker) -> None:
        """The node is to go: its GPU comes back with another one."""
        if worker.state not in (State.LEAVING, State.GONE):
            worker.is_node_going = True
            self._ask(worker)

    def _ask(self, worker: SimulatedWorker) -> None:
        """ready -> leaving: what is in flight ends within the grace, the rest is handed back after it."""
        if worker.state in (State.LEAVING, State.GONE):
            return
        self._preempted += 1
        if worker.lease is None:
            if worker in self._idle[worker.model]:
                self._idle[worker.model].remove(worker)
            self._gone(worker)
            return
        worker.done_at_ask = self._done(worker)
        worker.state = State.LEAVING
        worker.epoch += 1
        self._plan(self._now + self._workload.worker.grace_seconds, self._left, worker)

    def _left(self, worker: SimulatedWorker) -> None:
        if worker.state is not State.LEAVING:
            return
        lease, done = worker.lease, worker.done_at_ask
        worker.lease = None
        self._gone(worker)
        if lease is not None:
            self._return(lease, done, failed=False)

    def _gone(self, worker: SimulatedWorker) -> int:
        """(any) -> gone; returns how many GPUs that frees, or breaks for a while where its node goes."""
        self._move()
        gpus = self._fleet.free(worker, self._now, are_broken=worker.is_node_going)
        if worker.is_node_going:
            self._plan(self._now + self._workload.failures.repair_minutes * 60, self._repaired, gpus)
        return gpus

    def _die(self, worker: SimulatedWorker) -> None:
        """The GPU breaks."""
        if worker.state is not State.GONE:
            worker.is_node_going = True
            self._lose(worker)

    def _repaired(self, gpus: int) -> None:
        self._move()
        self._fleet.repaired(gpus)

    def _lose(self, worker: SimulatedWorker) -> int:
        """A worker is gone without a word: its lease runs out."""
        self._died += 1
        lease = worker.lease
        done = self._saved(worker) if lease else 0
        if lease is None and worker in self._idle[worker.model]:
            self._idle[worker.model].remove(worker)
        if lease is not None:
            self._redone += max(0, self._done(worker) - done)
            lease.saved = done
            self._plan(self._now + self._workload.worker.lease_seconds, self._lease_over, lease)
        worker.lease = None
        return self._gone(worker)

    def _lease_over(self, lease: PaperLease) -> None:
        if not lease.is_over:
            self._expired += 1
            self._return(lease, lease.saved, failed=True)

    def _return(self, lease: PaperLease, done: int, *, failed: bool) -> None:
        self._count_work(lease, done)
        self._take_back(lease, done)
        self._queues[lease.batch.model].give_back(lease, done, self._now, failed=failed)
        self._wake(lease.batch.model)

    def _engine_dies(self, worker: SimulatedWorker) -> None:
        """Its worker starts it again, and goes on with what had not finished."""
        if worker.state is State.GONE:
            return
        self._after_mean(self._workload.failures.engines_per_hour, worker, self._engine_dies)
        if worker.state is not State.READY or worker.lease is None:
            return
        self._engines_died += 1
        loading = self._workload.models[worker.model].loading_seconds
        each = worker.lease.batch.seconds_each
        if self._now < worker.started_at:
            # It was loading already.
            again = worker.seconds
        else:
            # The finished ones are with the worker; those in flight were half done on average.
            in_flight = min(worker.lease.left, self._workload.models[worker.model].max_in_flight)
            self._redone += in_flight // 2
            again = min(worker.seconds, worker.seconds - (self._now - worker.started_at) + in_flight / 2 * each)
        worker.started_at = self._now + loading
        worker.seconds = again
        worker.epoch += 1
        self._plan(worker.started_at + again, self._committed, worker, worker.epoch)

    def _done(self, worker: SimulatedWorker) -> int:
        """Return the requests of its lease that a worker has finished by now, beside those of earlier attempts."""
        lease = worker.lease
        if lease is None:
            return 0
        if worker.state is State.LEAVING:
            return worker.done_at_ask
        left_seconds = worker.seconds - max(0.0, self._now - worker.started_at)
        return max(0, min(lease.left, lease.left - round(left_seconds / lease.batch.seconds_each)))

    def _saved(self, worker: SimulatedWorker) -> int:
        """Return those of them that are in checkpoints: finished ones of the last moments are not, and of those in
        flight half of the work is lost.
        """
        lease = worker.lease
        if lease is None:
            return 0
        in_flight = min(lease.left, self._workload.models[worker.model].max_in_flight)
        age = self._workload.worker.checkpoint_seconds * float(self._generator.random())
        return max(0, self._done(worker) - round(age / lease.batch.seconds_each) - in_flight // 2)

    # GPUs.

    def _step(self) -> None:
        """What the sensor does, and a look at the measures."""
        self._plan(self._now + self._workload.step_seconds, self._step)
        self._move()
        for model, queue in self._queues.items():
            self._services[model].look(queue, self._now)
        available = self._fleet.available(self._now)
        waiting = {model: queue.pending for model, queue in self._queues.items()}
        live = self._workload.live_gpus(self._now)
        self._course.add(self._now, available, self._fleet.held, live, waiting)
        capacities = self._fleet.capacities()
        shared = {capacity.model: capacity.shared for capacity in capacities}
        backlogs = [
            msgspec.structs.replace(made, late_workers=max(self._in_time.get(made.model, 0) - shared[made.model], 0))
            for queue in self._queues.values()
            if (made := queue.backlog()) is not None
        ]
        scheduling = self._workload.scheduling
        leaving = self._fleet.leaving_gpus()
        launches = plan_workers(backlogs, capacities, available, scheduling.chunks_per_worker, leaving)
        if self._fleet.held > available or len(capacities) > 1:
            cluster = Cluster(
                backlogs=backlogs,
                capacities=capacities,
                holders=self._fleet.holders(),
                gpus=available,
                now=self._now,
            )
            for departure in departures(cluster, self._switching()):
                self._ask(self._fleet.workers[departure.worker_id])
        for launch in launches:
            for _ in range(launch.workers):
                self._launch(launch.model)
        done = {worker.worker_id: self._done(worker) for worker in self._fleet.workers.values()}
        left = self._forecasting.left_in_hands(done)
        for dedication in self._forecasting.dedications(backlogs, left, available, self._now):
            batch = self._queues[dedication.model].open_batch(dedication.batch_id)
            for _ in range(dedication.workers):
                self._launch(dedication.model, batch)
        if self._now - self._estimated_at >= self._workload.estimate_seconds:
            self._estimated_at = self._now
            for backlog in backlogs:
                finishes = self._forecasting.finishes(backlog, left, available, self._now)
                self._accuracy.look(self._queues[backlog.model].open_batches(), finishes, self._now)
            self._in_time = {}
            # As the service does, which looks every few seconds: only where models want each other's GPUs.
            if self._policy.has_slack and len(backlogs) > 1:
                self._in_time = self._forecasting.workers_in_time(backlogs, left, available, self._now)

    def _switching(self) -> SwitchingRules:
        scheduling = self._workload.scheduling
        return SwitchingRules(
            loading_seconds={name: model.loading_seconds for name, model in self._workload.models.items()},
            default_loading_seconds=scheduling.loading_seconds,
            chunks_per_worker=scheduling.chunks_per_worker,
            turn=scheduling.turn if self._policy.has_hysteresis else 0.0,
        )

    def _begin_outage(self, outage: Outage) -> None:
        """GPUs are away: free ones first, then those of workers drawn by lot."""
        self._move()
        gpus = min(outage.gpus, self._fleet.total - self._fleet.away)
        missing = gpus - (self._fleet.total - self._fleet.away - self._fleet.held)
        for worker_id in self._generator.permutation(sorted(self._fleet.workers)):
            if missing <= 0:
                break
            missing -= self._lose(self._fleet.workers[str(worker_id)])
        self._fleet.away += gpus
        self._plan(self._now + outage.hours * HOUR, self._repaired, gpus)

    def _move(self) -> None:
        """Let the hours of GPUs grow up to now, at what there was since the last change."""
        # What live traffic takes changes on the hour, where a step may not look: what was before counts.
        available = self._fleet.available(max(0.0, self._now - 1e-6))
        self._gpu.move(self._now, self._fleet.held, available)

    def _take_back(self, lease: PaperLease, done: int) -> None:
        """Of a chunk that was counted as service when it was begun, only so many requests were served."""
        batch = lease.batch
        self._services[batch.model].count(batch.customer, -(lease.left - done) * batch.real_each)

    def _count_work(self, lease: PaperLease, done: int) -> None:
        self._work_seconds += done * lease.batch.seconds_each * self._workload.models[lease.batch.model].gpus_per_worker

    def _report(self) -> Report:
        served = sum(batch.done for batch in self._batches)
        requests = sum(batch.requests for batch in self._batches)
        held_hours = self._gpu.held_seconds / HOUR
        tokens = sum(batch.used for batch in self._batches)
        allowed = self._workload.step_seconds + self._workload.worker.grace_seconds
        return Report(
            workload=self._workload.name,
            policy=self._policy.name,
            seed=self._workload.seed,
            gpus=self._fleet.total,
            simulated_hours=round(self._now / HOUR, 4),
            batches=len(self._batches),
            met=sum(outcome.is_met(batch) for batch in self._batches),
            requests=requests,
            served=served,
            expired=requests - served,
            tokens=tokens,
            by_customer=outcome.by_customer(self._batches),
            by_size=outcome.by_size(self._batches),
            fairness=fairness(self._services),
            gpu=Gpus(
                held_hours=held_hours,
                available_hours=self._gpu.available_seconds / HOUR,
                used_share=self._work_seconds / self._gpu.held_seconds if self._gpu.held_seconds else 0.0,
                tokens_per_gpu_hour=tokens / held_hours if held_hours else 0.0,
                launches=self._fleet.launches,
                switches=self._fleet.switches,
                redone_requests=self._redone,
            ),
            live=LiveTraffic(
                overshoot_gpu_hours=self._gpu.overshoot_seconds / HOUR,
                longest_overshoot_seconds=self._gpu.longest_overshoot,
                allowed_seconds=allowed,
                is_budget_kept=self._gpu.longest_overshoot <= allowed,
            ),
            events=Events(
                chunks_leased=self._leased,
                leases_expired=self._expired,
                workers_died=self._died,
                engines_died=self._engines_died,
                preempted=self._preempted,
            ),
            estimates=self._accuracy.errors(),
            series=self._course.series(),
        )
