"""The metrics: one table that says what exists, and `Metrics` with one typed method for each fact.

The exporter and docs/metrics.md are made from `TABLE`. Knows nothing of who emits. A gauge is not exported
before its first value, so none shows a zero that nobody measured. Labels have few values: engines that are
gone take their samples with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dualpath.base.errors import InvariantViolation
from dualpath.base.ids import EngineId, GroupId, Role, Side
from dualpath.traffic import DEVICE, STORE, PeerTraffic, TrafficKey

__all__ = [
    "PREFIX",
    "TABLE",
    "EngineSample",
    "MetricKind",
    "MetricSpec",
    "Metrics",
    "metrics_reference",
]

PREFIX = "dualpath:"


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """`name` without the prefix; counters are exported with `_total` after it."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exported_name(self) -> str:
        suffix = "_total" if self.kind is MetricKind.COUNTER else ""
        return PREFIX + self.name + suffix


# Close to the buckets of vLLM, so that its dashboards fit after a change of prefix.
_UP_TO_1_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)
_TTFT_S = (0.001, 0.005, *_UP_TO_1_S, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_TOKEN_S = (*_UP_TO_1_S, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))

_TRAFFIC = ("engine", "class", "peer")

_C, _G, _H = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

TABLE: tuple[MetricSpec, ...] = (
    # Requests, as clients see them.
    MetricSpec(
        "time_to_first_token_seconds", _H, "From arrival to the first token.", buckets=_TTFT_S
    ),
    MetricSpec(
        "inter_token_latency_seconds",
        _H,
        "Between one token of a request and the next.",
        buckets=_TOKEN_S,
    ),
    MetricSpec(
        "e2e_request_latency_seconds", _H, "From arrival to the last token.", buckets=_REQUEST_S
    ),
    MetricSpec(
        "request_queue_time_seconds",
        _H,
        "From arrival to the assignment of engines.",
        buckets=_REQUEST_S,
    ),
    MetricSpec(
        "request_read_time_seconds",
        _H,
        "From assignment until all stored KV of a request was read.",
        buckets=_REQUEST_S,
    ),
    MetricSpec(
        "request_prefill_time_seconds",
        _H,
        "From the start of prefill to its end.",
        buckets=_REQUEST_S,
    ),
    MetricSpec("request_prompt_tokens", _H, "Prompt tokens of a request.", buckets=_TOKENS),
    MetricSpec("request_generation_tokens", _H, "Generated tokens of a request.", buckets=_TOKENS),
    MetricSpec("prompt_tokens", _C, "Prompt tokens of ended requests."),
    MetricSpec("generation_tokens", _C, "Generated tokens."),
    MetricSpec(
        "request_success",
        _C,
        "Ended requests by the reason of their end: stop, length, abort or error.",
        labels=("finished_reason",),
    ),
    MetricSpec(
        "http_responses", _C, "HTTP responses by path and status.", labels=("path", "status")
    ),
    MetricSpec("num_requests_running", _G, "Requests that have their engines."),
    MetricSpec("num_requests_waiting", _G, "Requests that wait for engines."),
    MetricSpec(
        "request_attempts",
        _C,
        "Attempts started; more than one a request means that one was redone.",
    ),
    MetricSpec(
        "request_retries", _C, "Attempts that failed and were redone, by cause.", labels=("cause",)
    ),
    # The prefix cache and storage.
    MetricSpec("prefix_cache_queries", _C, "Prompt tokens looked up in the index."),
    MetricSpec("prefix_cache_hits", _C, "Of those, tokens that were found."),
    MetricSpec("cache_hit_ratio", _G, "Hits by queries since the start."),
    MetricSpec(
        "kv_read_bytes", _C, "KV read from storage, by the side that read it.", labels=("path",)
    ),
    MetricSpec("kv_written_bytes", _C, "KV written to storage."),
    MetricSpec("kv_dropped_blocks", _C, "Blocks not persisted as storage was behind."),
    MetricSpec(
        "kv_load_failures", _C, "Loads of stored KV that failed, by cause.", labels=("cause",)
    ),
    MetricSpec(
        "kv_loads_skipped",
        _C,
        "Hits that were computed instead, as loading was measured to take longer.",
    ),
    MetricSpec(
        "store_up", _G, "1 while the store answers, 0 while requests are served without it."
    ),
    MetricSpec("store_blocks", _G, "Blocks in the index."),
    MetricSpec("store_used_bytes", _G, "Bytes that this server keeps in the store."),
    MetricSpec("store_pinned_requests", _G, "Requests whose stored blocks are kept from eviction."),
    MetricSpec("store_evicted_blocks", _C, "Blocks removed from the store for room."),
    MetricSpec(
        "snic_utilization",
        _G,
        "Read bandwidth of a node now, by the highest that it has reached.",
        labels=("group",),
    ),
    MetricSpec(
        "snic_read_bytes",
        _C,
        "KV that a node's engines have read from storage.",
        labels=("group",),
    ),
    MetricSpec("read_queue_length", _G, "Tokens waiting to be read on a node.", labels=("group",)),
    MetricSpec("transfer_bytes", _C, "KV moved between engines."),
    # Engines.
    MetricSpec("engines_up", _G, "Engines that serve.", labels=("role",)),
    MetricSpec("engine_restarts", _C, "Engine processes started again.", labels=("role",)),
    MetricSpec("engine_requests", _G, "Unfinished requests of an engine.", labels=("engine",)),
    MetricSpec("engine_tokens", _G, "Tokens of those requests.", labels=("engine",)),
    MetricSpec(
        "gpu_utilization",
        _G,
        "Share of the time since the last sample that an engine spent computing (GPU or CPU).",
        labels=("engine",),
    ),
    MetricSpec(
        "flops_achieved",
        _G,
        "Floating point operations a second of an engine while it computed, since the last sample.",
        labels=("engine",),
    ),
    MetricSpec(
        "attention_bubble_time",
        _C,
        "Seconds that prefill stood still for the KV of its next layer.",
    ),
    MetricSpec(
        "prefetch_accuracy",
        _G,
        "Share of the layer-ahead loads of KV that had ended when their layer's turn came.",
        labels=("engine",),
    ),
    MetricSpec(
        "fragmentation_score",
        _G,
        "Share of the places in leased slots that stand for no token.",
        labels=("engine",),
    ),
    MetricSpec(
        "hbm_usage",
        _G,
        "Share of a decode engine's device KV that is reserved.",
        labels=("engine",),
    ),
    MetricSpec(
        "pool_slots", _G, "Slots of the PE or DE buffer; one holds one block.", labels=("engine",)
    ),
    MetricSpec("pool_slots_in_use", _G, "Of those, slots that are leased.", labels=("engine",)),
    # The traffic manager of each engine.
    MetricSpec(
        "traffic_bytes",
        _C,
        "What moved in or out of an engine, by class and by the other end: the other engine, `store`, or "
        "`device` (copies between host and device).",
        labels=_TRAFFIC,
    ),
    MetricSpec("traffic_transfers", _C, "Transfers that ended well.", labels=_TRAFFIC),
    MetricSpec("traffic_failed", _C, "Transfers that did not.", labels=_TRAFFIC),
    MetricSpec(
        "traffic_withdrawn",
        _C,
        "Transfers that left the queue unsubmitted, as their attempt was over.",
        labels=_TRAFFIC,
    ),
    MetricSpec(
        "traffic_submissions",
        _C,
        "Submissions to a channel or store; each has one or more transfers.",
        labels=_TRAFFIC,
    ),
    MetricSpec(
        "traffic_wait_seconds",
        _C,
        "Seconds that transfers waited for their submission, summed up.",
        labels=_TRAFFIC,
    ),
    MetricSpec("traffic_queued", _G, "Transfers that wait.", labels=_TRAFFIC),
    MetricSpec("traffic_under_way", _G, "Transfers that were submitted.", labels=_TRAFFIC),
    MetricSpec(
        "oracle",
        _G,
        "1 on a server whose answers are not meaningful: it neither reads nor moves KV. Absent otherwise.",
    ),
)


