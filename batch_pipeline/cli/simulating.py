"""`simulate` and `plan`: what the scheduler would do with a workload, on paper time, and how many GPUs it needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from batch_pipeline.cli.app import App, pass_app, print_json
from batch_pipeline.cli.batches import json_option
from batch_pipeline.errors import CustomerError, SettingsError
from batch_pipeline.wire import codes

if TYPE_CHECKING:
    from batch_pipeline.simulate import Report, Workload
    from batch_pipeline.simulate.capacity import Arithmetic, CapacityPlan, Trial
    from batch_pipeline.simulate.report import EstimateErrors, Group

_MOST_CUSTOMERS = 12
_file = click.argument("workload", type=click.Path(path_type=Path, dir_okay=False))
_seed = click.option("--seed", type=click.IntRange(min=0), help="Draw other batches. Default: as the file says.")


@click.command()
@_file
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME",
    help="ours (default), or one of those that --compare shows; may be repeated.",
)
@click.option("--compare", is_flag=True, help="All policies, ours first; says what each is.")
@click.option("--gpus", type=click.IntRange(min=1), help="On so many GPUs. Default: as the file says.")
@_seed
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write a page with drawings there.")
@json_option
@pass_app
def simulate(
    app: App,
    *,
    workload: Path,
    policies: tuple[str, ...],
    compare: bool,
    gpus: int | None,
    seed: int | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Run WORKLOAD, a TOML file (see examples/workloads), on paper time, with the service's own policy functions.

    Nothing is run and no service is needed; a page that is being written when this is killed is not whole. A day of
    10,000 batches and 1,000,000,000 requests takes half a minute, and some minutes with --compare.
    """
    from batch_pipeline import simulate as simulation
    from batch_pipeline.simulate.page import page

    names = list(simulation.POLICIES) if compare else list(dict.fromkeys(policies)) or [simulation.OURS]
    unknown = [name for name in names if name not in simulation.POLICIES]
    if unknown:
        raise click.UsageError(f"--policy: no {unknown[0]!r}; there are {', '.join(simulation.POLICIES)}")
    read = _read(workload, seed, gpus)
    if html is not None and not html.parent.is_dir():
        raise click.UsageError(f"--html: there is no folder {html.parent}")
    reports = []
    for name in names:
        app.error_console.print(f"simulating {read.name} under {name} ({simulation.POLICIES[name].meaning}) ...")
        reports.append(simulation.simulate(read, simulation.POLICIES[name]))
    if html is not None:
        html.write_text(page(reports), encoding="utf-8")
    if as_json:
        print_json(reports)
        return
    _show_policies(app.console, reports)
    _show_estimates(app.console, reports[0].estimates)
    _show_groups(app.console, "by size, " + reports[0].policy, reports[0].by_size)
    customers = sorted(reports[0].by_customer, key=lambda group: (group.met / group.batches, -group.requests))
    if len(customers) > _MOST_CUSTOMERS:
        app.console.print(f"\n{_MOST_CUSTOMERS} of {len(customers)} customers, those with most missed deadlines first")
    _show_groups(app.console, "by customer, " + reports[0].policy, customers[:_MOST_CUSTOMERS])
    if html is not None:
        app.console.print(f"\nthe page is in {html}")


@click.command()
@_file
@click.option(
    "--target",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.999,
    show_default=True,
    help="Share of the batches that are to meet their deadline.",
)
@click.option("--confirm/--no-confirm", default=True, show_default=True, help="Search the number by simulations.")
@_seed
@json_option
@pass_app
def plan(app: App, *, workload: Path, target: float, confirm: bool, seed: int | None, as_json: bool) -> int:
    """Say how many GPUs WORKLOAD needs: by arithmetic, and then by simulations that confirm it.

    Exit status 1 where the simulations have found no number that is enough.
    """
    from batch_pipeline import simulate as simulation
    from batch_pipeline.simulate import capacity

    def told(trial: Trial) -> None:
        app.error_console.print(_trial(trial))

    policy = simulation.POLICIES[simulation.OURS]
    found = capacity.plan(_read(workload, seed), policy, target=target, confirm=confirm, told=told)
    if as_json:
        print_json(found)
    else:
        _show_arithmetic(app.console, found.arithmetic)
        _show_answer(app.console, found)
    return 1 if confirm and found.gpus is None else 0


def _read(file: Path, seed: int | None, gpus: int | None = None) -> Workload:
    from batch_pipeline.simulate import load

    try:
        return load(file, seed=seed, gpus=gpus)
    except SettingsError as error:
        # Not the service's configuration, but what was handed in.
        raise CustomerError(codes.INVALID_OPTION, str(error)) from error


