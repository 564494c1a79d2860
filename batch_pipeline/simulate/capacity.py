"""How many GPUs a workload needs: by arithmetic first, and then by simulations that bracket the answer."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from batch_pipeline.simulate import arrivals
from batch_pipeline.simulate.arrivals import SimulatedBatch
from batch_pipeline.simulate.policies import Policy
from batch_pipeline.simulate.report import Report
from batch_pipeline.simulate.simulation import simulate
from batch_pipeline.simulate.workload import HOUR, Workload

_Hours = npt.NDArray[np.float64]
_BUCKETS = 600
"""Moments at which a stretch of time may begin, for the peak."""
_TRIALS = 14
"""Most simulations of one plan."""


class ModelNeed(msgspec.Struct, frozen=True, kw_only=True):
    """One model's part of the arithmetic."""

    model: str
    requests: int
    prompt_tokens: float
    computed_prompt_tokens: float
    """Those that are not in the prefix cache."""
    output_tokens: float
    worker_hours: float
    """Computed prompt tokens over their rate, and output tokens over theirs."""
    gpus_per_worker: int
    gpu_hours: float


class Arithmetic(msgspec.Struct, frozen=True, kw_only=True):
    """From tokens to GPUs, step by step."""

    hours: float
    """For which batches arrive."""
    models: list[ModelNeed]
    gpu_hours: float
    average_gpus: float
    """GPU hours over hours."""
    peak_from_hours: float
    peak_to_hours: float
    peak_work_gpu_hours: float
    """Of the batches that arrive and are due within the peak: the stretch of time that asks for most GPUs."""
    peak_live_gpu_hours: float
    """That live traffic takes in it."""
    peak_gpus: float
    """Both over its length: with fewer, some deadline is missed, whatever the order."""
    peak_factor: float
    """Of the batches alone: peak over average."""
    overhead: float
    """Share of a worker's time that goes into loading after failures, and into work that is lost by them."""
    gpus: int
    """What the arithmetic says: the peak with the overhead on top, at least what one worker of each model needs."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A simulation on so many GPUs."""

    gpus: int
    met: int
    batches: int
    is_enough: bool


class CapacityPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, and how it was found."""

    workload: str
    target: float
    arithmetic: Arithmetic
    trials: list[Trial]
    """In the order in which they were made; empty where the arithmetic was not to be confirmed."""
    gpus: int | None
    """The fewest of which a simulation has met the target; None where none has."""
    resolution: int
    """With so many fewer the target is missed."""


def plan(
    workload: Workload,
    policy: Policy,
    *,
    target: float,
    confirm: bool = True,
    told: Callable[[Trial], None] | None = None,
) -> CapacityPlan:
    """Return how many GPUs the workload needs so that a share `target` (0 to 1) of its batches meets its deadline.

    `told` hears of each simulation. The search stops within 1 % (one GPU where there are few).
    """
    arithmetic = calculate(workload)
    search = _Search(workload, policy, target, told)
    resolution = max(1, arithmetic.gpus // 100)
    gpus = search.run(arithmetic.gpus, resolution) if confirm else None
    return CapacityPlan(
        workload=workload.name,
        target=target,
        arithmetic=arithmetic,
        trials=search.trials,
        gpus=gpus,
        resolution=resolution,
    )


class _Search:
    """Bisection between GPUs that are too few and GPUs that are enough."""

    def __init__(self, workload: Workload, policy: Policy, target: float, told: Callable[[Trial], None] | None) -> None:
        self._workload = workload
        self._policy = policy
        self._target = target
        self._told = told
        self._least = max(model.gpus_per_worker for model in workload.models.values())
        pools = sum(model.pool_limit * model.gpus_per_worker for model in workload.models.values())
        self._most = pools + max(workload.live.gpus_by_hour)
        """More than this no pool may use."""
        self.trials: list[Trial] = []

    def run(self, first: int, resolution: int) -> int | None:
        """Return the fewest GPUs that are enough, to `resolution`; None where more and more are not."""
        too_few, enough, step = self._least - 1, None, max(resolution, first // 10)
        gpus = min(max(first, self._least), self._most)
        while enough is None and len(self.trials) < _TRIALS:
            if self._is_enough(gpus):
                enough = gpus
            elif gpus == self._most:
                return None
            else:
                too_few = gpus
                gpus = min(gpus + step, self._most)
                step *= 2
        # Down from the first by growing steps: it is near the answer, and nothing may be far below.
        step = max(resolution, first // 20)
        while enough is not None and enough - too_few > resolution and len(self.trials) < _TRIALS:
            middle = max((too_few + enough) // 2, enough - step)
            if self._is_enough(middle):
                enough = middle
                step *= 2
            else:
                too_few = middle
        return enough

    def _is_enough(self, gpus: int) -> bool:
        report: Report = simulate(self._workload, self._policy, gpus=gpus)
        trial = Trial(gpus=gpus, met=report.met, batches=report.batches, is_enough=report.met_share >= self._target)
        self.trials.append(trial)
        if self._told is not None:
            self._told(trial)
        return trial.is_enough


def calculate(workload: Workload) -> Arithmetic:
    """Return the arithmetic on the batches as they are drawn with the workload's seed."""
    batches = arrivals.draw(workload)
    models = [_need(workload, name, batches) for name in workload.models]
    gpu_hours = sum(model.gpu_hours for model in models)
    average = gpu_hours / workload.hours
    since, until, work, live = _peak(workload, batches)
    length = max(until - since, 1e-9)
    peak = (work + live) / length
    overhead = _overhead(workload, models)
    least = sum(model.gpus_per_worker for model in workload.models.values())
    return Arithmetic(
        hours=workload.hours,
        models=models,
        gpu_hours=gpu_hours,
        average_gpus=average,
        peak_from_hours=since,
        peak_to_hours=until,
        peak_work_gpu_hours=work,
        peak_live_gpu_hours=live,
        peak_gpus=peak,
        peak_factor=work / length / average if average else 0.0,
        overhead=overhead,
        gpus=max(least, int(np.ceil((work / length) / (1 - overhead) + live / length))),
    )