_SPECS = {spec.name: spec for spec in TABLE}


# Metrics and the fields of `PeerTraffic` that they show.
_TRAFFIC_COUNTERS = {
    "traffic_bytes": "n_bytes",
    "traffic_transfers": "transfers",
    "traffic_failed": "failed",
    "traffic_withdrawn": "withdrawn",
    "traffic_submissions": "submissions",
    "traffic_wait_seconds": "wait_s",
}
_TRAFFIC_GAUGES = {"traffic_queued": "queued", "traffic_under_way": "under_way"}


class _TrafficLabels(NamedTuple):
    engine: str
    traffic_class: str
    peer: str


@dataclass(frozen=True, slots=True)
class EngineSample:
    """What one engine reports at one time. `hbm_tokens` is 0 where the engine holds no KV.

    Since its process started: `busy_s` seconds spent computing, `flops` in them, `bubble_s` of them
    waited for KV, `loads` of layers with `late_loads` among them, `*_bytes`, `dropped_blocks`. `traffic`
    too, for each peer since the engine has known it; None: nothing is said of it this time.
    """

    requests: int
    tokens: int
    busy_s: float
    flops: float
    bubble_s: float
    loads: int
    late_loads: int
    fragmentation: float
    pool_slots: int
    pool_free_slots: int
    hbm_tokens: int
    free_hbm_tokens: int
    written_bytes: int
    transferred_bytes: int
    dropped_blocks: int
    traffic: Mapping[TrafficKey, PeerTraffic] | None = None


