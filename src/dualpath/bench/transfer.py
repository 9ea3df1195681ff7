"""What the channels move, beside what the machine can: memcpy for shared memory, iperf3 for sockets.

Two processes: an owner with a full pool, and this one, which pulls into a pool of its own. Each round
measures everything once, one after the other, because machines drift; a ratio is taken within its
round, and the median over the rounds is the figure. Large pulls name one slot each; scattered ones are
small spans at random places on both sides, all in one pull.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from dualpath.base.errors import ConfigError
from dualpath.base.ids import EngineId, KiB, MiB, RequestId
from dualpath.bench.harness import BenchResult, Figure, Progress
from dualpath.bench.transfer_owner import OWNER, SECRET, OwnerGreeting, fill_value
from dualpath.kv.pool import BufferPool
from dualpath.transfer import (
    Channel,
    EndpointEvents,
    EndpointKind,
    RemoteSpan,
    TransferName,
    nixl_missing,
    open_endpoint,
)
from dualpath.transfer.tcp import DEFAULT_CONNECTIONS

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "transfer"
HELP = "channels between two processes, large and scattered, beside memcpy and iperf3"

_DEADLINE_S = 120.0
_BATCH_BLOCKS = 1000
# Less, and it is over before iperf3 has looked at its clock.
_IPERF3_LEAST_BYTES = 64 * MiB
_PULL = TransferName(RequestId("bench"), 1, 0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The sizes; the published figures are for the defaults."""
    parser.add_argument("--slots", type=int, default=64, help="slots pulled, one pull each")
    parser.add_argument("--slot-mib", type=int, default=16, help="size of a slot")
    parser.add_argument("--spans", type=int, default=16384, help="spans of the scattered pull")
    parser.add_argument("--span-kib", type=int, default=16, help="size of such a span")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each kind")
    parser.add_argument(
        "--connections",
        type=int,
        default=DEFAULT_CONNECTIONS,
        help="connections of the TCP channel for KV, and of iperf3",
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """What is copied: `large` and `scattered` as (spans, destinations)."""

    spans: list[RemoteSpan]
    into: list[memoryview]

    @property
    def total_bytes(self) -> int:
        return sum(view.nbytes for view in self.into)

    def check(self) -> None:
        """Raises RuntimeError unless the destinations hold what the owner's slots do."""
        for span, view in zip(self.spans, self.into, strict=True):
            if view[0] != fill_value(span.slot) or view[-1] != fill_value(span.slot):
                raise RuntimeError(f"wrong bytes arrived from slot {span.slot}")
            view[0] = view[-1] = 0  # For the next check.


@dataclass
class _Rates:
    """Bytes a second of each round, by what was measured."""

    by_name: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, rate: float) -> float:
        self.by_name.setdefault(name, []).append(rate)
        return rate

    def ratio(self, name: str, to: str) -> float:
        pairs = zip(self.by_name[name], self.by_name[to], strict=True)
        return statistics.median(a / b for a, b in pairs)


def run(args: argparse.Namespace, progress: Progress) -> BenchResult:
    """Figures `tcp_ratio` (to iperf3), `shm_ratio` (to memcpy), `submit_us`, and rates in GB/s."""
    iperf3 = shutil.which("iperf3")
    missing_nixl = nixl_missing()
    kinds: list[EndpointKind] = ["shm", "tcp"]
    if missing_nixl is None:
        kinds.append("nixl")
    if args.span_kib * args.spans > args.slots * args.slot_mib * KiB:
        raise ConfigError("bench transfer: the spans do not fit the slots: fewer --spans")
    rates = _Rates()
    with ExitStack() as stack:
        pool = stack.enter_context(closing(BufferPool(args.slots, args.slot_mib * MiB)))
        np.frombuffer(pool.memory, dtype=np.uint8)[:] = 0
        greeting = stack.enter_context(_owner(args, kinds))
        channels = {
            kind: stack.enter_context(_channel(kind, pool, greeting, args)) for kind in kinds
        }
        large, scattered = _large(pool, greeting), _scattered(pool, args)
        peak = stack.enter_context(_iperf3(iperf3, args.connections)) if iperf3 else None
        for number in range(args.rounds + 1):
            round_ = _Rates() if number == 0 else rates  # The first one warms up.
            _one_round(round_, channels, greeting.stamp, large, scattered, peak)
            progress(_line(number, args.rounds, round_))
        submit = {
            kind: _submit_us(channel, greeting.stamp, scattered)
            for kind, channel in channels.items()
        }
    if iperf3 is None:
        progress("no iperf3 on PATH, so no tcp_ratio: see `make testbed-tools`")
    if missing_nixl:
        progress(f"no figures of nixl: {missing_nixl}")
    return BenchResult(NAME, _figures(rates, submit), _setup(args, large, scattered))


