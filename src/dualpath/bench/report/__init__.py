"""HTML reports of replays, on the pages of `dualpath.report`."""

from dualpath.bench.report.replay_report import write_report

__all__ = ["write_report"]
