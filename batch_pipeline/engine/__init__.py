"""An inference engine behind the OpenAI protocol: started here (vLLM as a child process) or attached to (a URL)."""

from __future__ import annotations

from pathlib import Path

from batch_pipeline.engine.attached import AttachedEngine
from batch_pipeline.engine.client import Answer, AnswerTimeout, AnswerTooLarge, ConnectionLost, EngineClient, NoAnswer
from batch_pipeline.engine.engine import Engine
from batch_pipeline.engine.server import VllmServer
from batch_pipeline.models import Model

__all__ = [
    "Answer",
    "AnswerTimeout",
    "AnswerTooLarge",
    "AttachedEngine",
    "ConnectionLost",
    "Engine",
    "EngineClient",
    "NoAnswer",
    "VllmServer",
    "engine_for",
]


def engine_for(name: str, model: Model, log: Path, pod_url: str | None = None) -> Engine:
    """Return the engine of a model of the catalogue: attached to where it has an `engine_url` or this worker's pod has
    its engine (`pod_url`), else started here.
    """
    url = model.engine_url or pod_url
    if url is not None:
        return AttachedEngine(name, url, model.engine_start_seconds)
    return VllmServer(name, model, log)
