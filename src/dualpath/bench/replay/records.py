"""What a replay leaves behind: one record a request, one a session, what the server said meanwhile.

These are the files that `dualpath bench compare` reads, so their fields are a format: only add. Knows
neither HTTP nor traces. All times are seconds from the start of the run unless said otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from dualpath.base.errors import ConfigError

__all__ = [
    "FORMAT",
    "ReplayRecord",
    "RequestRecord",
    "Run",
    "ServerSample",
    "SessionRecord",
    "read_record",
]

FORMAT = "dualpath-replay/1"


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One request: ended well (`error` is "" and `end_s` is there), failed (`error`), or cut off when the
    run ended (neither). Not tracked by the garbage collector, as a run keeps many and they have no cycles.

    `scheduled_s`: when it was to be sent: the session's arrival for a first turn, else the end of the turn
    before and the delay. Latencies count from here, so that a client that is late does not hide a slow
    server (coordinated omission). `sent_s`: when it was. `first_s`, `second_s`, `last_s`: when the first,
    second and last tokens came; `end_s`: the end of the answer. None where it did not come so far.
    `prompt_tokens`, `output_tokens`, `cached_tokens`: as the server counted; cached -1: it does not say.
    `timings`: parts of the time to the first token that the server reports, by name, in order.
    `error`: its kind, of few words that can be counted; `detail` tells more.
    """

    session: int
    turn: int
    scheduled_s: float
    sent_s: float
    first_s: float | None = None
    second_s: float | None = None
    last_s: float | None = None
    end_s: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = -1
    cached_by_path: dict[str, int] = {}
    timings: dict[str, float] = {}
    error: str = ""
    detail: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return None if self.first_s is None else self.first_s - self.scheduled_s

    @property
    def ttst_s(self) -> float | None:
        """Time from the first to the second token."""
        if self.first_s is None or self.second_s is None:
            return None
        return self.second_s - self.first_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of an output token after the first."""
        if self.first_s is None or self.last_s is None or self.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        """From the scheduled start to the last token."""
        return None if self.last_s is None else self.last_s - self.scheduled_s


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One session that was due. `turns` counts its synthetic first round too. `finished_s`: the end of its
    last turn; None: it failed or was cut off."""

    id: str
    turns: int
    scheduled_s: float
    finished_s: float | None = None


class ServerSample(msgspec.Struct, frozen=True, kw_only=True):
    """The server's metrics at one time, by exported name with labels, such as
    `dualpath:snic_read_bytes_total{group="p0"}`; only those that reports use."""

    at_s: float
    metrics: dict[str, float]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One measured run under one load. `agents`: offline, sessions at once; `rate_aps`: online, agents per
    second offered. `ended`: "complete", "duration", "steady state", "ttft limit", "errors", "interrupted".
    `from_s`: records before it are warm-up and left out of the figures; of a run that ended for being
    steady, it is where the steady window starts. `client_cpu_s`: of this process. `itl_s`: quantiles of the
    gaps between tokens, 0 %, 1 %, ..., 100 %."""

    mode: str
    agents: int | None = None
    rate_aps: float | None = None
    ended: str = "complete"
    from_s: float = 0.0
    duration_s: float = 0.0
    client_cpu_s: float = 0.0
    requests: list[RequestRecord] = []
    sessions: list[SessionRecord] = []
    samples: list[ServerSample] = []
    itl_s: list[float] = []


class ReplayRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A result file. `label`: what it is called in comparisons. `figures` and `setup`: as printed."""

    format: str = FORMAT
    label: str
    figures: dict[str, Any]
    setup: dict[str, Any]
    runs: list[Run]

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        partial = path.with_name(f".{path.name}.partial")
        partial.write_bytes(msgspec.json.encode(self))
        partial.replace(path)


def read_record(path: Path) -> ReplayRecord:
    """Raises ConfigError that names the file and what is wrong."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=ReplayRecord)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{path} is no result of `dualpath bench replay --output`: {error}"
        ) from error
    if record.format != FORMAT:
        raise ConfigError(f"{path} has format {record.format!r}, expected {FORMAT!r}")
    return record
