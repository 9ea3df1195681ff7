"""`dualpath bench qos`: what traffic classes do for model execution beside KV, and what they leave to KV.

Two nodes of a testbed, whose compute NICs have two classes (high 99, low 1, either may take what is idle). In
the high class messages of 64 KiB go there and back, marked as collectives would be. KV is pulled by the TCP
channel as engines pull it. One node sends both the echoes and the KV: there they meet. Each round measures
everything once, because machines drift; a ratio is taken within its round, and the median over the rounds is
the figure. The kernel counts what left by which class; bytes that cannot have gone by the right one are an
error.
"""

from __future__ import annotations

import argparse
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np

from dualpath.base.errors import ConfigError
from dualpath.base.ids import KiB, MiB
from dualpath.bench.harness import BenchResult, Figure, Progress
from dualpath.bench.qos_ends import (
    MESSAGE_BYTES,
    Command,
    EchoGreeting,
    OwnerGreeting,
    Ping,
    PingRun,
    Pull,
    PullRun,
    Start,
    StartEcho,
    StartOwner,
    StartPing,
    StartPull,
    Stop,
    Stream,
    StreamRun,
)
from dualpath.qos.ethernet import HIGH_CLASS, LOW_CLASS
from dualpath.qos.observe import parse_classes
from dualpath.testbed import Node, Testbed, TestbedConfig, why_no_testbed

__all__ = [
    "HELP",
    "NAME",
    "NEEDS",
    "ClassPackets",
    "add_arguments",
    "check_classes",
    "pull_rate",
    "run",
]

NAME = "qos"
HELP = "latency of the high traffic class alone and beside KV, and what KV gets, on a testbed"
NEEDS = "root and `make testbed-tools`"

