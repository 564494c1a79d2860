"""The batches of a workload, drawn once: the same seed gives the same ones, whatever the policy and the GPUs."""

from __future__ import annotations

import math

import numpy as np

from batch_pipeline.simulate.workload import HOUR, HOURS_A_DAY, Customers, SimulatedModel, Spread, Workload


class SimulatedBatch:
    """A batch and how far it is. What is drawn does not change; the rest is the simulation's."""

    __slots__ = (
        "batch_id",
        "chunk_requests",
        "chunks",
        "committed",
        "created_at",
        "customer",
        "deadline_at",
        "done",
        "ended_at",
        "estimated_each",
        "first_start_at",
        "leased",
        "max_tokens",
        "model",
        "next_chunk",
        "output_tokens",
        "pending",
        "pending_tokens",
        "prompt_tokens",
        "real_each",
        "requests",
        "returned",
        "seconds_each",
        "used",
    )

    def __init__(
        self,
        *,
        batch_id: str,
        customer: str,
        model: str,
        created_at: float,
        deadline_at: float,
        requests: int,
        chunk_requests: int,
        prompt_tokens: float,
        output_tokens: float,
        max_tokens: int,
        seconds_each: float,
    ) -> None:
        self.batch_id = batch_id
        self.customer = customer
        self.model = model
        self.created_at = created_at
        """Seconds from the beginning, as are all times."""
        self.deadline_at = deadline_at
        self.requests = requests
        self.chunk_requests = chunk_requests
        """Of every chunk but the last, which has what is left."""
        self.prompt_tokens = prompt_tokens
        """Mean of its requests, as is output_tokens."""
        self.output_tokens = output_tokens
        self.max_tokens = max_tokens
        self.seconds_each = seconds_each
        """What one of its requests adds to the time of a worker whose engine is full."""
        self.estimated_each = prompt_tokens + max_tokens
        self.real_each = prompt_tokens + output_tokens
        self.chunks = math.ceil(requests / chunk_requests)
        self.pending = self.chunks
        self.pending_tokens = requests * self.estimated_each
        """Estimated, of the pending chunks."""
        self.leased = 0
        self.committed = 0
        self.next_chunk = 0
        """The first that was never leased."""
        self.returned: list[tuple[int, int, float]] = []
        """Chunks that came back, with their requests that are done and what was charged for them; a heap."""
        self.done = 0
        """Requests that are saved: in committed chunks or in checkpoints."""
        self.used = 0.0
        """Their tokens."""
        self.first_start_at: float | None = None
        self.ended_at: float | None = None

    def requests_of(self, chunk: int) -> int:
        """Return the requests of a chunk."""
        return min(self.chunk_requests, self.requests - chunk * self.chunk_requests)


def draw(workload: Workload) -> list[SimulatedBatch]:
    """Return all batches in the order of their arrival. Of one customer they do not depend on the others."""
    batches: list[SimulatedBatch] = []
    for kind, customers in enumerate(workload.customers):
        for number, name in enumerate(customers.names):
            generator = np.random.default_rng([workload.seed, kind, number])
            batches += _of_customer(workload, customers, name, generator)
    return sorted(batches, key=lambda batch: (batch.created_at, batch.batch_id))


def weights_of(workload: Workload) -> dict[str, float]:
    """Return the weight of each customer by its name."""
    return {name: customers.weight for customers in workload.customers for name in customers.names}


def _of_customer(
    workload: Workload, customers: Customers, name: str, generator: np.random.Generator
) -> list[SimulatedBatch]:
    shares = customers.arrivals_by_hour
    arrivals: list[tuple[float, int | None, float | None]] = [
        (listed.at_hours * HOUR, listed.requests, listed.window_hours) for listed in customers.batches
    ]
    for hour in range(math.ceil(workload.hours)):
        length = min(1.0, workload.hours - hour)
        share = shares[hour % len(shares)] / (sum(shares) / len(shares))
        count = int(generator.poisson(customers.batches_per_day / HOURS_A_DAY * share * length))
        arrivals += [(float(at), None, None) for at in (hour + generator.random(count) * length) * HOUR]
    return [
        _batch(workload, customers, f"{name}/{number:05d}", generator, arrival)
        for number, arrival in enumerate(sorted(arrivals, key=lambda arrival: arrival[0]))
    ]


def _batch(
    workload: Workload,
    customers: Customers,
    batch_id: str,
    generator: np.random.Generator,
    arrival: tuple[float, int | None, float | None],
) -> SimulatedBatch:
    at, requests, window_hours = arrival
    model = str(generator.choice(list(customers.models), p=_normal(list(customers.models.values()))))
    if requests is None:
        requests = max(1, round(_draw(customers.requests, generator)))
    if window_hours is None:
        hours = [window.hours for window in customers.windows]
        window_hours = float(generator.choice(hours, p=_normal([window.share for window in customers.windows])))
    prompt = _draw(customers.prompt_tokens, generator)
    output = min(1.0, _draw(customers.output_share, generator)) * customers.max_tokens
    by_tokens = int(workload.intake.chunk_tokens // (prompt + customers.max_tokens))
    return SimulatedBatch(
        batch_id=batch_id,
        customer=batch_id.rpartition("/")[0],
        model=model,
        created_at=at,
        deadline_at=at + window_hours * HOUR,
        requests=requests,
        chunk_requests=max(1, min(workload.intake.chunk_requests, by_tokens)),
        prompt_tokens=prompt,
        output_tokens=output,
        max_tokens=customers.max_tokens,
        seconds_each=seconds_each(workload.models[model], prompt, output, customers.prefix_share),
    )


def seconds_each(model: SimulatedModel, prompt: float, output: float, prefix_share: float) -> float:
    """Return what one request adds to the time of a worker whose engine is full: its prompt tokens that are not in the
    prefix cache, and then its answer.
    """
    return prompt * (1 - prefix_share) / model.prompt_tokens_per_second + output / model.output_tokens_per_second


def _draw(spread: Spread, generator: np.random.Generator) -> float:
    drawn = spread.median * math.exp(spread.sigma * float(generator.standard_normal()))
    return min(max(drawn, spread.least), spread.most)


def _normal(shares: list[float]) -> list[float]:
    total = sum(shares)
    return [share / total for share in shares]
