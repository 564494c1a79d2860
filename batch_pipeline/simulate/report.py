"""What a simulation says. The same workload, policy and GPUs give the same report, byte for byte."""

from __future__ import annotations

import msgspec


class _Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Plain figures, as `--json` prints them."""


class Quantiles(_Figures, frozen=True):
    """Of some seconds; all None where there is nothing."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


class Group(_Figures, frozen=True):
    """Batches of one customer, or of one size."""

    name: str
    batches: int
    met: int
    """Those whose last request was done at the deadline."""
    requests: int
    served: int
    """Requests done; the rest has expired."""
    wait_seconds: Quantiles
    """From the upload to the first chunk's start; the whole window where none was started."""
    turnaround_seconds: Quantiles
    """From the upload to the last request, of the batches that met their deadline."""


class Fairness(_Figures, frozen=True):
    """Between customers of which each had work waiting all the time."""

    largest_gap_tokens: float
    """Most by which one got more than another in any stretch of time in which both waited: tokens over weight, counted
    at the start of a chunk, looked at in each step. Start-time fair queueing keeps it within two chunks.
    """
    gap_between: list[str]
    """The model, who got more, and who less; empty where no two waited together."""
    largest_chunk_tokens: float
    """The largest chunk over its customer's weight: what the gap is to be compared with."""
    jain_mean: float | None
    """Jain's index of tokens over weight, over all hours in which two customers or more waited all the time."""
    jain_least: float | None


class Gpus(_Figures, frozen=True):
    """What the GPUs did."""

    held_hours: float
    """By workers, from launch to end."""
    available_hours: float
    """Of them that live traffic and failures left, until the last batch had ended."""
    used_share: float
    """Of the held hours, that went into requests that were saved."""
    tokens_per_gpu_hour: float
    """Prompt and answer, of saved requests, for each held hour."""
    launches: int
    switches: int
    """Launches on a GPU that had another model before, counted in GPUs."""
    redone_requests: int
    """Finished or half done when their worker or engine was lost, and so run again."""


class LiveTraffic(_Figures, frozen=True):
    """Whether live traffic had its GPUs."""

    overshoot_gpu_hours: float
    """Held by batches while live traffic wanted them: the time to notice, and the grace."""
    longest_overshoot_seconds: float
    allowed_seconds: float
    """A step of the sensor and the grace."""
    is_budget_kept: bool
    """Whether no overshoot was longer than that."""


class Events(_Figures, frozen=True):
    """What happened."""

    chunks_leased: int
    leases_expired: int
    workers_died: int
    engines_died: int
    preempted: int
    """Workers that were asked to leave: by their node, live traffic, or for another model."""


class EstimateErrors(_Figures, frozen=True):
    """By which share of the time that was left estimates of finish were off, of batches that were done in time."""

    made: str
    """When: at the first look, or once that share of the requests was done."""
    batches: int
    p50: float
    p95: float


class Series(_Figures, frozen=True):
    """The course of it, at most some hundred points; one figure for each moment of `hours`."""

    hours: list[float]
    available: list[float]
    """GPUs, as is held."""
    held: list[float]
    waiting_chunks: dict[str, list[float]]
    """By model."""
    live: list[float]


class Report(_Figures, frozen=True):
    """All of it. `batches` counts what was drawn; each request is served or expired, exactly once."""

    workload: str
    policy: str
    seed: int
    gpus: int
    simulated_hours: float
    batches: int
    met: int
    requests: int
    served: int
    expired: int
    tokens: float
    by_customer: list[Group]
    by_size: list[Group]
    fairness: Fairness
    gpu: Gpus
    live: LiveTraffic
    events: Events
    estimates: list[EstimateErrors]
    """Empty where nothing was estimated: of other orders than ours."""
    series: Series

    @property
    def met_share(self) -> float:
        """Share of the batches that met their deadline; 1 where there are none."""
        return self.met / self.batches if self.batches else 1.0
