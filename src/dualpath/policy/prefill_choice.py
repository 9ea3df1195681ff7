"""Which prefill engine takes the request at the head of the queue (paper, section on scheduling).

Pure: reads the engines' figures, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from dualpath.policy.cluster import EngineState

__all__ = ["choose_prefill"]


def choose_prefill(
    engines: Iterable[EngineState], buffer_tokens: int, *, alpha_tokens: int, beta_tokens: int
) -> EngineState | None:
    """The engine with the fewest tokens, of the best class that has any; None when none may take it.

    Classes: (1) tokens > beta: never. (2) tokens <= beta and its node's read queue <= alpha.
    (3) tokens <= beta and read queue > alpha: only when (2) is empty. An engine whose staging buffer
    could never hold `buffer_tokens` is in no class. Equal tokens: the first in `engines`.
    """
    short_queue: EngineState | None = None
    long_queue: EngineState | None = None
    fewest_short = fewest_long = 0
    for engine in engines:
        tokens = engine.tokens
        if tokens > beta_tokens or (short_queue is not None and tokens >= fewest_short):
            continue
        if engine.buffer_tokens < buffer_tokens:
            continue
        if engine.node.read_queue_tokens <= alpha_tokens:
            short_queue, fewest_short = engine, tokens
        elif long_queue is None or tokens < fewest_long:
            long_queue, fewest_long = engine, tokens
    return short_queue if short_queue is not None else long_queue
