"""Self-contained HTML reports: one file, no network."""

from dualpath.bench.report.replay_report import write_report

__all__ = ["write_report"]
