"""Launches GPU workers where there is backlog, and keeps the pools' limits equal to the catalogue's."""

from collections.abc import Mapping

import dagster as dg

from assets.gpu_workers import pool_name
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import WorkerState
from batch_pipeline.scheduling.placement import Capacity, plan_workers
from batch_pipeline.settings import Settings
from resources import Service
from sensors.runs import count_under_way, is_failing, pause_seconds


def gpu_worker_sensor(settings: Settings, jobs: Mapping[str, dg.JobDefinition]) -> dg.SensorDefinition:
    """Return the sensor that launches workers; `jobs` maps a model's name to its worker job."""

    @dg.sensor(
        name="gpu_workers",
        jobs=list(jobs.values()),
        minimum_interval_seconds=settings.scheduling.sensor_interval_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Launches GPU workers where there is backlog, within each model's pool and the total of GPUs.",
    )
    def gpu_workers(context: dg.SensorEvaluationContext, service: Service) -> dg.SensorResult | dg.SkipReason:
        parts = service.open()
        keep_pool_limits(context.instance, settings)
        backlogs = [backlog for backlog in parts.ledger.backlog() if backlog.model in jobs]
        first_pause = settings.scheduling.retry_run_seconds
        pausing = {
            backlog.model
            for backlog in backlogs
            if _is_pausing(backlog.model, parts.ledger, settings)
            or is_failing(context.instance, jobs[backlog.model].name, first_pause)
        }
        launches = plan_workers(
            [backlog for backlog in backlogs if backlog.model not in pausing],
            [
                Capacity(
                    model=name,
                    workers=count_under_way(context.instance, job.name),
                    pool_limit=settings.models[name].pool_limit,
                    gpus_per_worker=settings.models[name].kubernetes.gpus,
                )
                for name, job in jobs.items()
            ],
            settings.scheduling.total_gpus,
            settings.scheduling.chunks_per_worker,
        )
        requests = [
            dg.RunRequest(job_name=jobs[launch.model].name) for launch in launches for _ in range(launch.workers)
        ]
        if not requests:
            waiting = f"; pausing after failed starts: {', '.join(sorted(pausing))}" if pausing else ""
            return dg.SkipReason(f"no worker to launch for {len(backlogs)} models with work{waiting}")
        return dg.SensorResult(run_requests=requests)

    return gpu_workers


def keep_pool_limits(instance: dg.DagsterInstance, settings: Settings) -> None:
    """Make each pool's limit what the catalogue says; writes only where they differ."""
    limits = {pool.name: pool.limit for pool in instance.event_log_storage.get_pool_limits()}
    for name, model in settings.models.items():
        if limits.get(pool_name(name)) != model.pool_limit:
            instance.event_log_storage.set_concurrency_slots(pool_name(name), model.pool_limit)


def _is_pausing(model: str, ledger: Ledger, settings: Settings) -> bool:
    """Whether the model's newest workers could not start, and the pause after that is not over.

    Without it, a wrong engine option would start a worker every few seconds for ever.
    """
    workers = ledger.workers.of_models([model])
    failures = 0
    for worker in workers:
        if worker.state != WorkerState.FAILED:
            break
        failures += 1
    if failures == 0:
        return False
    pause = pause_seconds(failures - 1, settings.scheduling.retry_run_seconds)
    return ledger.now() < workers[0].seen_at + pause
