"""How long the simulator takes, and how much memory, for a small cluster and for a large one.

Both runs are of DeepSeek-V3.2 on H800 nodes, the paper's 48K trace, whole trajectories from the first turn
to the last, all agents at once, system `dual`; prefill instances of 2 nodes, decode instances of 4. Runs
are single-threaded. `policy_compiled`: about half of the time is the policy's where it is not.

- `small_s`: 2P4D, 2,000 agents; the median of `--repeats`, compiled before. `events_per_s`: of the simulated
  cluster, in a run of that time, the policy's decisions included.
- `compile_s`: the kernel's first run after an installation, less what the run itself takes.
- `scale_s`, `scale_gib`: 48P96D, 48,000 agents, in a process of its own; its peak memory. `--quick` leaves
  it out.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dualpath.bench.harness import BenchResult, Figure, Progress, stderr_progress
from dualpath.policy import is_compiled

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "sim"
HELP = "time and memory that the simulator takes, for a small and a large cluster"

S = TypeVar("S")
T = TypeVar("T")

_MODEL, _GPU, _TRACE = "deepseek-v3.2", "h800", "48k"
_PREFILL_INSTANCE_NODES, _DECODE_INSTANCE_NODES = 2, 4
_REPORT_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="leave the large cluster out")
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="of the small one, for the median"
    )
    parser.add_argument("--small-agents", type=int, default=2_000, metavar="N")
    parser.add_argument("--scale-agents", type=int, default=48_000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the trace")


def run(args: argparse.Namespace, progress: Progress) -> BenchResult:
    small = _Size(2, 4, args.small_agents, args.seed)
    with tempfile.TemporaryDirectory() as directory:
        compile_s = _in_child(_first_run_s, directory)
    progress(f"compiled in {compile_s:.1f} s")
    _simulate(_Size(2, 4, 8, args.seed))
    runs = []
    for repeat in range(args.repeats):
        runs.append(_simulate(small))
        progress(f"{small.name} {repeat + 1}/{args.repeats}: {runs[-1].wall_s:.2f} s")
    small_s = statistics.median(each.wall_s for each in runs)
    figures: dict[str, Figure] = {
        "small_s": round(small_s, 3),
        "small_s_runs": [round(each.wall_s, 3) for each in runs],
        "events_per_s": round(runs[0].events / small_s),
        "requests_per_s": round(runs[0].requests / small_s),
        "compile_s": round(compile_s, 2),
    }
    setup: dict[str, Figure] = {
        "model": _MODEL,
        "gpu": _GPU,
        "trace": f"paper:{_TRACE}",
        "system": "dual",
        "prefill_instance_nodes": _PREFILL_INSTANCE_NODES,
        "decode_instance_nodes": _DECODE_INSTANCE_NODES,
        "small": small.name,
        "small_agents": small.agents,
        "small_requests": runs[0].requests,
        "small_jct_s": round(runs[0].jct_s, 1),
        "repeats": args.repeats,
        "policy_compiled": is_compiled(),
        "seed": args.seed,
    }
    if not args.quick:
        scale = _Size(48, 96, args.scale_agents, args.seed)
        large = _in_child(_simulate, scale)
        progress(f"{scale.name}: {large.wall_s:.1f} s, {large.peak_gib:.2f} GiB")
        figures["scale_s"] = round(large.wall_s, 2)
        figures["scale_gib"] = round(large.peak_gib, 3)
        setup["scale"] = scale.name
        setup["scale_agents"] = scale.agents
        setup["scale_requests"] = large.requests
        setup["scale_jct_s"] = round(large.jct_s, 1)
    return BenchResult(NAME, figures, setup)


@dataclass(frozen=True, slots=True)
class _Size:
    prefill_nodes: int
    decode_nodes: int
    agents: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.prefill_nodes}P{self.decode_nodes}D"


@dataclass(frozen=True, slots=True)
class _Run:
    """`peak_gib`: of the whole process."""

    wall_s: float
    events: int
    requests: int
    jct_s: float
    peak_gib: float


def _simulate(size: _Size) -> _Run:
    """Making the trace is not in the time; making the simulation is."""
    from dualpath.sim.hardware import load_hardware
    from dualpath.sim.model_config import load_model
    from dualpath.sim.paper_traces import paper_trace
    from dualpath.sim.setting import Assumptions, Deployment, System, prepare
    from dualpath.sim.simulation import Simulation
    from dualpath.sim.workload import offline

    deployment = Deployment(
        model=load_model(_MODEL),
        hardware=load_hardware(_GPU),
        prefill_nodes=size.prefill_nodes,
        decode_nodes=size.decode_nodes,
        prefill_instance_nodes=_PREFILL_INSTANCE_NODES,
        decode_instance_nodes=_DECODE_INSTANCE_NODES,
    )
    cluster, policy = prepare(deployment, System.DUAL, Assumptions())
    work = offline(paper_trace(_TRACE, seed=size.seed), size.agents)
    start = time.perf_counter()
    outcome = Simulation(cluster, policy, work).run(progress=_told(size, start))
    wall_s = time.perf_counter() - start
    if outcome.was_interrupted:
        raise KeyboardInterrupt
    return _Run(wall_s, outcome.events, len(outcome.records), outcome.jct_s, _peak_gib())


def _told(size: _Size, start: float) -> Callable[[float, int], None]:
    """A line on stderr now and then, of runs that take long."""
    last = start

    def told(now_s: float, ended: int) -> None:
        nonlocal last
        if time.perf_counter() - last > _REPORT_S:
            last = time.perf_counter()
            stderr_progress(
                f"{size.name}: {now_s:,.0f} s simulated in {last - start:.0f} s, "
                f"{ended:,} of {size.agents:,} agents have ended"
            )

    return told


def _first_run_s(cache: str) -> float:
    """What the first of two equal runs takes more than the second, with nothing in the cache."""
    os.environ["NUMBA_CACHE_DIR"] = cache
    tiny = _Size(2, 4, 8, 0)
    first, second = _simulate(tiny), _simulate(tiny)
    return first.wall_s - second.wall_s


def _peak_gib() -> float:
    """Not from getrusage, whose figure a new process has from the one that started it."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (each for each in status.splitlines() if each.startswith("VmHWM:"))
    return int(line.split()[1]) / 2**20


def _in_child(function: Callable[[S], T], argument: S) -> T:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        return executor.submit(function, argument).result()