_ANSWER_S = 60.0
_MOST_SECONDS = 20.0
_WARM_UP_S = 0.3
"""Until TCP has found the rate."""
_SPAN_BYTES = 1 * MiB
_SMALL_SPAN_BYTES = 128 * KiB
"""Where KV is slow, so that enough of them end in a measurement."""
_MOST_PAYLOAD_BYTES = 1460
"""Of a packet at MTU 1500."""
_Answer = TypeVar("_Answer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The published figures are for the defaults."""
    parser.add_argument(
        "--rounds", type=int, default=9, help="all is measured so often (%(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="of each measurement (%(default)s)"
    )
    parser.add_argument(
        "--interval-ms", type=float, default=2.0, help="between two messages (%(default)s)"
    )
    parser.add_argument(
        "--cnic",
        default=TestbedConfig().cnic,
        metavar="RATE",
        help="of each node's compute NIC, each way (%(default)s)",
    )


@dataclass(frozen=True, slots=True)
class ClassPackets:
    """Sent by each class of a compute NIC."""

    high: int
    low: int


@dataclass
class _Measured:
    """Values of each round by figure, all round trips by setting, and packets by setting and class."""

    rounds: dict[str, list[float]] = field(default_factory=dict)
    round_trips_us: dict[str, list[float]] = field(default_factory=dict)
    packets: dict[str, ClassPackets] = field(default_factory=dict)

    def add(self, name: str, value: float) -> float:
        self.rounds.setdefault(name, []).append(value)
        return value

    def add_pings(self, setting: str, run: PingRun) -> float:
        """The median, which it adds too."""
        self.round_trips_us.setdefault(setting, []).extend(run.round_trips_us)
        return self.add(f"{setting}_p50_us", statistics.median(run.round_trips_us))

    def add_packets(self, setting: str, packets: ClassPackets) -> None:
        total = self.packets.get(setting, ClassPackets(high=0, low=0))
        self.packets[setting] = ClassPackets(total.high + packets.high, total.low + packets.low)

    def median(self, name: str) -> float:
        return statistics.median(self.rounds[name])


def run(args: argparse.Namespace, progress: Progress) -> BenchResult:
    """Figures `high_p50_ratio`, `same_class_p50_ratio`, `idle_share`, `low_share_backlogged`, and parts."""
    if args.rounds < 1 or not 0 < args.seconds <= _MOST_SECONDS or args.interval_ms < 0:
        raise ConfigError(
            f"bench qos: expected --rounds above 0, --seconds above 0 and at most {_MOST_SECONDS:g}, "
            "--interval-ms from 0"
        )
    if (reason := why_no_testbed()) is not None:
        raise ConfigError(f"bench qos measures on a testbed: {reason}")
    measured = _Measured()
    with ExitStack() as stack:
        bed = stack.enter_context(Testbed(TestbedConfig(topology="1P1D", cnic=args.cnic)))
        bench = stack.enter_context(_two_nodes(bed, args))
        for number in range(1, args.rounds + 1):
            bench.one_round(measured)
            progress(_line(number, args.rounds, measured))
    setup: dict[str, Figure] = {
        "cnic": args.cnic,
        "rounds": args.rounds,
        "seconds": args.seconds,
        "interval_ms": args.interval_ms,
        "message_bytes": MESSAGE_BYTES,
        "real_time": bench.real_time,
        "goodput_mbit_s": bed.cnic_goodput_bytes_s * 8 / 1e6,
    }
    return BenchResult(NAME, _figures(measured), setup)


def _figures(measured: _Measured) -> dict[str, Figure]:
    names = ("high_p50_ratio", "same_class_p50_ratio", "idle_share", "low_share_backlogged")
    figures: dict[str, Figure] = {name: measured.median(name) for name in names}
    for setting in ("alone", "low", "same_class"):
        figures[f"{setting}_p50_us"] = measured.median(f"{setting}_p50_us")
        figures[f"{setting}_p99_us"] = float(np.percentile(measured.round_trips_us[setting], 99))
    figures["low_alone_share"] = measured.median("low_alone_share")
    for name in ("low_alone", "low_beside_pings", "low_backlogged", "high_backlogged"):
        figures[f"{name}_mbit_s"] = measured.median(f"{name}_mbit_s")
    figures["high_p50_ratio_of_each_round"] = measured.rounds["high_p50_ratio"]
    figures["packets_by_class"] = {
        setting: {"high": packets.high, "low": packets.low}
        for setting, packets in measured.packets.items()
    }
    return figures


def _line(number: int, rounds: int, measured: _Measured) -> str:
    last = {name: values[-1] for name, values in measured.rounds.items()}
    return (
        f"round {number} of {rounds}: p50 alone {last['alone_p50_us']:.0f} us, "
        f"KV in the low class {last['low_p50_us']:.0f}, in the same {last['same_class_p50_us']:.0f}; "
        f"idle_share {last['idle_share']:.3f}, "
        f"low_share_backlogged {last['low_share_backlogged']:.3f}"
    )


def pull_rate(run: PullRun, from_s: float, to_s: float) -> float:
    """Bytes a second in [from_s, to_s), by the pulls that ended then; off by one pull at most."""
    ended = sum(from_s <= each < to_s for each in run.done_s)
    return ended * run.span_bytes / (to_s - from_s)


def check_classes(setting: str, packets: ClassPackets, *, low_bytes: int, high_bytes: int) -> None:
    """Raises RuntimeError when a class sent too few packets to have carried these bytes."""
    for name, sent, n_bytes in (
        ("low", packets.low, low_bytes),
        ("high", packets.high, high_bytes),
    ):
        if sent * _MOST_PAYLOAD_BYTES < n_bytes:
            raise RuntimeError(
                f"{setting}: {n_bytes} bytes should have left by the {name} class, which sent {sent} packets "
                f"of at most {_MOST_PAYLOAD_BYTES}; `dualpath qos check` in the node tells where they go"
            )


@dataclass(frozen=True, slots=True)
class _Bench:
    """The ends, and where they meet: `sender` sends KV and echoes. `goodput` in bytes a second."""

    ping: _End
    puller: _End
    sender: Node
    goodput: float
    real_time: bool
    seconds: float
    interval_s: float

    def one_round(self, measured: _Measured) -> None:
        alone_us = self._alone(measured)
        self._beside_low(measured, alone_us)
        self._beside_same(measured, alone_us)
        self._low_alone(measured)
        self._backlogged(measured)

    def _alone(self, measured: _Measured) -> float:
        before = self._sent()
        pings = self._pings()
        self._count("alone", measured, before, high_bytes=pings.total_bytes)
        return measured.add_pings("alone", pings)

    def _beside_low(self, measured: _Measured, alone_us: float) -> None:
        before = self._sent()
        pings, kv = self._beside_kv(self._pings)
        self._count("low", measured, before, low_bytes=kv.total_bytes, high_bytes=pings.total_bytes)
        measured.add("high_p50_ratio", measured.add_pings("low", pings) / alone_us)
        low_rate = pull_rate(kv, pings.from_s, pings.to_s)
        high_rate = pings.total_bytes / (pings.to_s - pings.from_s)
        measured.add("idle_share", low_rate / (self.goodput - high_rate))
        measured.add("low_beside_pings_mbit_s", low_rate * 8 / 1e6)

    def _beside_same(self, measured: _Measured, alone_us: float) -> None:
        before = self._sent()
        pings, kv = self._beside_kv(self._pings, high=True)
        both = kv.total_bytes + pings.total_bytes
        self._count("same_class", measured, before, high_bytes=both)
        measured.add("same_class_p50_ratio", measured.add_pings("same_class", pings) / alone_us)

    def _low_alone(self, measured: _Measured) -> None:
        before = self._sent()
        (from_s, to_s), kv = self._beside_kv(self._rest)
        self._count("low_alone", measured, before, low_bytes=kv.total_bytes)
        low_rate = pull_rate(kv, from_s, to_s)
        measured.add("low_alone_mbit_s", low_rate * 8 / 1e6)
        measured.add("low_alone_share", low_rate / self.goodput)

    def _backlogged(self, measured: _Measured) -> None:
        before = self._sent()
        stream, kv = self._beside_kv(self._high_stream, span_bytes=_SMALL_SPAN_BYTES)
        self._count(
            "backlogged",
            measured,
            before,
            low_bytes=kv.total_bytes,
            high_bytes=stream.received_bytes,
        )
        high_rate = stream.received_bytes / (stream.to_s - stream.from_s)
        low_rate = pull_rate(kv, stream.from_s, stream.to_s)
        measured.add("low_backlogged_mbit_s", low_rate * 8 / 1e6)
        measured.add("high_backlogged_mbit_s", high_rate * 8 / 1e6)
        measured.add("low_share_backlogged", low_rate / (low_rate + high_rate))

    def _pings(self) -> PingRun:
        return self.ping.ask(Ping(self.seconds, self.interval_s), PingRun)

    def _high_stream(self) -> StreamRun:
        return self.ping.ask(Stream(_WARM_UP_S, self.seconds), StreamRun)

    def _rest(self) -> tuple[float, float]:
        from_s = time.monotonic()
        time.sleep(self.seconds)
        return from_s, time.monotonic()

    def _beside_kv(
        self, do: Callable[[], _Answer], *, high: bool = False, span_bytes: int = _SPAN_BYTES
    ) -> tuple[_Answer, PullRun]:
        """What `do` gives while KV flows, and the KV's run."""
        self.puller.ask(Pull(high, span_bytes), type(None))
        time.sleep(_WARM_UP_S)
        answer = do()
        return answer, self.puller.ask(Stop(), PullRun)

    def _sent(self) -> ClassPackets:
        done = subprocess.run(
            self.sender.command(["tc", "-s", "class", "show", "dev", "cnic"]),
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=True,
        )
        classes = parse_classes(done.stdout)
        return ClassPackets(high=classes[HIGH_CLASS].packets, low=classes[LOW_CLASS].packets)

    def _count(
        self,
        setting: str,
        measured: _Measured,
        before: ClassPackets,
        *,
        low_bytes: int = 0,
        high_bytes: int = 0,
    ) -> None:
        now = self._sent()
        packets = ClassPackets(high=now.high - before.high, low=now.low - before.low)
        check_classes(setting, packets, low_bytes=low_bytes, high_bytes=high_bytes)
        measured.add_packets(setting, packets)


class _End:
    """A process that runs `qos_ends` in a node."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def ask(self, command: Start | Command, answer: type[_Answer]) -> _Answer:
        """Its answer to the command. Raises RuntimeError when there is none in time."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(command) + b"\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], _ANSWER_S)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            raise RuntimeError(f"no answer to {command}; see the error of its process above")
        return msgspec.json.decode(line, type=answer)


@contextmanager
def _two_nodes(bed: Testbed, args: argparse.Namespace) -> Iterator[_Bench]:
    near, far = bed.nodes["pe0"], bed.nodes["de0"]
    host = far.compute_address
    with ExitStack() as stack:
        echo, owner = (stack.enter_context(_end(far)) for _ in range(2))
        ping, puller = (stack.enter_context(_end(near)) for _ in range(2))
        echoes = echo.ask(StartEcho(host), EchoGreeting)
        owned = owner.ask(StartOwner(host), OwnerGreeting)
        ping.ask(StartPing(host, echoes), type(None))
        puller.ask(StartPull(owned), type(None))
        yield _Bench(
            ping=ping,
            puller=puller,
            sender=far,
            goodput=bed.cnic_goodput_bytes_s,
            real_time=echoes.real_time,
            seconds=args.seconds,
            interval_s=args.interval_ms / 1000,
        )


@contextmanager
def _end(node: Node) -> Iterator[_End]:
    """An end in the node; gone at exit."""
    command = [sys.executable, "-m", "dualpath.bench.qos_ends"]
    process = subprocess.Popen(node.command(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield _End(process)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
