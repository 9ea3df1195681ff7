"""Made-up results that look like real ones: systems of different speed, loads, samples, errors. Seeded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dualpath.bench.replay.records import (
    ReplayRecord,
    RequestRecord,
    Run,
    ServerSample,
    SessionRecord,
)

__all__ = ["System", "make_record", "make_run", "request"]

PARTS = ("scheduling_s", "allocation_s", "read_s", "wait_s", "prefill_s")
SLO = {"ttft": 4.0, "tpot": 0.05}


@dataclass(frozen=True)
class System:
    """`capacity_aps`: where its queue starts to grow. `spread`: how uneven its reads are."""

    label: str
    capacity_aps: float
    prefill_s: float = 0.35
    tpot_s: float = 0.024
    hit_rate: float = 0.93
    spread: float = 0.1
    timings: bool = True
    groups: int = 3
    error_share: float = 0.0


BASIC = System("Basic", 0.36, spread=0.45)
DUALPATH = System("DualPath", 0.8, spread=0.08)
PLAIN = System("vLLM 0.32", 0.3, timings=False, groups=0, hit_rate=0.71, error_share=0.03)


def request(
    ttft_s: float = 1.0, *, at_s: float = 0.0, session: int = 0, turn: int = 0, **more: object
) -> RequestRecord:
    """A request that ended well: 11 tokens, TPOT 0.02 s, TTST 0.03 s."""
    fields: dict[str, object] = {
        "sent_s": at_s,
        "first_s": at_s + ttft_s,
        "second_s": at_s + ttft_s + 0.03,
        "last_s": at_s + ttft_s + 0.2,
        "end_s": at_s + ttft_s + 0.2,
        "prompt_tokens": 1000,
        "output_tokens": 11,
    }
    return RequestRecord(session=session, turn=turn, scheduled_s=at_s, **{**fields, **more})


def make_run(
    system: System,
    *,
    rate_aps: float | None = None,
    agents: int | None = None,
    sessions: int = 40,
    turns: int = 6,
    seed: int = 0,
) -> Run:
    rng = np.random.default_rng([seed, int((rate_aps or agents or 0) * 1000)])
    load = (rate_aps or (agents or 1) / 40) / system.capacity_aps
    queueing = 0.1 + (0.6 * load / (1 - load) if load < 0.93 else 9 * load)
    requests, people = [], []
    for session in range(sessions):
        start = at_s = float(session / rate_aps) if rate_aps else 0.0
        failed = False
        for turn in range(turns):
            one = _request(system, rng, session, turn, at_s, queueing)
            requests.append(one)
            if one.error:
                failed = True
                break
            at_s = (one.end_s or 0.0) + float(rng.exponential(0.5))
        people.append(
            SessionRecord(
                id=f"s{session}",
                turns=turns,
                scheduled_s=start,
                finished_s=None if failed else requests[-1].end_s,
            )
        )
    duration_s = max(each.end_s or 0.0 for each in requests)
    return Run(
        mode="offline" if agents else "online",
        agents=agents,
        rate_aps=rate_aps,
        ended="complete" if agents else "steady state",
        from_s=0.0 if agents else 10.0,
        duration_s=duration_s,
        client_cpu_s=0.07 * duration_s,
        requests=requests,
        sessions=people,
        samples=_samples(system, rng, duration_s, min(1.0, load)),
        itl_s=np.linspace(system.tpot_s * 0.8, system.tpot_s * 2, 101).tolist(),
    )


def make_record(
    system: System,
    *,
    rates: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5),
    agents: tuple[int, ...] = (4, 8, 16, 32),
    seed: int = 0,
    setup: dict[str, object] | None = None,
    sessions: int = 40,
) -> ReplayRecord:
    runs = [make_run(system, agents=each, sessions=each, seed=seed) for each in agents]
    runs += [make_run(system, rate_aps=each, sessions=sessions, seed=seed) for each in rates]
    figures = {"max_aps": system.capacity_aps * 0.9} if rates else {}
    said = {
        "model": "smollm2",
        "trace": "coding-agent",
        "mode": "online",
        "seed": seed,
        "slo": SLO,
        "base_url": "http://127.0.0.1:8000/v1",
        "command": "dualpath bench replay --base-url http://127.0.0.1:8000/v1 --trace coding-agent",
    }
    return ReplayRecord(
        label=system.label, figures=figures, setup={**said, **(setup or {})}, runs=runs
    )


def _request(
    system: System, rng: np.random.Generator, session: int, turn: int, at_s: float, queueing: float
) -> RequestRecord:
    sent_s = at_s + float(rng.exponential(0.0005))
    prompt = 2000 + 450 * turn + int(rng.integers(0, 300))
    if rng.random() < system.error_share:
        kind = "http 503" if rng.random() < 0.7 else "timeout"
        return RequestRecord(
            session=session,
            turn=turn,
            scheduled_s=at_s,
            sent_s=sent_s,
            end_s=sent_s + 0.1,
            error=kind,
        )
    parts = {
        "queue_s": float(rng.exponential(queueing * 0.5)),
        "reserve_s": float(rng.exponential(0.004)),
        "read_s": float(rng.exponential(queueing * 0.4 + 0.05)),
        "wait_s": float(rng.exponential(0.03)),
        "prefill_s": system.prefill_s * float(rng.lognormal(0, 0.3)),
    }
    first_s = sent_s + sum(parts.values()) + float(rng.exponential(0.01))
    tokens = int(rng.integers(40, 200))
    tpot_s = float(system.tpot_s * rng.lognormal(0, 0.12))
    last_s = first_s + tpot_s * (tokens - 1)
    cached = int(prompt * system.hit_rate) if turn else 0
    return RequestRecord(
        session=session,
        turn=turn,
        scheduled_s=at_s,
        sent_s=sent_s,
        first_s=first_s,
        second_s=first_s + tpot_s * 1.3,
        last_s=last_s,
        end_s=last_s + 0.001,
        prompt_tokens=prompt,
        output_tokens=tokens,
        cached_tokens=cached,
        cached_by_path={"pe": cached // 3, "de": cached - cached // 3} if system.timings else {},
        timings=parts if system.timings else {},
    )


def _samples(
    system: System, rng: np.random.Generator, duration_s: float, load: float
) -> list[ServerSample]:
    if not system.groups:
        return []
    found = []
    totals = np.zeros(system.groups)
    lean = np.linspace(1 + system.spread, 1 - system.spread, system.groups)
    for second in range(int(duration_s) + 1):
        wave = 0.75 + 0.25 * np.sin(second / 9)
        shares = np.clip(load * wave * lean * rng.lognormal(0, 0.08, system.groups), 0, 1)
        totals += shares * 2.5e9
        metrics: dict[str, float] = {}
        for group in range(system.groups):
            name = f'{{group="g{group}"}}'
            metrics[f"dualpath:snic_read_bytes_total{name}"] = float(totals[group])
            metrics[f"dualpath:snic_utilization{name}"] = float(shares[group])
            metrics[f"dualpath:read_queue_length{name}"] = float(int(shares[group] ** 3 * 40000))
        found.append(ServerSample(at_s=second + 0.002, metrics=metrics))
    return found
