"""How the pod of a run has ended: without Kubernetes' client, which no run has to load."""

from __future__ import annotations

from enum import Enum


class PodEnd(Enum):
    """How a pod has ended."""

    DIED = "died"
    """By itself, or for lack of memory: Kubernetes keeps its object."""
    TAKEN = "taken"
    """It was deleted: preempted, drained, or by hand. Its Job has failed, and no pod is left of it."""
    NO_JOB = "no job"
    """Its Job is not there: deleted, or not made yet."""