def _show_policies(console: Console, reports: list[Report]) -> None:
    from batch_pipeline.simulate.page import in_chunks, seconds

    first = reports[0]
    console.print(
        f"{first.workload}: {first.batches:,} batches, {first.requests:,} requests, {first.gpus} GPUs, "
        f"seed {first.seed}; simulated, not measured"
    )
    heads = ("policy", "met", "expired", "GPU h", "used", "Mtok/GPU h", "gap, chunks", "Jain", "launches", "switches")
    table = Table(*heads, "small wait p95", "live kept", box=None, pad_edge=False)
    for report in reports:
        jain = report.fairness.jain_mean
        table.add_row(
            report.policy,
            f"{report.met_share:.2%}",
            f"{report.expired:,}",
            f"{report.gpu.held_hours:,.1f}",
            f"{report.gpu.used_share:.1%}",
            f"{report.gpu.tokens_per_gpu_hour / 1e6:,.1f}",
            f"{in_chunks(report):,.1f}",
            "–" if jain is None else f"{jain:.3f}",
            f"{report.gpu.launches:,}",
            f"{report.gpu.switches:,}",
            seconds(report.by_size[0].wait_seconds.p95 if report.by_size else None),
            "yes" if report.live.is_budget_kept else "NO",
        )
    console.print(table)


def _show_estimates(console: Console, estimates: list[EstimateErrors]) -> None:
    if not estimates:
        return
    table = Table("finish estimated", "batches", "error p50", "p95", box=None, pad_edge=False)
    for errors in estimates:
        table.add_row(errors.made, f"{errors.batches:,}", f"{errors.p50:.0%}", f"{errors.p95:.0%}")
    console.print()
    console.print(table)


def _show_groups(console: Console, title: str, groups: list[Group]) -> None:
    from batch_pipeline.simulate.page import seconds

    table = Table(
        *(title, "batches", "met", "requests", "expired", "wait p50", "p95", "p99", "turnaround p50", "p95", "p99"),
        box=None,
        pad_edge=False,
    )
    for group in groups:
        wait, turnaround = group.wait_seconds, group.turnaround_seconds
        table.add_row(
            group.name,
            f"{group.batches:,}",
            f"{group.met / group.batches:.1%}",
            f"{group.requests:,}",
            f"{group.requests - group.served:,}",
            *(seconds(value) for value in (wait.p50, wait.p95, wait.p99)),
            *(seconds(value) for value in (turnaround.p50, turnaround.p95, turnaround.p99)),
        )
    console.print()
    console.print(table)


def _show_arithmetic(console: Console, found: Arithmetic) -> None:
    for need in found.models:
        console.print(
            f"{need.model}: {need.requests:,} requests; {need.prompt_tokens:,.0f} prompt tokens, of which "
            f"{need.computed_prompt_tokens:,.0f} are computed (the others come from the prefix cache); "
            f"{need.output_tokens:,.0f} output tokens"
        )
        console.print(
            f"  each over its rate: {need.worker_hours:,.1f} worker hours x {need.gpus_per_worker} GPUs = "
            f"{need.gpu_hours:,.1f} GPU hours"
        )
    length = found.peak_to_hours - found.peak_from_hours
    console.print(f"average: {found.gpu_hours:,.1f} GPU hours / {found.hours:g} h = {found.average_gpus:,.1f} GPUs")
    console.print(
        f"peak: from hour {found.peak_from_hours:.1f} to {found.peak_to_hours:.1f}, {found.peak_work_gpu_hours:,.1f} "
        f"GPU hours arrive and are due, and live traffic takes {found.peak_live_gpu_hours:,.1f}: together / "
        f"{length:.1f} h = {found.peak_gpus:,.1f} GPUs (peak factor of the batches {found.peak_factor:.2f})"
    )
    if found.peak_gpus < found.average_gpus:
        console.print("  below the average: windows reach beyond the hours of arrivals, and so may the work")
    console.print(
        f"failures take {found.overhead:.2%} of the time: {found.peak_work_gpu_hours / length:,.3f} / "
        f"{1 - found.overhead:.4f} + {found.peak_live_gpu_hours / length:,.3f} live, rounded up = {found.gpus} GPUs"
    )


def _show_answer(console: Console, found: CapacityPlan) -> None:
    if not found.trials:
        console.print(f"{found.gpus or found.arithmetic.gpus} GPUs by arithmetic; not confirmed by a simulation")
    elif found.gpus is None:
        console.print(f"no simulation has met {found.target:.2%} of the deadlines: see the pools' limits and windows")
    else:
        too_few = max((trial.gpus for trial in found.trials if not trial.is_enough), default=None)
        fewer = "" if too_few is None else f"; {too_few} are too few"
        console.print(
            f"{found.gpus} GPUs are enough for {found.target:.2%} of the deadlines, as {len(found.trials)} simulations "
            f"say{fewer}"
        )


def _trial(trial: Trial) -> str:
    share = trial.met / trial.batches if trial.batches else 1.0
    verdict = "enough" if trial.is_enough else "too few"
    return f"simulated {trial.gpus} GPUs: {trial.met:,} of {trial.batches:,} deadlines met ({share:.2%}), {verdict}"


COMMANDS = (simulate, plan)
