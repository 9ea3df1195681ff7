"""Requests as OpenTelemetry spans: their names and attributes, and the sending of them.

One span `llm_request` a sequence, with the names and attributes that vLLM uses (`gen_ai.*`) and ours
(`dualpath.*`), and under it one span for each part of its time. Knows nothing of who emits. Invariants: a
collector that is slow or dead costs dropped spans, never a request's time; nothing of OpenTelemetry is
imported before a `Tracing` is made; closing ends within its deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

import dualpath
from dualpath.base.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

__all__ = ["TRACE_HEADERS", "RequestFacts", "Stage", "Tracing", "traces_url"]

TRACE_HEADERS = ("traceparent", "tracestate")
"""Of W3C Trace Context: they tell the client's span."""

_MAX_WAITING_SPANS = 8192
_MAX_BATCH_SPANS = 512
_SEND_INTERVAL_MS = 1000
_SEND_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 3.0

Attribute = str | int | float | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a request's time, by `time.monotonic()`."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """What is told of a sequence that has ended; None where it did not come so far.

    Moments are of `time.monotonic()`, the other times durations. `trace_headers`: those of the HTTP request.
    `error`: why it failed, if it did. `prefill_engine`, `decode_engine`: of the last attempt.
    """

    request_id: str
    model: str
    trace_headers: Mapping[str, str]
    start_s: float
    end_s: float
    finish_reason: str
    error: str | None
    prompt_tokens: int
    completion_tokens: int
    max_tokens: int | None
    temperature: float
    top_p: float
    ttft_s: float | None = None
    scheduling_s: float | None = None
    prefill_s: float | None = None
    cached_tokens: int | None = None
    cached_by_path: Mapping[str, int] = field(default_factory=dict)
    attempts: int | None = None
    prefill_engine: str | None = None
    decode_engine: str | None = None
    stages: tuple[Stage, ...] = ()

    def attributes(self) -> dict[str, Attribute]:
        """Of the span; durations in seconds. What is not known is left out."""
        decode_s = None
        if self.ttft_s is not None:
            decode_s = self.end_s - self.start_s - self.ttft_s
        named: dict[str, Attribute | None] = {
            "gen_ai.request.id": self.request_id,
            "gen_ai.request.max_tokens": self.max_tokens,
            "gen_ai.request.temperature": self.temperature,
            "gen_ai.request.top_p": self.top_p,
            "gen_ai.response.model": self.model,
            "gen_ai.response.finish_reasons": (self.finish_reason,),
            "gen_ai.usage.prompt_tokens": self.prompt_tokens,
            "gen_ai.usage.completion_tokens": self.completion_tokens,
            "gen_ai.latency.time_in_queue": self.scheduling_s,
            "gen_ai.latency.time_to_first_token": self.ttft_s,
            "gen_ai.latency.e2e": self.end_s - self.start_s,
            "gen_ai.latency.time_in_model_prefill": self.prefill_s,
            "gen_ai.latency.time_in_model_decode": decode_s,
            "dualpath.cached_tokens": self.cached_tokens,
            "dualpath.attempts": self.attempts,
            "dualpath.prefill_engine": self.prefill_engine,
            "dualpath.decode_engine": self.decode_engine,
        }
        for path, tokens in self.cached_by_path.items():
            named[f"dualpath.cached_tokens.{path}"] = tokens
        return {name: value for name, value in named.items() if value is not None}


class Tracing:
    """Sends spans to the OTLP/HTTP endpoint `url`, in batches, from a thread of its own.

    A context manager; what waits is sent when it closes, as far as that succeeds in its time. Settings that
    have no flag (headers, certificates, resource attributes, sampling) are OpenTelemetry's own environment
    variables. Raises ConfigError when the packages are missing or the URL is none.
    """

    def __init__(
        self,
        url: str,
        *,
        max_waiting_spans: int = _MAX_WAITING_SPANS,
        send_timeout_s: float = _SEND_TIMEOUT_S,
        close_timeout_s: float = _CLOSE_TIMEOUT_S,
    ) -> None:
        self._close_timeout_s = close_timeout_s
        self._provider = _provider(traces_url(url), max_waiting_spans, send_timeout_s)
        self._tracer = self._provider.get_tracer("dualpath", dualpath.__version__)

    def request(self, facts: RequestFacts) -> None:
        """Put the spans of a request into the queue; the oldest there go when it is full."""
        from opentelemetry import trace
        from opentelemetry.context import Context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Spans are on the wall clock, times here are not: one difference for all keeps them in order.
        behind_s = time.time() - time.monotonic()

        def wall_ns(moment_s: float) -> int:
            return round((moment_s + behind_s) * 1e9)

        parent = TraceContextTextMapPropagator().extract(dict(facts.trace_headers), Context())
        span = self._tracer.start_span(
            "llm_request",
            parent,
            trace.SpanKind.SERVER,
            facts.attributes(),
            start_time=wall_ns(facts.start_s),
        )
        if facts.error is not None:
            span.set_status(trace.StatusCode.ERROR, facts.error)
        within = trace.set_span_in_context(span, Context())
        for stage in facts.stages:
            part = self._tracer.start_span(stage.name, within, start_time=wall_ns(stage.start_s))
            part.end(wall_ns(stage.end_s))
        span.end(wall_ns(facts.end_s))

    def close(self) -> None:
        """Send what waits, but give up in time. Idempotent."""
        # The library's own deadline does not cover a send under way.
        closing = threading.Thread(target=self._provider.shutdown, name="traces-close", daemon=True)
        closing.start()
        closing.join(self._close_timeout_s)

    def __enter__(self) -> Tracing:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def traces_url(url: str) -> str:
    """The endpoint that spans are posted to: an address without a path gets OTLP's, `/v1/traces`."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        valid = valid and parts.port != 0  # Reading the port checks it.
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(
            f"--otlp-traces-endpoint (OTEL_EXPORTER_OTLP_TRACES_ENDPOINT): expected an http:// or https:// "
            f"address such as http://localhost:4318/v1/traces, got {url!r}"
        )
    return urlunsplit(parts._replace(path="/v1/traces")) if parts.path in ("", "/") else url


def _provider(url: str, max_waiting_spans: int, send_timeout_s: float) -> TracerProvider:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs the package {error.name}: pip install 'dualpath[otel]'"
        ) from error
    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "dualpath"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=url, timeout=send_timeout_s)
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter,
            max_queue_size=max_waiting_spans,
            schedule_delay_millis=_SEND_INTERVAL_MS,
            max_export_batch_size=min(_MAX_BATCH_SPANS, max_waiting_spans),
        )
    )
    return provider
