"""Dagster resources: what assets, ops and sensors work with."""

from resources.service import Parts, Service, make_resources

__all__ = ["Parts", "Service", "make_resources"]
