"""The scheduler on paper time: a workload, the service's own policy functions, and what would come of it."""

from batch_pipeline.simulate.policies import OURS, POLICIES, Policy
from batch_pipeline.simulate.report import Report
from batch_pipeline.simulate.simulation import simulate
from batch_pipeline.simulate.workload import Workload, load

__all__ = ["OURS", "POLICIES", "Policy", "Report", "Workload", "load", "simulate"]
