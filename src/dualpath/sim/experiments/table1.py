"""Table 1: how much KV has to be loaded for each FLOP of computing a turn. Arithmetic, nothing is run.

GB of cached KV by PFLOP, for an append of 429 tokens (the 64K trace's) to 16,384 and 65,536 cached ones,
FP8 KV but for Qwen2.5-32B. The rows of the DeepSeek models leave a gap, which the experiment explains.
"""

from __future__ import annotations

from collections.abc import Sequence

from dualpath.sim.case import Case
from dualpath.sim.experiments.experiment import (
    Evaluation,
    Experiment,
    Figure,
    Results,
    Settings,
)
from dualpath.sim.model_config import load_model
from dualpath.sim.paper_traces import PAPER_TRACES

__all__ = ["EXPERIMENT"]

MODELS = ("qwen2.5-32b", "gpt-oss-120b", "qwen3-235b", "deepseek-v3.2", "deepseek-v3")
CACHED = {"16k": 16_384, "64k": 65_536}


def _cases(settings: Settings) -> Sequence[Case]:
    return ()


def _evaluate(settings: Settings, results: Results) -> Evaluation:
    trace = PAPER_TRACES["64k"]
    append = int(trace.append_tokens)
    figures = []
    for name in MODELS:
        model = load_model(name)
        for label, cached in CACHED.items():
            ours = model.cache_compute_ratio(cached, append)
            figures.append(Figure(f"table1.{name}.{label}", ours, simulated=False))
    at_mean = load_model("deepseek-v3.2").cache_compute_ratio(int(trace.context_tokens), append)
    figures.append(Figure("table1.deepseek-v3.2.mean", at_mean, simulated=False))
    rows: list[Sequence[str | float]] = [("figure", "gb_per_pflop")]
    rows += [(each.id, each.ours) for each in figures]
    return Evaluation(figures, rows=rows)


EXPERIMENT = Experiment(
    "table1",
    "KV to load by FLOPs to compute",
    "GB of cached KV by PFLOP of computing 429 appended tokens. Computed, not simulated.",
    _cases,
    _evaluate,
    gap="The paper does not say how it counts the FLOPs of latent attention. DeepSeek-V3 is "
    "counted here with absorbed projections, as kernels over cached contexts compute it; "
    "that takes a tenth more FLOPs than its row says. DeepSeek-V3.2 at 64K loads a few "
    "percent more than its row says, as if the paper counted fewer bytes for the indexer's "
    "keys. Models with grouped queries leave no such choice, and agree.",
)