def _need(workload: Workload, name: str, batches: list[SimulatedBatch]) -> ModelNeed:
    model = workload.models[name]
    of_model = [batch for batch in batches if batch.model == name]
    seconds = sum(batch.requests * batch.seconds_each for batch in of_model)
    output = sum(batch.requests * batch.output_tokens for batch in of_model)
    computed = (seconds - output / model.output_tokens_per_second) * model.prompt_tokens_per_second
    return ModelNeed(
        model=name,
        requests=sum(batch.requests for batch in of_model),
        prompt_tokens=sum(batch.requests * batch.prompt_tokens for batch in of_model),
        computed_prompt_tokens=computed,
        output_tokens=output,
        worker_hours=seconds / HOUR,
        gpus_per_worker=model.gpus_per_worker,
        gpu_hours=seconds / HOUR * model.gpus_per_worker,
    )


def _peak(workload: Workload, batches: list[SimulatedBatch]) -> tuple[float, float, float, float]:
    """Return the stretch of time that asks for most GPUs: from, to (hours), the batches' and live GPU hours in it.

    Of every stretch, the work that arrives and is due within it has to be done within it (the demand bound of real-time
    scheduling). The earliest arrivals are looked at in steps, the deadlines all.
    """
    if not batches:
        return 0.0, workload.hours, 0.0, float(_live_hours(workload, np.array([workload.hours]))[0])
    created = np.array([batch.created_at / HOUR for batch in batches])
    due = np.array([batch.deadline_at / HOUR for batch in batches])
    hours = np.array(
        [batch.requests * batch.seconds_each * workload.models[batch.model].gpus_per_worker / HOUR for batch in batches]
    )
    by_due = np.argsort(due, kind="stable")
    created, due, hours = created[by_due], due[by_due], hours[by_due]
    live_until = _live_hours(workload, due)
    best = (-1.0, 0.0, 0.0, 0.0, 0.0)
    starts = np.unique(np.quantile(created, np.linspace(0, 1, _BUCKETS), method="lower"))
    for since, live_before in zip(starts, _live_hours(workload, starts), strict=True):
        within = created >= since
        work = np.cumsum(np.where(within, hours, 0.0))
        live = live_until - live_before
        length = np.maximum(due - since, 1e-9)
        # A stretch ends with a deadline of its own: not with one of a batch that came before it.
        needed = np.where(within, (work + live) / length, -1.0)
        at = int(np.argmax(needed))
        if needed[at] > best[0]:
            best = (float(needed[at]), float(since), float(due[at]), float(work[at]), float(live[at]))
    return best[1:]


def _live_hours(workload: Workload, until: _Hours) -> _Hours:
    """Return the GPU hours that live traffic takes from the beginning until each of these hours."""
    last = int(np.ceil(until.max())) + 1
    taken = np.array([workload.live_gpus(hour * HOUR) for hour in range(last)], dtype=np.float64)
    before = np.concatenate([np.zeros(1), np.cumsum(taken)])
    return np.asarray(np.interp(until, np.arange(last + 1), before), dtype=np.float64)


def _overhead(workload: Workload, models: list[ModelNeed]) -> float:
    """Return the share of time that failures cost: the loading of the next worker, and half a minute of silence and
    repeated work.
    """
    failures = workload.failures
    total = sum(model.gpu_hours for model in models)
    if not total:
        return 0.0
    lost = 0.0
    for need in models:
        loading = workload.models[need.model].loading_seconds
        per_hour = failures.workers_per_hour * (loading + workload.worker.lease_seconds + workload.step_seconds)
        per_hour += failures.engines_per_hour * loading
        per_hour += failures.preemptions_per_hour * (loading + workload.worker.grace_seconds + workload.step_seconds)
        per_hour += (failures.workers_per_hour + failures.preemptions_per_hour) * failures.repair_minutes * 60
        lost += need.gpu_hours / total * per_hour / HOUR
    return min(lost, 0.9)
