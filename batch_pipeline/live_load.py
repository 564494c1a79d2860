"""How many GPUs live traffic needs now: the answer of a Prometheus server to the operator's query."""

from __future__ import annotations

import math

import httpx
import msgspec

from batch_pipeline.errors import OperatorError
from batch_pipeline.live import live_gpus
from batch_pipeline.settings import Live

_SECONDS = 5.0


class _Data(msgspec.Struct):
    resultType: str  # noqa: N815 - Prometheus' own name
    result: msgspec.Raw


class _Answer(msgspec.Struct):
    data: _Data


class _Sample(msgspec.Struct):
    value: tuple[float, str]


def query(url: str, expression: str) -> float:
    """Return the value of a Prometheus query that gives one number: a scalar, or a vector whose samples are added up.

    Raises OperatorError in one line; also where the vector is empty: that says that nobody exports what is asked for,
    not that live traffic needs nothing.
    """
    try:
        response = httpx.get(f"{url.rstrip('/')}/api/v1/query", params={"query": expression}, timeout=_SECONDS)
        response.raise_for_status()
        value = _number(msgspec.json.decode(response.content, type=_Answer).data)
    except (httpx.HTTPError, msgspec.DecodeError, ValueError) as error:
        raise OperatorError(f"live.prometheus_url does not answer live.prometheus_query: {error}") from error
    if not math.isfinite(value):
        raise OperatorError(f"live.prometheus_query gives {value}")
    return value


def _number(data: _Data) -> float:
    """Return the number in an answer. Raises OperatorError, DecodeError and ValueError."""
    if data.resultType == "scalar":
        return float(msgspec.json.decode(data.result, type=tuple[float, str])[1])
    if data.resultType != "vector":
        raise OperatorError(
            f"live.prometheus_query gives a {data.resultType}, and not a number of GPUs at one moment: write one that "
            "gives a scalar or an instant vector; of a range, for instance, its max_over_time()"
        )
    samples = msgspec.json.decode(data.result, type=list[_Sample])
    if not samples:
        raise OperatorError(
            "live.prometheus_query gives no sample, so the GPUs that live traffic needs are unknown: see whether what "
            "it names is still exported, with these labels; where no sample means no GPU, write `... or vector(0)`"
        )
    return sum(float(sample.value[1]) for sample in samples)


class LiveLoad:
    """The GPUs that live traffic needs, asked anew at every look; the last answer stands in for a missing one."""

    def __init__(self, settings: Live) -> None:
        self._settings = settings
        self._heard: tuple[float, int] | None = None
        """When, and what."""

    def gpus(self, now: float) -> tuple[int, str | None]:
        """Return the GPUs, and what kept the query from being answered, if something did. `now` is UTC seconds."""
        scheduled = live_gpus(self._settings.schedule, now)
        if not self._settings.prometheus_url:
            return scheduled, None
        trouble = None
        try:
            self._heard = now, math.ceil(query(self._settings.prometheus_url, self._settings.prometheus_query) - 1e-9)
        except OperatorError as error:
            trouble = str(error)
        # A clock that was set back does not keep an old answer for longer.
        if self._heard is None or abs(now - self._heard[0]) > self._settings.keep_seconds:
            return max(scheduled, self._settings.gpus_when_unknown), trouble
        return max(scheduled, self._heard[1]), trouble
