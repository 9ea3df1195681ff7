"""Replay of agent sessions against any OpenAI endpoint: what is sent and when, what comes back, figures."""

from __future__ import annotations

from dualpath.bench.replay.campaign import (
    Acceptance,
    Arrivals,
    Found,
    LoadMaker,
    find_max_rate,
    play_all,
)
from dualpath.bench.replay.conversation import Conversation, PromptBody
from dualpath.bench.replay.endpoint import Answer, Endpoint, EndpointConfig, EndpointFacts, Sender
from dualpath.bench.replay.figures import by_run, run_figures, run_key
from dualpath.bench.replay.load import Limits, OfflineLoad, OnlineLoad, Tally
from dualpath.bench.replay.records import (
    ReplayRecord,
    RequestRecord,
    Run,
    ServerSample,
    SessionRecord,
    read_record,
)
from dualpath.bench.replay.runner import run_load
from dualpath.bench.replay.search import RateSearch
from dualpath.bench.replay.slo import Slo, parse_slo
from dualpath.bench.replay.steady import SteadyRule, SteadyState, Verdict
from dualpath.bench.replay.tokens import TokenSource

__all__ = [
    "Acceptance",
    "Answer",
    "Arrivals",
    "Conversation",
    "Endpoint",
    "EndpointConfig",
    "EndpointFacts",
    "Found",
    "Limits",
    "LoadMaker",
    "OfflineLoad",
    "OnlineLoad",
    "PromptBody",
    "RateSearch",
    "ReplayRecord",
    "RequestRecord",
    "Run",
    "Sender",
    "ServerSample",
    "SessionRecord",
    "Slo",
    "SteadyRule",
    "SteadyState",
    "Tally",
    "TokenSource",
    "Verdict",
    "by_run",
    "find_max_rate",
    "parse_slo",
    "play_all",
    "read_record",
    "run_figures",
    "run_key",
    "run_load",
]
