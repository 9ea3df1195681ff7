from __future__ import annotations

import re
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from dualpath.base.errors import InvariantViolation
from dualpath.base.ids import EngineId, GroupId, Role, Side
from dualpath.base.traffic_class import TrafficClass
from dualpath.monitor.metrics import TABLE, EngineSample, MetricKind, Metrics, metrics_reference
from dualpath.traffic import DEVICE, PeerTraffic, TrafficKey

PE0 = EngineId("pe0.1")
DE0 = EngineId("de0.1")


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"dualpath:{name}", labels)


def sample(**changes: float) -> EngineSample:
    fields = {
        "requests": 2,
        "tokens": 100,
        "busy_s": 1.0,
        "flops": 1e9,
        "bubble_s": 0.25,
        "loads": 8,
        "late_loads": 2,
        "fragmentation": 0.125,
        "pool_slots": 10,
        "pool_free_slots": 4,
        "hbm_tokens": 1000,
        "free_hbm_tokens": 250,
        "written_bytes": 10,
        "transferred_bytes": 20,
        "dropped_blocks": 0,
    }
    return EngineSample(**{**fields, **changes})  # type: ignore[arg-type]


def with_traffic(peer: str, **counts: float) -> EngineSample:
    """A report with these counts of KV from or to a peer."""
    traffic = {TrafficKey(TrafficClass.KV, peer): PeerTraffic(**counts)}  # type: ignore[arg-type]
    return replace(sample(busy_s=1.5, written_bytes=14), traffic=traffic)


def emit_everything(metrics: Metrics) -> None:
    metrics.first_token(0.2)
    metrics.next_tokens(0.2, 2)
    metrics.request_times(queue_s=0.1, read_s=0.2, prefill_s=0.3)
    metrics.request_ended("stop", e2e_s=1.0, prompt_tokens=10, generation_tokens=3)
    metrics.http_response("/v1/completions", 200)
    metrics.queues(running=1, waiting=2)
    metrics.attempt_started()
    metrics.attempt_retried("peer_lost")
    metrics.prefix_lookup(queried_tokens=100, hit_tokens=75)
    metrics.kv_read(Side.PE, 5)
    metrics.kv_load_failed("block_miss")
    metrics.kv_load_skipped()
    metrics.store_up(True)
    metrics.store_content(blocks=3, used_bytes=300, pinned_requests=1)
    metrics.store_evicted(2)
    metrics.read_queue(GroupId("pe-node0"), 64)
    metrics.snic_utilization(GroupId("pe-node0"), 0.5)
    metrics.snic_read(GroupId("pe-node0"), 0)
    metrics.snic_read(GroupId("pe-node0"), 640)
    metrics.engine_joined(PE0, Role.PREFILL)
    metrics.engine_joined(DE0, Role.DECODE)
    metrics.engine_restarted(Role.DECODE)
    metrics.engine_sample(PE0, sample(), 10.0)
    metrics.engine_sample(PE0, sample(busy_s=1.5, written_bytes=14), 11.0)
    metrics.engine_sample(PE0, with_traffic(DE0, n_bytes=5), 12.0)
    metrics.oracle()


def test_every_declared_metric_can_be_emitted_and_nothing_else_is_exported():
    metrics = Metrics()
    emit_everything(metrics)
    families = text_string_to_metric_families(metrics.render().decode())
    exported = {family.name for family in families if not family.name.endswith("_created")}
    # The parser takes _total off the names of counters.
    assert exported == {f"dualpath:{spec.name}" for spec in TABLE}


def test_nothing_measured_shows_no_gauge():
    text = Metrics().render().decode()
    for spec in TABLE:
        if spec.kind is MetricKind.GAUGE:
            assert f"\ndualpath:{spec.name}" not in text


def test_values():
    metrics = Metrics()
    emit_everything(metrics)
    assert value(metrics, "cache_hit_ratio") == 0.75
    assert value(metrics, "inter_token_latency_seconds_count") == 2
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(0.2)
    assert value(metrics, "request_success_total", finished_reason="stop") == 1
    assert value(metrics, "prompt_tokens_total") == 10
    assert value(metrics, "kv_read_bytes_total", path="pe") == 5
    assert value(metrics, "snic_read_bytes_total", group="pe-node0") == 640
    assert value(metrics, "kv_load_failures_total", cause="block_miss") == 1
    assert value(metrics, "request_read_time_seconds_sum") == 0.2


