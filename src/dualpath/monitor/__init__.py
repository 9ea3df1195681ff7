"""Metrics: their names, and what emits them to Prometheus."""

from dualpath.monitor.metrics import EngineSample, Metrics

__all__ = ["EngineSample", "Metrics"]
