"""Spans as a real collector over HTTP gets them."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from api_kit import EchoGenerator, running_server
from collector_kit import Collector, collecting

import dualpath
from dualpath.base.errors import ConfigError
from dualpath.monitor.tracing import RequestFacts, Stage, Tracing, traces_url

SERVER_KIND = 2
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN = "b7ad6b7169203331"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def facts(**changes: object) -> RequestFacts:
    fields: dict[str, object] = {
        "request_id": "r1",
        "model": "m",
        "trace_headers": {},
        "start_s": 100.0,
        "end_s": 104.0,
        "finish_reason": "length",
        "error": None,
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "max_tokens": 3,
        "temperature": 0.0,
        "top_p": 1.0,
    }
    return RequestFacts(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_request_is_a_span_with_its_stages_under_it(collector: Collector) -> None:
    stages = (Stage("scheduling", 100.0, 100.5), Stage("prefill", 100.5, 102.0))
    first_ns, before_ns = time.monotonic_ns(), time.time_ns()
    with Tracing(collector.url) as tracing:
        tracing.request(
            facts(
                trace_headers={"traceparent": f"00-{TRACE_ID}-{CLIENT_SPAN}-01"},
                ttft_s=2.0,
                scheduling_s=0.5,
                prefill_s=1.5,
                cached_tokens=8,
                cached_by_path={"pe": 8, "de": 0},
                attempts=1,
                prefill_engine="pe0.1",
                decode_engine="de0.1",
                stages=stages,
            )
        )
    after_ns, last_ns = time.time_ns(), time.monotonic_ns()
    assert set(collector.paths) == {"/v1/traces"}
    assert collector.resources[0]["service.name"] == "dualpath"
    (root,) = collector.roots()
    assert (root.kind, root.trace_id, root.parent_id) == (SERVER_KIND, TRACE_ID, CLIENT_SPAN)
    assert root.attributes == {
        "gen_ai.request.id": "r1",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.prompt_tokens": 10,
        "gen_ai.usage.completion_tokens": 3,
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_to_first_token": 2.0,
        "gen_ai.latency.e2e": 4.0,
        "gen_ai.latency.time_in_model_prefill": 1.5,
        "gen_ai.latency.time_in_model_decode": 2.0,
        "dualpath.cached_tokens": 8,
        "dualpath.cached_tokens.pe": 8,
        "dualpath.cached_tokens.de": 0,
        "dualpath.attempts": 1,
        "dualpath.prefill_engine": "pe0.1",
        "dualpath.decode_engine": "de0.1",
    }
    # Both clocks are read in the meantime, one after the other, with any time in between. The wall clock may
    # be set back or forth, but not far.
    rounding_ns = 1_000
    behind_ns = root.start_ns - 100_000_000_000
    assert before_ns - last_ns - rounding_ns <= behind_ns <= after_ns - first_ns + rounding_ns
    start_ns = root.start_ns
    assert root.end_ns - start_ns == pytest.approx(4e9, abs=rounding_ns)
    placed = [
        (span.name, span.start_ns - start_ns, span.end_ns - start_ns)
        for span in collector.children(root)
    ]
    assert [name for name, _, _ in placed] == ["scheduling", "prefill"]
    for (_, start, end), stage in zip(placed, stages, strict=True):
        assert start == pytest.approx((stage.start_s - 100) * 1e9, abs=rounding_ns)
        assert end == pytest.approx((stage.end_s - 100) * 1e9, abs=rounding_ns)
    assert {span.trace_id for span in collector.spans} == {TRACE_ID}


def test_what_is_not_known_is_left_out_and_a_failure_is_said(collector: Collector) -> None:
    with Tracing(collector.url + "/") as tracing:
        tracing.request(facts(finish_reason="error", error="no decode engine is left"))
    (root,) = collector.spans
    assert root.error == "no decode engine is left"
    assert root.parent_id == ""
    assert "dualpath.cached_tokens" not in root.attributes
    assert "gen_ai.latency.time_to_first_token" not in root.attributes


def test_requests_over_http_are_traced(collector: Collector) -> None:
    parent = {"traceparent": f"00-{TRACE_ID}-{CLIENT_SPAN}-01"}
    with (
        Tracing(collector.url) as tracing,
        running_server(EchoGenerator(), tracing=tracing) as server,
        server.http() as http,
    ):
        body = {"model": "echo", "prompt": "abcd", "max_tokens": 3, "temperature": 0}
        http.post("/v1/completions", json=body, headers=parent).raise_for_status()
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "stream": True}
        http.post("/v1/chat/completions", json=chat).raise_for_status()
        http.post("/v1/completions", json={**body, "prompt": [999]})
    first, second = sorted(collector.roots(), key=lambda span: span.start_ns)
    assert (first.trace_id, first.parent_id) == (TRACE_ID, CLIENT_SPAN)
    assert second.trace_id != TRACE_ID
    assert second.parent_id == ""
    assert first.attributes["gen_ai.request.id"].startswith("cmpl-")
    assert first.attributes["gen_ai.usage.completion_tokens"] == 3
    assert first.attributes["dualpath.attempts"] == 2
    assert first.attributes["dualpath.decode_engine"] == "de1.3"
    assert first.attributes["dualpath.cached_tokens.pe"] == 1
    assert second.attributes["gen_ai.request.max_tokens"] == 2
    names = {span.name for span in collector.children(first)}
    assert names == {"scheduling", "allocation", "read", "wait", "prefill", "decode"}


def test_a_client_that_leaves_and_an_error_are_told(collector: Collector) -> None:
    with (
        Tracing(collector.url) as tracing,
        running_server(EchoGenerator(error_after=1), tracing=tracing) as server,
        server.http() as http,
    ):
        body = {"model": "echo", "prompt": "abcd", "max_tokens": 3}
        assert http.post("/v1/completions", json=body).status_code == 503
        server.generator.error_after, server.generator.hold_after = None, 1
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            next(answer.iter_lines())
        assert server.generator.released.wait(20)
    failed, left = sorted(collector.roots(), key=lambda span: span.start_ns)
    assert failed.error == "no decode engine is left"
    assert failed.attributes["gen_ai.response.finish_reasons"] == ["error"]
    assert left.error is None
    assert left.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert left.attributes["gen_ai.usage.completion_tokens"] == 1


def test_a_dead_collector_costs_no_request(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with (
            Tracing(url, close_timeout_s=0.2) as tracing,
            running_server(EchoGenerator(), tracing=tracing) as server,
        ):
            for _ in range(3):
                answer = server.client().completions.create(
                    model="echo", prompt="abcd", max_tokens=2
                )
                assert answer.usage.completion_tokens == 2


def test_a_hanging_collector_bounds_what_waits_and_how_long_closing_takes(
    collector: Collector,
) -> None:
    collector.answering.clear()
    tracing = Tracing(collector.url, max_waiting_spans=8, close_timeout_s=0.1)
    for number in range(8):
        tracing.request(facts(request_id=f"first-{number}"))
    assert collector.taken.wait(20)
    for number in range(100):
        tracing.request(facts(request_id=f"then-{number}"))
    tracing.close()  # Returns though nothing was answered yet.
    assert len(collector.spans) <= 8
    collector.answering.set()
    for thread in threading.enumerate():
        if thread.name == "traces-close":
            thread.join(20)
    got = [span.attributes["gen_ai.request.id"] for span in collector.spans]
    assert len(got) <= 16
    assert got[0] == "first-0"
    tracing.close()


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("https://otel.example/", "https://otel.example/v1/traces"),
        ("http://localhost:4318/v1/traces", "http://localhost:4318/v1/traces"),
        ("http://localhost/other", "http://localhost/other"),
    ],
)
def test_addresses(given: str, used: str) -> None:
    assert traces_url(given) == used


@pytest.mark.parametrize("url", ["localhost:4317", "grpc://x:4317", "", "http://", "http://a:b"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
        traces_url(url)


def test_nothing_of_it_is_imported_without_the_flag() -> None:
    code = (
        "import sys, dualpath.serve.app, dualpath.monitor; "
        "unwanted = ('opentelemetry.sdk', 'opentelemetry.exporter', 'torch'); "
        "print([name for name in sys.modules if name.startswith(unwanted)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert dualpath.__version__


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'dualpath\[otel\]'"):
        Tracing("http://localhost:4318")