def test_engine_samples_give_shares_and_advances():
    metrics = Metrics()
    metrics.engine_sample(PE0, sample(), 10.0)
    assert value(metrics, "gpu_utilization", engine=PE0) is None
    metrics.engine_sample(PE0, sample(busy_s=1.5, written_bytes=14, dropped_blocks=1), 11.0)
    assert value(metrics, "gpu_utilization", engine=PE0) == 0.5
    assert value(metrics, "hbm_usage", engine=PE0) == 0.75
    assert value(metrics, "pool_slots_in_use", engine=PE0) == 6
    assert value(metrics, "kv_written_bytes_total") == 14
    assert value(metrics, "transfer_bytes_total") == 20
    assert value(metrics, "kv_dropped_blocks_total") == 1
    with pytest.raises(InvariantViolation, match=r"pe0\.1.*went back by 4"):
        metrics.engine_sample(PE0, sample(written_bytes=10, dropped_blocks=1), 12.0)


def test_a_prefill_engine_has_no_hbm_usage():
    metrics = Metrics()
    metrics.engine_sample(PE0, sample(hbm_tokens=0, free_hbm_tokens=0), 1.0)
    assert value(metrics, "hbm_usage", engine=PE0) is None


def test_a_lost_engine_takes_its_gauges_but_no_counts():
    metrics = Metrics()
    metrics.engine_joined(PE0, Role.PREFILL)
    metrics.engine_joined(EngineId("pe1.1"), Role.PREFILL)
    metrics.engine_sample(PE0, sample(), 1.0)
    metrics.engine_lost(PE0, Role.PREFILL)
    metrics.engine_lost(PE0, Role.PREFILL)
    assert value(metrics, "engines_up", role="prefill") == 1
    assert PE0 not in metrics.render().decode()
    assert value(metrics, "kv_written_bytes_total") == 10
    metrics.engine_sample(EngineId("pe0.2"), sample(written_bytes=1), 2.0)
    assert value(metrics, "kv_written_bytes_total") == 11


def test_traffic_is_counted_by_engine_class_and_peer() -> None:
    metrics = Metrics()
    metrics.engine_joined(PE0, Role.PREFILL)
    metrics.engine_joined(DE0, Role.DECODE)
    with_de = {"engine": PE0, "class": "kv", "peer": DE0}
    metrics.engine_sample(PE0, with_traffic(DE0, n_bytes=100, submissions=2, queued=3), 1.0)
    metrics.engine_sample(
        PE0, with_traffic(DE0, n_bytes=160, submissions=3, queued=1, wait_s=0.5), 2.0
    )
    assert value(metrics, "traffic_bytes_total", **with_de) == 160
    assert value(metrics, "traffic_submissions_total", **with_de) == 3
    assert value(metrics, "traffic_wait_seconds_total", **with_de) == 0.5
    assert value(metrics, "traffic_queued", **with_de) == 1
    metrics.engine_sample(PE0, with_traffic(DE0, n_bytes=40, submissions=1), 3.0)
    assert value(metrics, "traffic_bytes_total", **with_de) == 200, "the peer came back: from 0 on"
    metrics.engine_sample(PE0, with_traffic(DEVICE, n_bytes=7), 4.0)
    assert value(metrics, "traffic_bytes_total", **{**with_de, "peer": DEVICE}) == 7


def test_traffic_with_a_lost_engine_goes_and_does_not_come_back() -> None:
    metrics = Metrics()
    metrics.engine_joined(PE0, Role.PREFILL)
    metrics.engine_joined(DE0, Role.DECODE)
    metrics.engine_sample(PE0, with_traffic(DE0, n_bytes=100), 1.0)
    metrics.engine_sample(DE0, with_traffic(DEVICE, n_bytes=100), 1.0)
    metrics.engine_lost(DE0, Role.DECODE)
    metrics.engine_sample(PE0, with_traffic(DE0, n_bytes=120), 2.0)
    assert DE0 not in metrics.render().decode()


def test_registries_are_not_shared():
    registry = CollectorRegistry()
    first, second = Metrics(registry), Metrics()
    first.store_up(True)
    assert value(first, "store_up") == 1
    assert value(second, "store_up") is None
    assert first.registry is registry


def test_reference_and_names():
    text = metrics_reference()
    for spec in TABLE:
        assert f"`{spec.exported_name}`" in text
        assert re.fullmatch(r"[a-z0-9_]+", spec.name)
        assert spec.help.endswith(".")
        assert not spec.name.endswith("_total")
    assert len({spec.name for spec in TABLE}) == len(TABLE)


def test_rates_and_shares_of_an_engine() -> None:
    metrics = Metrics()
    metrics.engine_sample(PE0, sample(), 10.0)
    metrics.engine_sample(PE0, sample(busy_s=1.5, flops=4e9, bubble_s=0.75, loads=16), 11.0)
    assert value(metrics, "flops_achieved", engine=PE0) == 6e9
    assert value(metrics, "attention_bubble_time_total") == 0.75
    assert value(metrics, "prefetch_accuracy", engine=PE0) == 0.875
    assert value(metrics, "fragmentation_score", engine=PE0) == 0.125
