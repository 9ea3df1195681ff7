"""What a load generator says of one run: the same few figures, whoever measured them.

Pure. Definitions on which all three agree: the time to the first token counts from just before the request is
sent to the first event that brings a token; TPOT is the time from the first to the last token by the tokens
after the first, and its mean is over requests; E2E ends with the last token; JCT is the time from the first
send to the end of the last answer.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from dualpath.base.errors import ConfigError
from dualpath.bench.replay.records import Run

__all__ = [
    "COMPARED",
    "LoadFigures",
    "differences",
    "figures_of_run",
    "median_figures",
    "read_aiperf",
    "read_vllm",
]

T = TypeVar("T")

COMPARED = ("ttft_mean_s", "tpot_mean_s", "e2e_mean_s", "jct_s")
"""The figures whose largest difference is the agreement's error."""


class LoadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run. Tokens are sums over requests, as the server counted them."""

    ttft_mean_s: float
    ttft_p50_s: float
    tpot_mean_s: float
    tpot_p50_s: float
    e2e_mean_s: float
    e2e_p50_s: float
    jct_s: float
    requests: int
    failed: int
    prompt_tokens: int
    output_tokens: int


class _Total(msgspec.Struct):
    avg: float


class _Spread(msgspec.Struct):
    avg: float
    p50: float


class _AiperfExport(msgspec.Struct):
    """Of aiperf 0.13's profile_export_aiperf.json; times in ms but for the duration."""

    time_to_first_token: _Spread
    inter_token_latency: _Spread
    request_latency: _Spread
    benchmark_duration: _Total
    request_count: _Total
    total_usage_prompt_tokens: _Total
    total_usage_completion_tokens: _Total
    error_request_count: _Total | None = None


class _VllmResult(msgspec.Struct):
    """Of `vllm bench serve --save-result`, with e2el among --percentile-metrics."""

    mean_ttft_ms: float
    median_ttft_ms: float
    mean_tpot_ms: float
    median_tpot_ms: float
    mean_e2el_ms: float
    median_e2el_ms: float
    duration: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int


def read_aiperf(content: bytes) -> LoadFigures:
    """From profile_export_aiperf.json. Raises ConfigError when it is none, or of no finished run."""
    export = _decode(content, _AiperfExport, "aiperf's profile_export_aiperf.json")
    return LoadFigures(
        ttft_mean_s=export.time_to_first_token.avg / 1e3,
        ttft_p50_s=export.time_to_first_token.p50 / 1e3,
        tpot_mean_s=export.inter_token_latency.avg / 1e3,
        tpot_p50_s=export.inter_token_latency.p50 / 1e3,
        e2e_mean_s=export.request_latency.avg / 1e3,
        e2e_p50_s=export.request_latency.p50 / 1e3,
        jct_s=export.benchmark_duration.avg,
        requests=round(export.request_count.avg),
        failed=0 if export.error_request_count is None else round(export.error_request_count.avg),
        prompt_tokens=round(export.total_usage_prompt_tokens.avg),
        output_tokens=round(export.total_usage_completion_tokens.avg),
    )


def read_vllm(content: bytes) -> LoadFigures:
    """From the result file of `vllm bench serve`. Raises ConfigError when it is none."""
    result = _decode(content, _VllmResult, "a result of `vllm bench serve`")
    return LoadFigures(
        ttft_mean_s=result.mean_ttft_ms / 1e3,
        ttft_p50_s=result.median_ttft_ms / 1e3,
        tpot_mean_s=result.mean_tpot_ms / 1e3,
        tpot_p50_s=result.median_tpot_ms / 1e3,
        e2e_mean_s=result.mean_e2el_ms / 1e3,
        e2e_p50_s=result.median_e2el_ms / 1e3,
        jct_s=result.duration,
        requests=result.completed,
        failed=result.failed,
        prompt_tokens=result.total_input_tokens,
        output_tokens=result.total_output_tokens,
    )


def figures_of_run(run: Run) -> LoadFigures:
    """Of our replay. Raises ConfigError when nothing was answered."""
    answered = [each for each in run.requests if not each.error and each.end_s is not None]
    ttfts = [each.ttft_s for each in answered if each.ttft_s is not None]
    tpots = [each.tpot_s for each in answered if each.tpot_s is not None]
    e2es = [each.e2e_s for each in answered if each.e2e_s is not None]
    if not (ttfts and tpots and e2es):
        reasons = {f"{each.error}: {each.detail}" for each in run.requests if each.error}
        raise ConfigError(
            f"the replay got no answer: {'; '.join(sorted(reasons)) or 'nothing ran'}"
        )
    return LoadFigures(
        ttft_mean_s=statistics.fmean(ttfts),
        ttft_p50_s=statistics.median(ttfts),
        tpot_mean_s=statistics.fmean(tpots),
        tpot_p50_s=statistics.median(tpots),
        e2e_mean_s=statistics.fmean(e2es),
        e2e_p50_s=statistics.median(e2es),
        jct_s=max(each.end_s or 0.0 for each in answered) - min(each.sent_s for each in answered),
        requests=len(answered),
        failed=sum(bool(each.error) for each in run.requests),
        prompt_tokens=sum(each.prompt_tokens for each in answered),
        output_tokens=sum(each.output_tokens for each in answered),
    )


def median_figures(runs: Sequence[LoadFigures]) -> LoadFigures:
    """Each figure's own median."""
    columns = {name: [getattr(run, name) for run in runs] for name in LoadFigures.__struct_fields__}
    medians = {name: statistics.median(values) for name, values in columns.items()}
    return msgspec.convert(medians, LoadFigures, strict=False)


def differences(
    ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """By compared figure: the median over pairs of (ours - theirs) / theirs. A pair was measured in the same
    turn, so that a machine that drifts does it to both."""
    return {
        name: statistics.median(
            [our[name] / their[name] - 1 for our, their in zip(ours, theirs, strict=True)]
        )
        for name in COMPARED
    }


def _decode(content: bytes, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"this is not {what}, or of another version: {error}") from error
