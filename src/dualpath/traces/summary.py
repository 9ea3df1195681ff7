"""A trace in figures. Knows no files."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from dualpath.base.errors import ConfigError
from dualpath.traces.lengths import context_tokens, reused_tokens
from dualpath.traces.model import Trace

__all__ = ["TraceStatistics", "statistics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStatistics:
    """Means of tokens, synthetic first rounds left out as turns but in the prompts.

    A turn's `append` is what its prompt has that no earlier prompt of the trace had (`reused_tokens`), `gen`
    its output and `context` its prompt. `append_tokens`, `gen_tokens` and `context_tokens` are means over all
    turns; `session_append_tokens`, `session_gen_tokens` and `session_context_tokens` means over the sessions
    of each one's mean, as in the paper's table of traces. `total_tokens`: of a session, its longest prompt
    with its output. `hit_rate`: the part of all prompt tokens that an endless cache finds.
    """

    sessions: int
    turns: int
    turns_per_session: float
    append_tokens: float
    gen_tokens: float
    context_tokens: float
    session_append_tokens: float
    session_gen_tokens: float
    session_context_tokens: float
    total_tokens: float
    hit_rate: float


def statistics(trace: Trace) -> TraceStatistics:
    """Takes seconds for a million distinct blocks. Raises ConfigError when the trace is empty."""
    if not trace.sessions:
        raise ConfigError(f"{trace.name} has no sessions")
    context = [context_tokens(session) for session in trace.sessions]
    reused = reused_tokens(trace)
    append = [
        [prompt - known for prompt, known in zip(prompts, found, strict=True)]
        for prompts, found in zip(context, reused, strict=True)
    ]
    gen = [[turn.output_tokens for turn in session.turns] for session in trace.sessions]
    total = [
        max(prompt + output for prompt, output in zip(prompts, outputs, strict=True))
        for prompts, outputs in zip(context, gen, strict=True)
    ]
    prompt_tokens = sum(map(sum, context))
    return TraceStatistics(
        sessions=len(trace.sessions),
        turns=trace.turns,
        turns_per_session=trace.turns / len(trace.sessions),
        append_tokens=sum(map(sum, append)) / trace.turns,
        gen_tokens=sum(map(sum, gen)) / trace.turns,
        context_tokens=prompt_tokens / trace.turns,
        session_append_tokens=fmean(map(fmean, append)),
        session_gen_tokens=fmean(map(fmean, gen)),
        session_context_tokens=fmean(map(fmean, context)),
        total_tokens=fmean(total),
        hit_rate=sum(map(sum, reused)) / prompt_tokens,
    )
