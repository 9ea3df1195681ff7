"""Writes a run as a timeline in the Chrome trace format, which Perfetto (ui.perfetto.dev) opens.

The JSON object form: `traceEvents` and, beside them, `otherData`, which says how much of the run is in the
file. A node is a process and an engine one or more of its threads: complete events ("X") of a thread must
nest, so requests that overlap on an engine have rows of their own. A request stands on its prefill engine
until its first token, with its parts queued, read, prefill wait and prefill, and then on its decode engine,
with hand-over (until its second token) and decode. Counters ("C") show how much of each storage NIC is
used.

Written as it is made, an event a line. Invariants: events are in order of `ts`, metadata first; times are in
microseconds from the start of the run; all pids and tids are above 0.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dualpath.sim.cluster import Cluster

if TYPE_CHECKING:  # It brings numba.
    from dualpath.sim.outcome import Outcome

__all__ = ["MAX_REQUESTS", "timeline_events", "write_timeline"]

MAX_REQUESTS = 20_000
"""Some 100,000 events, which Perfetto opens at once."""

Event = dict[str, Any]

_PREFILL_PARTS = (
    ("queued", "arrived_s", "assigned_s"),
    ("read", "assigned_s", "read_s"),
    ("prefill wait", "read_s", "prefill_s"),
    ("prefill", "prefill_s", "first_token_s"),
)
_DECODE_PARTS = (
    ("hand-over", "first_token_s", "second_token_s"),
    ("decode", "second_token_s", "finished_s"),
)
_ROWS = 1 << 16
"""Rows that an engine can have, for its tids."""


def write_timeline(
    path: Path, cluster: Cluster, outcome: Outcome, *, title: str, max_requests: int = MAX_REQUESTS
) -> None:
    """The first `max_requests` requests that got a first token, by arrival. Whole or not at all."""
    kept = _kept(outcome, max_requests)
    other = {
        "title": title,
        "requests": len(kept),
        "requests_of_run": len(outcome.records),
        "max_requests": max_requests,
        "end_s": outcome.end_s,
    }
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","otherData":' + msgspec.json.encode(other))
        file.write(b',"traceEvents":[\n')
        for number, event in enumerate(timeline_events(cluster, outcome, max_requests)):
            file.write((b",\n" if number else b"") + msgspec.json.encode(event))
        file.write(b"\n]}\n")
    partial.replace(path)


def timeline_events(cluster: Cluster, outcome: Outcome, max_requests: int) -> Iterator[Event]:
    """Metadata, then the rest in order of time; of equal times the longer first, so that events nest."""
    spans, rows = _spans(cluster, outcome, max_requests)
    spans.sort(key=lambda each: (each["ts"], -each["dur"]))
    yield from _names(cluster, rows)
    until_us = max((each["ts"] + each["dur"] for each in spans), default=0)
    counters = _counters(cluster, outcome, until_us)
    yield from heapq.merge(spans, counters, key=lambda each: each["ts"])


def _kept(outcome: Outcome, max_requests: int) -> list[int]:
    """Places of the records, which are in order of arrival."""
    return (outcome.records.first_token_s > 0).nonzero()[0][:max_requests].tolist()  # type: ignore[no-any-return]


def _spans(
    cluster: Cluster, outcome: Outcome, max_requests: int
) -> tuple[list[Event], dict[int, int]]:
    """Complete events; and of each engine that has any, how many rows."""
    free: dict[int, list[tuple[float, int]]] = {}
    rows: dict[int, int] = {}
    spans: list[Event] = []

    def row_of(engine: int, start_us: int, end_us: int) -> int:
        """One whose last event has ended; calls come in order of `start_us`."""
        waiting = free.setdefault(engine, [])
        if waiting and waiting[0][0] <= start_us:
            _, row = heapq.heappop(waiting)
        else:
            row = rows.get(engine, 0)
            rows[engine] = row + 1
        heapq.heappush(waiting, (end_us, row))
        return row

    records = [outcome.records[place] for place in _kept(outcome, max_requests)]
    stays = [(_us(each.arrived_s), 0, number) for number, each in enumerate(records)]
    stays += [
        (_us(each.first_token_s), 1, number)
        for number, each in enumerate(records)
        if each.finished_s > each.first_token_s
    ]
    for start_us, side, number in sorted(stays):
        each = records[number]
        parts = _DECODE_PARTS if side else _PREFILL_PARTS
        engine = int(each.decode if side else each.prefill)
        end_us = _us(each.finished_s if side else each.first_token_s)
        place = {
            "pid": 1 + engine // cluster.gpus,
            "tid": 1 + engine * _ROWS + row_of(engine, start_us, end_us),
        }
        name = f"agent {each.agent} turn {each.turn}"
        spans.append(_span(name, "request", start_us, end_us, place, args=_arguments(each)))
        for part, before, after in parts:
            if each[after] > each[before]:
                spans.append(_span(part, "part", _us(each[before]), _us(each[after]), place))
    return spans, rows


def _span(
    name: str, category: str, start_us: int, end_us: int, place: Event, args: Event | None = None
) -> Event:
    event = {"name": name, "cat": category, "ph": "X", "ts": start_us, "dur": end_us - start_us}
    return event | place | ({} if args is None else {"args": args})


def _arguments(record: Any) -> Event:
    return {
        "prompt_tokens": int(record.prompt_tokens),
        "stored_tokens": int(record.hit_tokens),
        "read_by_prefill_side": int(record.pe_tokens),
        "output_tokens": int(record.output_tokens),
        "prefill_engine": int(record.prefill),
        "decode_engine": int(record.decode),
    }


def _names(cluster: Cluster, rows: dict[int, int]) -> Iterator[Event]:
    for node in range(cluster.nodes):
        role = "prefill" if node < cluster.prefill_nodes else "decode"
        number = node if node < cluster.prefill_nodes else node - cluster.prefill_nodes
        yield _metadata("process_name", 1 + node, {"name": f"{role} node {number}"})
        yield _metadata("process_sort_index", 1 + node, {"sort_index": node})
    for engine, count in sorted(rows.items()):
        pid = 1 + engine // cluster.gpus
        for row in range(count):
            name = f"engine {engine % cluster.gpus}" + (f", row {row + 1}" if count > 1 else "")
            yield _metadata("thread_name", pid, {"name": name}, tid=1 + engine * _ROWS + row)


def _metadata(name: str, pid: int, args: Event, tid: int | None = None) -> Event:
    event: Event = {"name": name, "ph": "M", "ts": 0, "pid": pid, "args": args}
    return event if tid is None else event | {"tid": tid}


def _counters(cluster: Cluster, outcome: Outcome, until_us: int) -> Iterator[Event]:
    """At the start of each window in which a node's value changed, until there is nothing more to see."""
    full_bytes = outcome.snic_bytes_s * outcome.window_s
    previous: list[float] = [-1.0] * cluster.nodes
    for window in range(outcome.snic_bytes.shape[1]):
        ts = _us(window * outcome.window_s)
        if ts > until_us:
            return
        for node, served in enumerate(outcome.snic_bytes[:, window].tolist()):
            share = round(served / full_bytes, 4)
            if share != previous[node]:
                previous[node] = share
                yield {
                    "name": "SNIC utilisation",
                    "ph": "C",
                    "ts": ts,
                    "pid": 1 + node,
                    "args": {"share": share},
                }


def _us(seconds: float) -> int:
    return round(float(seconds) * 1e6)
