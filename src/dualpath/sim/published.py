"""What the paper published of its evaluation, as data: numbers, statements about what is larger than what,
and what of all that is not compared.

Knows no simulation. Where the paper gives a range, its two ends are two numbers. Ids are stable; they begin
with the experiment. Invariants: ids are unique; a number is not 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

__all__ = [
    "CLAIMS",
    "LEFT_OUT",
    "PUBLISHED",
    "Claim",
    "Group",
    "LeftOut",
    "Published",
    "published",
]


class Group(StrEnum):
    """What a number belongs to; each group has its own worst error."""

    CORE = "core"
    """Job completion times, the ablation, best speed-ups, balance, latencies at one rate."""
    ONLINE = "online"
    """Capacity, and latencies of the larger cluster."""
    OPEN = "open"
    """What nothing that is modelled explains so far."""
    TABLE1 = "table1"
    """Cache-compute ratios."""
    WORKINGSET = "workingset"
    SCALE = "scale"
    """What a larger cluster costs beside a smaller one."""
    ARTICLES = "articles"
    """Not the paper's own: what articles about it say."""


@dataclass(frozen=True, slots=True)
class Published:
    """`what`: the quantity in words, with its reading where the paper leaves one open. `follows`: from
    others, so that it counts for nothing of its own."""

    id: str
    value: float
    unit: str
    what: str
    group: Group
    follows: bool = False

    @property
    def experiment(self) -> str:
        return self.id.partition(".")[0]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What is published and not compared here, and `why`. `value`: as published, in words."""

    what: str
    value: str
    why: str


@dataclass(frozen=True, slots=True)
class Claim:
    """That something is larger than, about as large as, or grows with something else."""

    id: str
    what: str

    @property
    def experiment(self) -> str:
        return self.id.partition(".")[0]


_RATIO = "GB/PFLOP"
_CORE, _ONLINE, _OPEN, _TABLE1 = Group.CORE, Group.ONLINE, Group.OPEN, Group.TABLE1

_NUMBERS = (
    Published("table1.qwen2.5-32b.16k", 117, _RATIO, "Qwen2.5-32B FP16, 16K cached", _TABLE1),
    Published("table1.qwen2.5-32b.64k", 267, _RATIO, "Qwen2.5-32B FP16, 64K cached", _TABLE1),
    Published("table1.gpt-oss-120b.16k", 47, _RATIO, "GPT-OSS-120B, 16K cached", _TABLE1),
    Published("table1.gpt-oss-120b.64k", 95, _RATIO, "GPT-OSS-120B, 64K cached", _TABLE1),
    Published("table1.qwen3-235b.16k", 39, _RATIO, "Qwen3-235B-A22B, 16K cached", _TABLE1),
    Published("table1.qwen3-235b.64k", 60, _RATIO, "Qwen3-235B-A22B, 64K cached", _TABLE1),
    Published("table1.deepseek-v3.2.16k", 13, _RATIO, "DeepSeek-V3.2, 16K cached", _TABLE1),
    Published("table1.deepseek-v3.2.64k", 36, _RATIO, "DeepSeek-V3.2, 64K cached", _TABLE1),
    Published(
        "table1.deepseek-v3.2.mean", 22, _RATIO, "DeepSeek-V3.2, about, mean of the trace", _TABLE1
    ),
    Published("table1.deepseek-v3.16k", 4.8, _RATIO, "DeepSeek-V3, 16K cached", _TABLE1),
    Published("table1.deepseek-v3.64k", 5.8, _RATIO, "DeepSeek-V3, 64K cached", _TABLE1),
    Published("fig7.660b.best", 1.87, "x", "DS 660B offline, best speed-up over Basic", _CORE),
    Published("fig7.27b.best", 1.78, "x", "DS 27B 1P1D offline, best speed-up over Basic", _CORE),
    Published("fig7.27b.oracle.low", 1.09, "x", "DS 27B 1P1D, JCT by Oracle's, least", _OPEN),
    Published("fig7.27b.oracle.high", 1.85, "x", "DS 27B 1P1D, JCT by Oracle's, most", _OPEN),
    Published(
        "fig7.660b.oracle.low", 1.127, "x", "DS 660B, JCT by Oracle's, least", Group.ARTICLES
    ),
    Published(
        "fig7.660b.oracle.high", 1.143, "x", "DS 660B, JCT by Oracle's, most", Group.ARTICLES
    ),
    Published("fig8.low", 1.82, "x", "Appends or outputs scaled, least speed-up", _OPEN),
    Published("fig8.high", 1.99, "x", "Appends or outputs scaled, best speed-up", _OPEN),
    Published("fig9.mean", 1.64, "x", "DS 27B, three P/D ratios, mean speed-up", _CORE),
    Published("fig9.best", 2.46, "x", "DS 27B, three P/D ratios, best speed-up", _CORE),
    Published(
        "fig10.660b.capacity", 2.25, "x", "DS 660B, APS within the SLO over Basic's", _ONLINE
    ),
    Published("fig10.27b.capacity", 1.67, "x", "DS 27B, APS within the SLO over Basic's", _OPEN),
    Published(
        "fig10.mean", 1.96, "x", "APS within the SLO over Basic's, mean of both", _OPEN, True
    ),
    Published("fig11.ttft", 1.739, "s", "DS 660B 2P4D at 0.4 APS, mean TTFT", _CORE),
    Published("fig11.ttst", 0.228, "s", "DS 660B 2P4D at 0.4 APS, mean TTST", _ONLINE),
    Published("fig11.tpot", 0.039, "s", "DS 660B 2P4D at 0.4 APS, mean TPOT", _CORE),
    Published(
        "fig12.layerwise", 0.8279, "x", "Layerwise prefill, JCT by Basic's (-17.21 %)", _CORE
    ),
    Published("fig12.dual-path", 0.6181, "x", "+ dual path, JCT by Basic's (-38.19 %)", _CORE),
    Published("fig12.scheduling", 0.5438, "x", "+ scheduling, JCT by Basic's (-45.62 %)", _CORE),
    Published("fig13.scheduled", 1.18, "x", "Storage NICs, most by mean, scheduled", _CORE),
    Published("fig13.round-robin", 1.53, "x", "Storage NICs, most by mean, round robin", _CORE),
    Published("fig13.use.basic", 0.42, "", "2P4D, storage NICs in use, Basic", Group.ARTICLES),
    Published(
        "fig13.use.round-robin", 0.58, "", "Storage NICs in use, round robin", Group.ARTICLES
    ),
    Published("fig13.use.dual", 0.78, "", "2P4D, storage NICs in use, DualPath", Group.ARTICLES),
    Published("fig13.use.dual-64k", 0.83, "", "The same, at 64K", Group.ARTICLES),
    Published("fig14.scheduled", 1.06, "x", "Attention time in an EP group, most by mean", _CORE),
    Published("table3.2p4d.jct", 3167, "s", "2P4D, 2,000 agents, JCT", _CORE),
    Published("table3.48p96d.jct", 3201, "s", "48P96D, 48,000 agents, JCT", _CORE),
    Published(
        "table3.jct-change", 3201 / 3167, "x", "JCT of 48P96D by that of 2P4D", Group.SCALE, True
    ),
    Published("table3.44p88d.ttft", 1.847, "s", "44P88D at 8.8 APS, mean TTFT", _ONLINE),
    Published("table3.44p88d.ttst", 0.194, "s", "44P88D at 8.8 APS, mean TTST", _ONLINE),
    Published("table3.44p88d.tpot", 0.036, "s", "44P88D at 8.8 APS, mean TPOT", _ONLINE),
    Published("table3.scheduler-cores", 10, "cores", "Scheduler of 1,152 GPUs, below", Group.SCALE),
    Published("workingset.0.1", 69, "GB", "DS 660B at 0.1 APS, KV in use", Group.WORKINGSET),
    Published("workingset.0.45", 681, "GB", "DS 660B at 0.45 APS, KV in use", Group.WORKINGSET),
)

PUBLISHED: Mapping[str, Published] = MappingProxyType({each.id: each for each in _NUMBERS})
"""By id, in the order in which they are shown."""

_STATEMENTS = (
    Claim("fig7.order", "Oracle is at least as fast as DualPath, DualPath as Basic, everywhere"),
    Claim("fig7.agents", "DS 660B: the speed-up grows with the number of agents"),
    Claim("fig7.length", "DS 660B: the speed-up grows with the length of contexts"),
    Claim("fig7.oracle", "DS 660B: DualPath is close to Oracle"),
    Claim("fig8.append", "Basic nears DualPath as appends grow"),
    Claim("fig9.basic", "Basic on 1P1D is about as fast as Basic on 1P2D"),
    Claim("fig9.one-more", "DualPath on 1P1D is about as fast as Basic on 2P1D"),
    Claim("fig9.dual", "DualPath on 2P1D is about as fast as DualPath on 1P2D"),
    Claim("fig10.660b", "DS 660B: DualPath holds the SLO at higher rates than Basic"),
    Claim("fig10.27b", "DS 27B: DualPath holds the SLO at higher rates than Basic"),
    Claim("fig12.layerwise", "Layerwise prefill is faster than Basic"),
    Claim("fig12.dual-path", "+ dual path is faster than layerwise prefill alone"),
    Claim("fig12.scheduling", "+ scheduling is faster than without"),
    Claim("fig13.balance", "Scheduled reads load storage NICs more evenly than round robin"),
    Claim("fig14.balance", "The compute quota makes attention time more even"),
)

CLAIMS: Mapping[str, Claim] = MappingProxyType({each.id: each for each in _STATEMENTS})
"""By id."""


_OTHER_SYSTEM = (
    "another engine, cache and store: none of them is modelled, and a model fitted to its results would "
    "predict nothing"
)
_USE_OF_GPUS = (
    "not said what counts as use; here a rank that waits for the others of its step counts as busy"
)

LEFT_OUT = (
    LeftOut("Paper: SGLang HiCache with the Mooncake store on 3FS", "curves", _OTHER_SYSTEM),
    LeftOut(
        "Articles: against SGLang with Mooncake",
        "1.88x offline, 1.90x APS, memory efficiency 92 % against 68 %",
        _OTHER_SYSTEM,
    ),
    LeftOut(
        "Paper: Qwen2.5-32B on 1P2D, offline",
        "curves",
        "no number is given; ours are in `reproduction/fig7.csv`, with 256 agents",
    ),
    LeftOut(
        "Paper: hit rate of the 64K trace",
        "98.7 %",
        "follows from the table of traces: context by context and append",
    ),
    LeftOut(
        "Paper: ratios of P to D nodes without a bottleneck",
        "1/7 to 7/2",
        "a formula over NICs and memory; `dualpath plan` computes it",
    ),
    LeftOut(
        "Paper: fall of I/O to compute, Ampere to Blackwell",
        "14.4x",
        "from data sheets, not of the evaluation",
    ),
    LeftOut(
        "Articles: storage NICs in use, random scheduling",
        "62 %",
        "none of the paper's systems schedules so, and no run of an experiment does",
    ),
    LeftOut(
        "Articles: JCT of round robin, random, DualPath",
        "mean 3201, 2987, 2456 s; P99 4892, 4567, 3215 s",
        "neither trace nor agents are named",
    ),
    LeftOut(
        "Articles: layerwise prefill",
        "33 % less HBM, 28 % less latency",
        "neither model nor load is named; what it saves of HBM is fitted here (`whole_prefill_share`)",
    ),
    LeftOut("Articles: use of GPUs by the compute quota", "68 % to 89 %", _USE_OF_GPUS),
    LeftOut("Articles: use of GPUs by DualPath", "40 % to 80 %", _USE_OF_GPUS),
    LeftOut(
        "Articles: spread of storage NICs",
        "under 15 %",
        "a limit for alarms; the paper's balance is compared (`fig13`)",
    ),
    LeftOut(
        "Articles: FP8 KV",
        "40 to 50 % less traffic",
        "no experiment changes the format of KV; a byte instead of two an element is half of it",
    ),
    LeftOut(
        "Articles: adaptive thresholds",
        "5 to 8 % more throughput",
        "not of the paper; tried apart, by `dualpath sim policies thresholds`",
    ),
    LeftOut(
        "Articles: two access paths on CPUs",
        "P99 850 to 520 ms at 32K, 980 to 560 ms at 16K",
        "hosts without GPUs: not of the cluster that is simulated",
    ),
)
"""In the order in which they are shown."""


def published(experiment: str) -> list[Published]:
    """What there is of an experiment, in order."""
    return [each for each in PUBLISHED.values() if each.experiment == experiment]
