"""`dualpath bench sim` with few agents: all figures are there."""

from __future__ import annotations

import argparse

from dualpath.bench import sim
from dualpath.policy import is_compiled


def test_a_quick_run_gives_all_figures_but_those_of_the_large_cluster() -> None:
    parser = argparse.ArgumentParser()
    sim.add_arguments(parser)
    args = parser.parse_args(["--quick", "--repeats", "1", "--small-agents", "4"])
    result = sim.run(args, lambda line: None)
    assert set(result.figures) == {
        "small_s",
        "small_s_runs",
        "events_per_s",
        "requests_per_s",
        "compile_s",
    }
    assert result.setup["small"] == "2P4D"
    assert result.setup["policy_compiled"] is is_compiled()