def _figures(rates: _Rates, submit: dict[EndpointKind, float]) -> dict[str, Figure]:
    figures: dict[str, Figure] = {"submit_us": max(submit.values())}
    if "iperf3" in rates.by_name:
        figures["tcp_ratio"] = rates.ratio("tcp", "iperf3")
        figures["tcp_scattered_ratio"] = rates.ratio("tcp_scattered", "iperf3")
    for kind in submit:
        if kind != "tcp":
            figures[f"{kind}_ratio"] = rates.ratio(kind, "memcpy")
            figures[f"{kind}_scattered_ratio"] = rates.ratio(
                f"{kind}_scattered", "memcpy_scattered"
            )
    for name, values in rates.by_name.items():
        figures[f"{name}_gbps"] = statistics.median(values) / 1e9
    figures["submit_us_by_channel"] = {str(kind): us for kind, us in submit.items()}
    return figures


def _setup(args: argparse.Namespace, large: _Work, scattered: _Work) -> dict[str, Figure]:
    return {
        "large_bytes": large.total_bytes,
        "scattered_bytes": scattered.total_bytes,
        "slots": args.slots,
        "slot_mib": args.slot_mib,
        "spans": args.spans,
        "span_kib": args.span_kib,
        "rounds": args.rounds,
        "connections": args.connections,
        "gbps": "10^9 bytes a second",
    }


def _line(number: int, rounds: int, rates: _Rates) -> str:
    shown = ", ".join(f"{name} {values[-1] / 1e9:.2f}" for name, values in rates.by_name.items())
    return f"{'warm-up' if number == 0 else f'round {number} of {rounds}'}, GB/s: {shown}"


def _one_round(
    rates: _Rates,
    channels: dict[EndpointKind, Channel],
    stamp: int,
    large: _Work,
    scattered: _Work,
    iperf3: Callable[[int], float] | None,
) -> None:
    rates.add("memcpy", _memcpy(large))
    for kind, channel in channels.items():
        if kind == "tcp" and iperf3 is not None:
            rates.add("iperf3", iperf3(large.total_bytes))
        rates.add(kind, _pull_large(channel, stamp, large))
        large.check()
    rates.add("memcpy_scattered", _memcpy(scattered))
    for kind, channel in channels.items():
        rates.add(f"{kind}_scattered", _pull_scattered(channel, stamp, scattered))
        scattered.check()


def _pull_large(channel: Channel, stamp: int, work: _Work) -> float:
    started = time.perf_counter()
    futures = [
        channel.pull(_PULL, stamp, [span], [view], deadline_s=_DEADLINE_S)
        for span, view in zip(work.spans, work.into, strict=True)
    ]
    moved = sum(future.result(_DEADLINE_S) for future in futures)
    return moved / (time.perf_counter() - started)


def _pull_scattered(channel: Channel, stamp: int, work: _Work) -> float:
    started = time.perf_counter()
    future = channel.pull(_PULL, stamp, work.spans, work.into, deadline_s=_DEADLINE_S)
    return future.result(_DEADLINE_S) / (time.perf_counter() - started)