_NOTHING = EngineSample(0, 0, 0.0, 0.0, 0.0, 0, 0, 0.0, 0, 0, 0, 0, 0, 0, 0)


class Metrics:
    """Owns the instruments in a registry of its own, or in the one given. Use from one thread.

    `only`: the names of those that exist; another one's fact is then a bug of the caller. All, if absent.
    """

    def __init__(
        self, registry: CollectorRegistry | None = None, *, only: frozenset[str] | None = None
    ) -> None:
        self.registry = registry or CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        self._last_samples: dict[EngineId, tuple[float, EngineSample]] = {}
        self._queries = 0
        self._hits = 0
        self._engines_up = {role: set[EngineId]() for role in Role}
        self._traffic: set[_TrafficLabels] = set()
        self._last_traffic: dict[EngineId, Mapping[TrafficKey, PeerTraffic]] = {}
        for spec in TABLE:
            if only is None or spec.name in only:
                self._declare(spec)

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)

    # Requests.

    def first_token(self, ttft_s: float) -> None:
        self._histograms["time_to_first_token_seconds"].observe(ttft_s)

    def next_tokens(self, interval_s: float, tokens: int) -> None:
        """`tokens` that came together, `interval_s` after those before: each counts as an equal part."""
        for _ in range(tokens):
            self._histograms["inter_token_latency_seconds"].observe(interval_s / tokens)

    def request_times(
        self, *, queue_s: float | None, read_s: float | None, prefill_s: float | None
    ) -> None:
        """The parts of a request's time to first token, as far as they are known."""
        parts = {"queue": queue_s, "read": read_s, "prefill": prefill_s}
        for part, seconds in parts.items():
            if seconds is not None:
                self._histograms[f"request_{part}_time_seconds"].observe(seconds)

    def request_ended(
        self, finished_reason: str, *, e2e_s: float, prompt_tokens: int, generation_tokens: int
    ) -> None:
        self._counters["request_success"].labels(finished_reason).inc()
        self._counters["prompt_tokens"].inc(prompt_tokens)
        self._counters["generation_tokens"].inc(generation_tokens)
        self._histograms["request_prompt_tokens"].observe(prompt_tokens)
        self._histograms["request_generation_tokens"].observe(generation_tokens)
        self._histograms["e2e_request_latency_seconds"].observe(e2e_s)

    def http_response(self, path: str, status: int) -> None:
        """`path` is that of the route, not of the request, so that its values are few."""
        self._counters["http_responses"].labels(path, str(status)).inc()

    def queues(self, *, running: int, waiting: int) -> None:
        self._gauge("num_requests_running").set(running)
        self._gauge("num_requests_waiting").set(waiting)

    def attempt_started(self) -> None:
        self._counters["request_attempts"].inc()

    def attempt_retried(self, cause: str) -> None:
        self._counters["request_retries"].labels(cause).inc()

    # The prefix cache and storage.

    def prefix_lookup(self, *, queried_tokens: int, hit_tokens: int) -> None:
        self._counters["prefix_cache_queries"].inc(queried_tokens)
        self._counters["prefix_cache_hits"].inc(hit_tokens)
        self._queries += queried_tokens
        self._hits += hit_tokens
        if self._queries:
            self._gauge("cache_hit_ratio").set(self._hits / self._queries)

    def kv_read(self, side: Side, read_bytes: int) -> None:
        self._counters["kv_read_bytes"].labels(side.value).inc(read_bytes)

    def kv_load_failed(self, cause: str) -> None:
        self._counters["kv_load_failures"].labels(cause).inc()

    def kv_load_skipped(self) -> None:
        self._counters["kv_loads_skipped"].inc()

    def store_up(self, up: bool) -> None:
        self._gauge("store_up").set(float(up))

    def store_content(self, *, blocks: int, used_bytes: int, pinned_requests: int) -> None:
        self._gauge("store_blocks").set(blocks)
        self._gauge("store_used_bytes").set(used_bytes)
        self._gauge("store_pinned_requests").set(pinned_requests)

    def store_evicted(self, blocks: int) -> None:
        self._counters["store_evicted_blocks"].inc(blocks)

    def read_queue(self, group: GroupId, tokens: int) -> None:
        self._gauge("read_queue_length").labels(group).set(tokens)

    def snic_read(self, group: GroupId, read_bytes: int) -> None:
        """0 bytes declare the node, so that its rate has a start."""
        self._counters["snic_read_bytes"].labels(group).inc(read_bytes)

    def snic_utilization(self, group: GroupId, share: float) -> None:
        self._gauge("snic_utilization").labels(group).set(share)

    # Engines.

    def engine_joined(self, engine: EngineId, role: Role) -> None:
        self._engines_up[role].add(engine)
        self._gauge("engines_up").labels(role.value).set(len(self._engines_up[role]))

    def engine_lost(self, engine: EngineId, role: Role) -> None:
        """The engine's own gauges go."""
        self._engines_up[role].discard(engine)
        self._gauge("engines_up").labels(role.value).set(len(self._engines_up[role]))
        self._last_samples.pop(engine, None)
        self._last_traffic.pop(engine, None)
        for name, gauge in self._gauges.items():
            if _SPECS[name].labels == ("engine",):
                # A gauge of this engine may never have been set.
                with suppress(KeyError):
                    gauge.remove(engine)
        for labels in [
            labels for labels in self._traffic if engine in (labels.engine, labels.peer)
        ]:
            self._traffic.discard(labels)
            for name in _TRAFFIC_COUNTERS:
                self._counters[name].remove(*labels)
            for name in _TRAFFIC_GAUGES:
                self._gauge(name).remove(*labels)

    def oracle(self) -> None:
        """This server's answers are not meaningful."""
        self._gauge("oracle").set(1)

    def engine_restarted(self, role: Role) -> None:
        self._counters["engine_restarts"].labels(role.value).inc()

    def engine_load(self, engine: EngineId, *, requests: int, tokens: int) -> None:
        """Of an engine that reports no more, as its load is known from outside."""
        self._gauge("engine_requests").labels(engine).set(requests)
        self._gauge("engine_tokens").labels(engine).set(tokens)

    def engine_sample(self, engine: EngineId, sample: EngineSample, now_s: float) -> None:
        """An engine's report at `now_s` (any monotonic origin); counters advance by the difference."""
        before_s, before = self._last_samples.get(engine, (None, _NOTHING))
        self._last_samples[engine] = (now_s, sample)
        gauges: Mapping[str, float] = {
            "engine_requests": sample.requests,
            "engine_tokens": sample.tokens,
            "fragmentation_score": sample.fragmentation,
            "pool_slots": sample.pool_slots,
            "pool_slots_in_use": sample.pool_slots - sample.pool_free_slots,
        }
        for name, value in gauges.items():
            self._gauge(name).labels(engine).set(value)
        if sample.hbm_tokens:
            usage = 1 - sample.free_hbm_tokens / sample.hbm_tokens
            self._gauge("hbm_usage").labels(engine).set(usage)
        if sample.loads:
            in_time = 1 - sample.late_loads / sample.loads
            self._gauge("prefetch_accuracy").labels(engine).set(in_time)
        if sample.busy_s > before.busy_s:
            rate = (sample.flops - before.flops) / (sample.busy_s - before.busy_s)
            self._gauge("flops_achieved").labels(engine).set(rate)
        if before_s is not None and now_s > before_s:
            share = (sample.busy_s - before.busy_s) / (now_s - before_s)
            self._gauge("gpu_utilization").labels(engine).set(min(max(share, 0.0), 1.0))
        advances = {
            "attention_bubble_time": sample.bubble_s - before.bubble_s,
            "kv_written_bytes": sample.written_bytes - before.written_bytes,
            "transfer_bytes": sample.transferred_bytes - before.transferred_bytes,
            "kv_dropped_blocks": sample.dropped_blocks - before.dropped_blocks,
        }
        for name, advance in advances.items():
            if advance < 0:
                raise InvariantViolation(f"{engine}: {name} went back by {-advance}")
            if advance:
                self._counters[name].inc(advance)
        if sample.traffic is not None:
            self._traffic_sample(engine, sample.traffic)

    def _traffic_sample(self, engine: EngineId, now: Mapping[TrafficKey, PeerTraffic]) -> None:
        before = self._last_traffic.get(engine, {})
        self._last_traffic[engine] = now
        known: set[str] = {STORE, DEVICE}.union(*self._engines_up.values())
        for key, counts in now.items():
            if key.peer not in known or engine not in known:
                continue  # What an engine still says of one that is lost would stay for ever.
            labels = _TrafficLabels(engine, key.traffic_class.value, key.peer)
            self._traffic.add(labels)
            last = before.get(key, PeerTraffic())
            if counts.submissions < last.submissions or counts.n_bytes < last.n_bytes:
                last = PeerTraffic()  # The engine lost this peer and met it again.
            for name, field_name in _TRAFFIC_COUNTERS.items():
                advance = getattr(counts, field_name) - getattr(last, field_name)
                self._counters[name].labels(*labels).inc(max(0, advance))
            for name, field_name in _TRAFFIC_GAUGES.items():
                self._gauge(name).labels(*labels).set(getattr(counts, field_name))

    def _declare(self, spec: MetricSpec) -> None:
        name = PREFIX + spec.name
        if spec.kind is MetricKind.COUNTER:
            self._counters[spec.name] = Counter(
                name, spec.help, spec.labels, registry=self.registry
            )
        elif spec.kind is MetricKind.HISTOGRAM:
            self._histograms[spec.name] = Histogram(
                name, spec.help, spec.labels, registry=self.registry, buckets=spec.buckets
            )

    def _gauge(self, name: str) -> Gauge:
        gauge = self._gauges.get(name)
        if gauge is None:
            spec = _SPECS[name]
            gauge = Gauge(PREFIX + name, spec.help, spec.labels, registry=self.registry)
            self._gauges[name] = gauge
        return gauge


def metrics_reference() -> str:
    """A Markdown table of every metric."""
    rows = ["| metric | kind | labels | what it tells |", "|---|---|---|---|"]
    for spec in TABLE:
        labels = ", ".join(f"`{label}`" for label in spec.labels) or "none"
        rows.append(f"| `{spec.exported_name}` | {spec.kind} | {labels} | {spec.help} |")
    return "\n".join(rows) + "\n"
