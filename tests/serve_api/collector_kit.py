"""An OpenTelemetry collector on loopback, as far as spans over HTTP go."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class SpanRecord:
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    error: str | None


@dataclass(eq=False)
class Collector:
    """`answering` cleared: batches are taken, but not answered before it is set."""

    url: str = ""
    spans: list[SpanRecord] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    taken: threading.Event = field(default_factory=threading.Event)
    answering: threading.Event = field(default_factory=threading.Event)

    def take(self, path: str, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        self.paths.append(path)
        for group in request.resource_spans:
            self.resources.append(_values(group.resource.attributes))
            for scope in group.scope_spans:
                self.spans += [_record(span) for span in scope.spans]
        self.taken.set()
        assert self.answering.wait(20)

    def roots(self) -> list[SpanRecord]:
        return [span for span in self.spans if span.name == "llm_request"]

    def children(self, parent: SpanRecord) -> list[SpanRecord]:
        of_parent = [span for span in self.spans if span.parent_id == parent.span_id]
        return sorted(of_parent, key=lambda span: span.start_ns)


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    collector.answering.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["content-type"] == "application/x-protobuf"
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.take(self.path, body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield collector
    finally:
        collector.answering.set()
        server.shutdown()
        server.server_close()
        thread.join(20)


def _record(span: Any) -> SpanRecord:
    return SpanRecord(
        name=span.name,
        kind=span.kind,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        error=span.status.message if span.status.code == 2 else None,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
