"""The router's benchmark: a short run of all its parts."""

from __future__ import annotations

import argparse

from dualpath.bench import router


def test_a_short_run_gives_all_figures() -> None:
    parser = argparse.ArgumentParser()
    router.add_arguments(parser)
    args = parser.parse_args(["--rate", "50", "--seconds", "0.5", "--prompt-tokens", "20"])
    result = router.run(args, lambda line: None)
    assert result.bench == "router"
    for prefix in ("", "plain_"):
        figures = {name: result.figures[f"{prefix}{name}"] for name in _FIGURES}
        assert figures["requests"] == 25
        assert figures["routed_ms_p50"] > 0 and figures["direct_ms_p50"] > 0
        difference = figures["routed_ms_p50"] - figures["direct_ms_p50"]
        assert abs(figures["overhead_ms_p50"] - difference) < 0.01
    assert result.setup["rate"] == 50


_FIGURES = (
    "overhead_ms_p50",
    "overhead_ms_p90",
    "overhead_ms_p99",
    "routed_ms_p50",
    "direct_ms_p50",
    "requests",
)