def _memcpy(work: _Work) -> float:
    """`numpy.copyto` into the same destinations, from memory of this process."""
    targets = [np.frombuffer(view, dtype=np.uint8) for view in work.into]
    sources = _other_memory(targets)
    started = time.perf_counter()
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)
    return work.total_bytes / (time.perf_counter() - started)


def _other_memory(targets: list[npt.NDArray[np.uint8]]) -> list[npt.NDArray[np.uint8]]:
    """For each target another one's memory, half the list away, that is copied long before or after."""
    half = len(targets) // 2
    return targets[half:] + targets[:half]


def _submit_us(channel: Channel, stamp: int, work: _Work) -> float:
    """CPU of the calling thread to submit one Layer Block, in a pull of 1,000."""
    count = min(_BATCH_BLOCKS, len(work.spans))
    spans, into = work.spans[:count], work.into[:count]
    costs = []
    for _ in range(21):
        started = time.thread_time()
        future = channel.pull(_PULL, stamp, spans, into, deadline_s=_DEADLINE_S)
        costs.append(time.thread_time() - started)
        future.result(_DEADLINE_S)
    return statistics.median(costs) / count * 1e6


def _large(pool: BufferPool, greeting: OwnerGreeting) -> _Work:
    size = pool.geometry.slot_bytes
    spans = [RemoteSpan(slot, 0, size) for slot in greeting.slots]
    return _Work(spans, [pool.view(index) for index in range(len(spans))])


def _scattered(pool: BufferPool, args: argparse.Namespace) -> _Work:
    rng = np.random.default_rng(0)
    size = args.span_kib * KiB
    per_slot = pool.geometry.slot_bytes // size
    places = pool.geometry.n_slots * per_slot
    sources = rng.permutation(places)[: args.spans].tolist()
    targets = rng.permutation(places)[: args.spans].tolist()
    spans = [RemoteSpan(place // per_slot, place % per_slot * size, size) for place in sources]
    into = [pool.view(place // per_slot)[place % per_slot * size :][:size] for place in targets]
    return _Work(spans, into)


@contextmanager
def _owner(args: argparse.Namespace, kinds: list[EndpointKind]) -> Iterator[OwnerGreeting]:
    """The owner's process, up and filled; ended at exit."""
    sizes = [args.slots, args.slot_mib * MiB, args.connections]
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "dualpath.bench.transfer_owner",
            ",".join(kinds),
            *(str(size) for size in sizes),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("the owner's process ended before it was up; see its error above")
        yield msgspec.json.decode(line, type=OwnerGreeting)
    finally:
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


@contextmanager
def _channel(
    kind: EndpointKind, pool: BufferPool, greeting: OwnerGreeting, args: argparse.Namespace
) -> Iterator[Channel]:
    events = EndpointEvents(lambda peer, message: None, lambda peer, reason: None)
    endpoint = open_endpoint(
        kind, EngineId("puller"), pool, SECRET, events, connections=args.connections
    )
    with closing(endpoint):
        yield endpoint.connect(greeting.addresses[kind], OWNER, deadline_s=_DEADLINE_S)


@contextmanager
def _iperf3(program: str, connections: int) -> Iterator[Callable[[int], float]]:
    """Sends so many bytes over loopback, and gives the rate at which they were received."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    server = subprocess.Popen(
        [program, "-s", "-B", "127.0.0.1", "-p", port],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def rate(n_bytes: int) -> float:
        command = [program, "-c", "127.0.0.1", "-p", port, "-P", str(connections)]
        command += ["-n", str(max(n_bytes, _IPERF3_LEAST_BYTES)), "-J"]
        until_s = time.monotonic() + 10.0
        while True:  # The server says nowhere that it is up.
            done = subprocess.run(command, capture_output=True, timeout=_DEADLINE_S, check=False)
            if done.returncode == 0:
                received = json.loads(done.stdout)["end"]["sum_received"]
                return float(received["bits_per_second"]) / 8
            if time.monotonic() > until_s:
                raise RuntimeError(f"iperf3 failed: {done.stdout.decode()[-500:]}")
            time.sleep(0.05)

    try:
        yield rate
    finally:
        server.kill()
        server.wait()
