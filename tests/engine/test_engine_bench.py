"""`dualpath bench engine` at a small size: its figures are there and the two engines agree."""

from __future__ import annotations

import argparse

import pytest
import torch

from dualpath.bench import engine


@pytest.mark.slow
def test_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    engine.add_arguments(parser)
    sizes = {
        "--threads": 1,
        "--layers": 2,
        "--cached-tokens": 1000,
        "--new-tokens": 24,
        "--batch": 2,
        "--context-tokens": 32,
        "--steps": 3,
        "--repeats": 1,
    }
    args = parser.parse_args([str(part) for pair in sizes.items() for part in pair])
    threads, lines = torch.get_num_threads(), []
    try:
        result = engine.run(args, lines.append)
    finally:
        torch.set_num_threads(threads)
    figures = result.figures
    # 1024 tokens are a multiple of the buffer's step: exactly two of two layers.
    assert figures["kv_peak_share"] == 1.0
    assert isinstance(figures["prefill_ratio"], float)
    assert figures["prefill_ratio"] > 0
    assert isinstance(figures["decode_ratio"], float)
    assert figures["decode_ratio"] > 0
    assert isinstance(figures["prefill_logit_error"], float)
    assert figures["prefill_logit_error"] < 0.1
    assert len(lines) == 5
    assert capsys.readouterr().out == ""
