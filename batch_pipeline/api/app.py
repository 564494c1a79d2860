"""The application: its routes, and what each request passes through."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from anyio import to_thread
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from batch_pipeline.api import (
    anthropic_batches,
    beyond,
    documentation,
    health,
    metrics,
    openai_batches,
    openai_files,
    openai_uploads,
    problems,
)
from batch_pipeline.api.gathering import Gathering
from batch_pipeline.api.rates import Rates
from batch_pipeline.api.requests import Requests
from batch_pipeline.api.services import Receiving, Services
from batch_pipeline.api.statuses import Statuses
from batch_pipeline.api.webhooks import delivering
from batch_pipeline.ledger import Ledger
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore

_DESCRIPTION = """\
Batches of LLM requests, for the `openai` and `anthropic` SDKs and for programs of your own. Every route but the health
routes asks for a key: `Authorization: Bearer KEY` or `x-api-key: KEY`.
"""
_TAGS = {
    "OpenAI: files": "Upload a file of requests; fetch the files of results.",
    "OpenAI: uploads": "A file in parts, for what is too large for one request.",
    "OpenAI: batches": "Make a batch of a file, follow it, cancel it.",
    "Batches: beyond OpenAI": "Results while a batch runs, its manifest, and running again what failed.",
    "Anthropic: message batches": "Batches of the Messages API, with their requests in the body.",
    "health": "Whether the service is up.",
    "operators": "For Prometheus.",
}
ROUTERS = (
    health.router,
    openai_files.router,
    openai_uploads.router,
    openai_batches.router,
    beyond.router,
    anthropic_batches.router,
)


class _Service(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, in which mistakes are what they are here: 400 in the door's shape, never 422."""
        if self.openapi_schema is None:
            document = get_openapi(
                title=self.title,
                version=self.version,
                description=self.description,
                routes=self.routes,
                tags=self.openapi_tags,
            )
            for operations in document["paths"].values():
                for operation in operations.values():
                    if operation["responses"].pop("422", None) is not None:
                        mistake = {"description": "The request is not as the API takes it."}
                        operation["responses"].setdefault("400", mistake)
            self.openapi_schema = document
        return self.openapi_schema


def create_app(ledger: Ledger, store: ObjectStore, settings: Settings) -> FastAPI:
    """Return the service on an open ledger and store, which the caller closes after it."""
    app = _Service(
        redirect_slashes=False,
        title="Batch Pipeline",
        version=version("batch-pipeline"),
        description=_DESCRIPTION,
        openapi_tags=[{"name": name, "description": words} for name, words in _TAGS.items()],
        lifespan=_lifespan,
        # Its scripts are fetched from a public CDN; `documentation` has its own.
        docs_url=None,
        redoc_url=None,
    )
    statuses = Statuses(ledger, settings)
    app.state.services = Services(
        ledger=ledger,
        store=store,
        settings=settings,
        rates=Rates(),
        receiving=Receiving(settings.api.uploads),
        keys=Gathering(ledger.customers.by_secrets),
        statuses=statuses,
        polled=Gathering(statuses.owned),
    )
    problems.install(app)
    app.add_middleware(Requests, idle_seconds=settings.api.idle_seconds)
    metrics.install(app, ledger)
    for router in ROUTERS:
        app.include_router(router)
    documentation.install(app)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    # Routes that are no coroutines, and the pieces of streamed answers, run in this pool.
    services: Services = app.state.services
    to_thread.current_default_thread_limiter().total_tokens = services.settings.api.threads
    async with delivering(services.ledger, services.settings.webhooks):
        yield
