"""Traces: what they are, their file formats, and the generator of the paper's trajectories.

    trace = limit_context(open_trace("coding-agent"), 65536).trace

`open_trace` reads a file of any format, a trace of the package or the generator; `select` chooses from one,
`statistics` describes it, `poisson` and `recorded` say when its sessions arrive.
"""

from dualpath.traces.arrivals import by_start, poisson, recorded
from dualpath.traces.azure import read_arrivals
from dualpath.traces.catalog import BUILT_IN, FORMATS, BuiltInTrace, open_trace
from dualpath.traces.lengths import context_tokens, reused_tokens
from dualpath.traces.model import (
    AppendPrompt,
    BlockPrompt,
    BlockRun,
    Prompt,
    Session,
    TextPrompt,
    Trace,
    Turn,
)
from dualpath.traces.select import (
    FIRST_ROUND_TOKENS,
    LimitedTrace,
    limit_context,
    scale_time,
    take_sessions,
    without_delays,
)
from dualpath.traces.summary import TraceStatistics, statistics

__all__ = [
    "BUILT_IN",
    "FIRST_ROUND_TOKENS",
    "FORMATS",
    "AppendPrompt",
    "BlockPrompt",
    "BlockRun",
    "BuiltInTrace",
    "LimitedTrace",
    "Prompt",
    "Session",
    "TextPrompt",
    "Trace",
    "TraceStatistics",
    "Turn",
    "by_start",
    "context_tokens",
    "limit_context",
    "open_trace",
    "poisson",
    "read_arrivals",
    "recorded",
    "reused_tokens",
    "scale_time",
    "statistics",
    "take_sessions",
    "without_delays",
]
