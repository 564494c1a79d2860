"""The model catalogue: what the service knows about each model it serves."""

from __future__ import annotations

import re
from decimal import Decimal, localcontext

import msgspec

from batch_pipeline.pods import Kubernetes

MESSAGES = "/v1/messages"
"""Anthropic's endpoint, which vLLM serves beside those of OpenAI."""
RESPONSES = "/v1/responses"
"""OpenAI's endpoint of responses."""
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", MESSAGES, RESPONSES)
"""Endpoints that a model can be served on; a batch names one of them."""
INLINE_MEDIA = "data:"
"""The word in `allowed_media_hosts` for media that stand in the request itself."""
DEFAULT_IN_FLIGHT = 64
"""Requests in the engine at once, where nobody has configured or measured how many are best."""


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Online prices in US dollars per million tokens; a batch pays them less the discount."""

    input_per_million: float = 0.0
    output_per_million: float = 0.0
    batch_discount: float = 0.5
    """Share of the online price that a batch does not pay, 0 to 1."""

    def cost(self, input_tokens: int, output_tokens: int) -> Decimal:
        """Return the batch price in US dollars of so many tokens: exact, with the prices as they are written in the
        configuration.
        """
        with localcontext(prec=100):
            online = input_tokens * _exact(self.input_per_million) + output_tokens * _exact(self.output_per_million)
            cost = (online / 1_000_000 * (1 - _exact(self.batch_discount))).normalize()
            # 5E+1 is 50.
            return cost.quantize(Decimal(1)) if cost == cost.to_integral_value() else cost


def _exact(written: float) -> Decimal:
    """Return the shortest decimal that stands for a float: 0.1 and not 0.1000000000000000055."""
    return Decimal(repr(written))


class Shared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How batch work gives way on an engine that live traffic uses too (see `scheduling.governor`)."""

    live_traffic: bool = False
    """Whether live requests go to the model's `engine_url` as well. Needs one: an engine started here has none."""
    live_ttft_budget_seconds: float = 1.0
    """Longest time to first token that live requests are to have: above it no batch request is fed."""
    kv_cache_mark: float = 0.8
    """Share of the KV cache in use, above 0 and at most 1, from which on there is too much batch work."""
    probe_seconds: float = 2.0
    """Pause between two live requests of our own, of one token each, that measure that time."""
    least_in_flight: int = 1
    """Batch requests in flight while nothing is known, and after a stop. The most are the model's `max_in_flight`."""


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model of the catalogue. `name` is what customers write in a request's body."""

    source: str
    """Folder with the weights and the tokenizer, as the engine and intake see it (relative to the configuration
    file).
    """
    context_length: int
    """Tokens of prompt and answer together."""
    endpoints: list[str] = msgspec.field(
        default_factory=lambda: ["/v1/chat/completions", "/v1/completions", MESSAGES, RESPONSES]
    )
    version: str = "1"
    """Changes whenever the weights do: it goes into the manifest and into lineage."""
    engine_arguments: list[str] = []
    """Further arguments of vLLM's server, for instance ["--dtype", "float32"]."""
    engine_environment: dict[str, str] = {}
    engine_url: str | None = None
    """Attach to a server that already runs (a sidecar, or a live server that is shared) instead of starting one."""
    engine_start_seconds: float = 900.0
    """How long a start may take before the worker gives up and says so."""
    pool_limit: int = 1
    """How many workers of this model may run at once: the limit of the Dagster pool of its name."""
    max_in_flight: int | None = None
    """Requests that a worker keeps in the engine at once; enough for its continuous batching to be full. Unset: what a
    calibration has found for the worker's kind of machine, `DEFAULT_IN_FLIGHT` where there is none.
    """
    calibrate: bool = False
    """Whether a worker that finds no calibration for its kind of machine makes one while it works."""
    tokens_per_second: float | None = None
    """What one worker does, prompt and answer together, for estimates until a worker has measured it. Unset: until then
    none are given.
    """
    max_choices: int = 16
    """Largest `n` of a request; vLLM takes thousands and is busy with one of them for half a minute."""
    default_output_tokens: int = 256
    """Estimate of the answer where a request has no max_tokens. Only an estimate: the engine is not told."""
    allowed_media_hosts: list[str] = []
    """Hosts from which the engine may fetch images, audio and video that requests name, each as it stands in the URL
    (`media.example.com` or `media.example.com:8443`); "data:" for media in the request itself. Empty: texts only.
    """
    isolate_prefix_cache: bool = True
    """Each customer has a prefix cache of its own (vLLM's cache_salt): otherwise the cached tokens that a result tells
    would let one find out what another has asked. Within a customer prefixes are shared as always.
    """
    prices: Prices = Prices()
    shared: Shared = Shared()
    kubernetes: Kubernetes = Kubernetes()

    @property
    def most_in_flight(self) -> int:
        """How many requests are in flight at most while no calibration says otherwise."""
        return DEFAULT_IN_FLIGHT if self.max_in_flight is None else self.max_in_flight

    @property
    def fetch_arguments(self) -> list[str]:
        """Arguments of vLLM's server that hold it to `allowed_media_hosts`, behind intake's own check.

        An empty list would mean any host there: so a name that by RFC 2606 no host can have.
        """
        hosts = sorted({host.partition(":")[0] for host in self.allowed_media_hosts if host != INLINE_MEDIA})
        return ["--allowed-media-domains", *(hosts or ["none.invalid"])]


FETCH_ENVIRONMENT = {"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0"}
"""An allowed host must not send the engine on to another one."""


def job_name(model: str) -> str:
    """Return the name of a model's worker job in Dagster, which takes letters, digits and `_` only."""
    return f"gpu_worker_{re.sub(r'[^A-Za-z0-9]', '_', model)}"
