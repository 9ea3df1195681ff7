"""What the server itself measured of the requests of one run, from its metrics before, meanwhile and after.

A machine drifts from run to run by more than load generators differ. What a tool says of a run, divided by
what the server says of the same requests, does not.
"""

from __future__ import annotations

import re
import threading
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from dualpath.base.errors import DualPathError
from dualpath.bench.peers.figures import LoadFigures

__all__ = ["MetricsUnreadable", "ServerSide", "from_looks", "observed"]

_DEADLINE_S = 10.0
_LOOK_S = 0.25
_SERIES = {
    "ttft_sum_s": "dualpath:time_to_first_token_seconds_sum",
    "e2e_sum_s": "dualpath:e2e_request_latency_seconds_sum",
    "requests": "dualpath:e2e_request_latency_seconds_count",
    "tokens": "dualpath:generation_tokens_total",
}


class MetricsUnreadable(DualPathError):
    """The server's metrics cannot be read, or lack what is needed."""


class ServerSide(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run whose requests all have as many output tokens. Means over requests; `last_e2e_s`: of the
    request that ended last."""

    ttft_mean_s: float
    tpot_mean_s: float
    e2e_mean_s: float
    last_e2e_s: float
    requests: int

    def expected(self, last_due_s: float) -> dict[str, float]:
        """The compared figures, had a tool measured at the server. `last_due_s`: of the last request."""
        return {
            "ttft_mean_s": self.ttft_mean_s,
            "tpot_mean_s": self.tpot_mean_s,
            "e2e_mean_s": self.e2e_mean_s,
            "jct_s": last_due_s + self.last_e2e_s,
        }


def observed(base_url: str, run: Callable[[], LoadFigures]) -> tuple[LoadFigures, ServerSide]:
    """Run, and say what the server of `base_url` (with /v1) measured meanwhile. Raises MetricsUnreadable."""
    looks = [_read(base_url)]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_LOOK_S):
            with suppress(MetricsUnreadable):  # The last look, below, tells.
                looks.append(_read(base_url))

    watcher = threading.Thread(target=watch, name="server-side")
    watcher.start()
    try:
        figures = run()
    finally:
        ended.set()
        watcher.join()
    looks.append(_read(base_url))
    return figures, from_looks(looks)


def from_looks(looks: Sequence[str]) -> ServerSide:
    """From texts of metrics, the first before the run and the last after it. Raises MetricsUnreadable when no
    request ended in between."""
    values = [{name: _value(text, series) for name, series in _SERIES.items()} for text in looks]
    before, after = values[0], values[-1]
    grown = {name: after[name] - before[name] for name in _SERIES}
    requests = round(grown["requests"])
    if requests < 1 or grown["tokens"] <= requests:
        raise MetricsUnreadable(f"the server counted {requests} requests in this run")
    # The last look before the last request ended.
    earlier = [each for each in values if each["requests"] < after["requests"]][-1]
    decoded_s = grown["e2e_sum_s"] - grown["ttft_sum_s"]
    return ServerSide(
        ttft_mean_s=grown["ttft_sum_s"] / requests,
        tpot_mean_s=decoded_s / (grown["tokens"] - requests),
        e2e_mean_s=grown["e2e_sum_s"] / requests,
        last_e2e_s=(after["e2e_sum_s"] - earlier["e2e_sum_s"])
        / (after["requests"] - earlier["requests"]),
        requests=requests,
    )


def _value(text: str, series: str) -> float:
    """0 for one that is not there yet."""
    found = re.search(rf"^{re.escape(series)} (\S+)$", text, re.MULTILINE)
    return 0.0 if found is None else float(found[1])


def _read(base_url: str) -> str:
    url = base_url.removesuffix("/v1") + "/metrics"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_DEADLINE_S) as answer:
            return bytes(answer.read()).decode()
    except OSError as error:
        raise MetricsUnreadable(f"{url}: {error}") from error
