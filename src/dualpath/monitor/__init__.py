"""Metrics and traces: their names, and what emits them to Prometheus and OpenTelemetry."""

from dualpath.monitor.metrics import EngineSample, Metrics
from dualpath.monitor.tracing import RequestFacts, Stage, Tracing

__all__ = ["EngineSample", "Metrics", "RequestFacts", "Stage", "Tracing"]
