"""What the lines of one batch are held against: its endpoint, the models that serve it, and the limits."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from batch_pipeline.intake.problems import shown
from batch_pipeline.intake.tokens import TokenCounter
from batch_pipeline.models import ENDPOINTS, Model
from batch_pipeline.settings import Settings

_NAMED = 10


class Served:
    """A model that serves the batch's endpoint; its tokenizer is loaded when the first request names it."""

    def __init__(self, model: Model) -> None:
        self.model = model

    @cached_property
    def counter(self) -> TokenCounter:
        """Counts the model's tokens."""
        return TokenCounter(Path(self.model.source))


class Rules:
    """The rules of one batch. Raises ValueError for an endpoint that no batch can have."""

    def __init__(self, settings: Settings, endpoint: str) -> None:
        if endpoint not in ENDPOINTS:
            raise ValueError(f"{endpoint} is not one of {', '.join(ENDPOINTS)}")
        intake = settings.intake
        self.endpoint = endpoint
        self.max_line_bytes = intake.max_line_bytes
        self.max_custom_id_characters = intake.max_custom_id_characters
        self.max_depth = intake.max_depth
        self.models = {name: Served(model) for name, model in settings.models.items() if endpoint in model.endpoints}
        self._catalogue = settings.models

    def no_such_model(self, name: str) -> str:
        """Return what to tell somebody who named a model that does not serve this endpoint."""
        if name in self._catalogue:
            served = ", ".join(self._catalogue[name].endpoints)
            return f"the model {shown(name)} does not serve {self.endpoint}, only {served}"
        known = sorted(self.models)
        listed = ", ".join(known[:_NAMED]) + (" and others" if len(known) > _NAMED else "")
        return f"there is no model {shown(name)}; the models that serve {self.endpoint} are: {listed or 'none'}"
