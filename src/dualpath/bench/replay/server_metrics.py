"""Which of a server's metrics a run keeps, second by second, and what vLLM and SGLang tell by them alone.

dualpath says of each request where its time went and what was cached; the others count both over all
requests, so that of them there are means over a run. Knows names only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dualpath.bench.replay.records import ServerSample

__all__ = ["SAMPLED", "counted_hit_rate", "counted_parts", "label_value", "used"]

_PARTS: Mapping[str, tuple[str, ...]] = {
    "queue": ("vllm:request_queue_time_seconds", "sglang:queue_time_seconds"),
    "prefill": ("vllm:request_prefill_time_seconds",),
}
"""Histograms of the parts of the time to the first token."""
_QUERIES = ("vllm:prefix_cache_queries_total",)
_HITS = ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")

SAMPLED = frozenset(
    {
        "dualpath:snic_read_bytes_total",
        "dualpath:snic_utilization",
        "dualpath:read_queue_length",
        *_QUERIES,
        *_HITS,
        *(
            f"{name}_{kind}"
            for names in _PARTS.values()
            for name in names
            for kind in ("sum", "count")
        ),
    }
)


def counted_parts(samples: Sequence[ServerSample]) -> dict[str, float]:
    """Mean seconds of parts of the time to the first token, over what the server counted between the first
    sample and the last; {} if it counted nothing. Other clients' requests count as well."""
    parts = {}
    for part, names in _PARTS.items():
        count = _growth(samples, [f"{name}_count" for name in names])
        if count > 0:
            parts[part] = _growth(samples, [f"{name}_sum" for name in names]) / count
    return parts


def counted_hit_rate(samples: Sequence[ServerSample]) -> float | None:
    """Cached tokens by prompt tokens, as counted between the first sample and the last; None if it counted
    nothing."""
    queries = _growth(samples, _QUERIES)
    return _growth(samples, _HITS) / queries if queries > 0 else None


def _growth(samples: Sequence[ServerSample], names: Iterable[str]) -> float:
    """Of the counters of these names, over all their labels."""
    if len(samples) < 2:
        return 0.0
    wanted = frozenset(names)
    first, last = (
        sum(value for name, value in each.metrics.items() if name.partition("{")[0] in wanted)
        for each in (samples[0], samples[-1])
    )
    return last - first


def used(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those of `name{label="value",...}` whose name is sampled."""
    return {name: value for name, value in metrics.items() if name.partition("{")[0] in SAMPLED}


def label_value(exported: str, name: str, label: str) -> str | None:
    """The label's value in `name{...label="value"...}`; None for another metric or label."""
    metric, _, labels = exported.partition("{")
    if metric != name:
        return None
    for part in labels.rstrip("}").split(","):
        key, _, value = part.partition("=")
        if key.strip() == label:
            return value.strip('"')
    return None
