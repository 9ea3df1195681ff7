"""One system measured on a testbed: sessions played through its API while storage NICs are watched."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from dualpath.base.errors import DualPathError
from dualpath.bench.cluster.answers import AnswerLog, Answers, LoggedSender
from dualpath.bench.cluster.nics import NicSeries, NicWatch
from dualpath.bench.replay import (
    Conversation,
    Endpoint,
    EndpointConfig,
    Limits,
    OfflineLoad,
    Run,
    TokenSource,
    run_load,
)
from dualpath.bench.replay.figures import ended_well
from dualpath.testbed import Testbed
from dualpath.traces.model import Session

__all__ = ["Pass", "PassFailed", "play", "watch"]

_LONGEST_S = 1800.0


class PassFailed(DualPathError):
    """Requests failed, so nothing was measured; the message has the first failure."""


@dataclass(frozen=True, slots=True)
class Pass:
    """All agents of a workload, started together. `read_tokens`: prompt tokens that came from the store, of
    which `nics` saw the bytes; its times count from the start."""

    jct_s: float
    requests: int
    prompt_tokens: int
    read_tokens: int
    output_tokens: int
    ttft_s_mean: float
    nics: NicSeries
    answers: Answers


async def _play(
    base_url: str, sessions: Sequence[Session], source: TokenSource, log: AnswerLog
) -> Run:
    async with Endpoint(EndpointConfig(base_url=base_url, timeout_s=_LONGEST_S)) as endpoint:
        await endpoint.probe()
        return await run_load(
            OfflineLoad(sessions),
            LoggedSender(endpoint, log),
            partial(Conversation, source=source),
            Limits(duration_s=_LONGEST_S),
        )


def play(
    base_url: str,
    sessions: Sequence[Session],
    source: TokenSource,
    log: AnswerLog | None = None,
) -> Run:
    """All sessions from now on, to their ends. Raises PassFailed."""
    run = asyncio.run(_play(base_url, sessions, source, AnswerLog() if log is None else log))
    failed = next((each for each in run.requests if each.error), None)
    if failed is not None:
        raise PassFailed(f"{failed.error}: {failed.detail}")
    if run.ended != "complete":
        raise PassFailed(f"not ended in {_LONGEST_S:g} s: {run.ended}")
    return run


def watch(bed: Testbed, base_url: str, sessions: Sequence[Session], source: TokenSource) -> Pass:
    """Raises PassFailed."""
    log = AnswerLog()
    with NicWatch(bed.counters, list(bed.nodes)) as nics:
        run = play(base_url, sessions, source, log)
        ended_s = time.monotonic()
    requests = ended_well(run.requests)
    started_s = ended_s - run.duration_s
    return Pass(
        jct_s=max(each.finished_s or 0.0 for each in run.sessions),
        requests=len(requests),
        prompt_tokens=sum(each.prompt_tokens for each in requests),
        read_tokens=sum(max(each.cached_tokens, 0) for each in requests),
        output_tokens=sum(each.output_tokens for each in requests),
        ttft_s_mean=statistics.fmean(each.ttft_s or 0.0 for each in requests),
        nics=nics.series.since(started_s),
        answers=log.answers,
    )
