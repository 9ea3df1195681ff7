"""Stock vLLM with the plug-in under faults: what is left in use, lost or wrong afterwards.

Real servers on the CPU, one that prefills and two that decode, behind `dualpath router`, over one store; and
a plain one, whose tokens are the right ones (fp32, greedy). The device and the buffers hold few blocks, so
that requests wait for them and are preempted. Prompts come again, alone and as a part of longer ones:
misses and hits. In turn

1. clients leave at random moments, while their requests wait, are staged, prefilled or decoded: with each
   read path (the prefill side, the decode side, both);
2. stored blocks are cut, changed and removed while requests run, and the store is gone at times;
3. a decode server with requests on it is killed, and later started again;
4. the prefill server is killed, so that decode servers do it all.

Half of the answers are streamed, but none where servers are killed: what a client has of a stream cannot be
taken back. After each part, when the servers are idle and their leases have ended, what is left in use on
those that live is counted, and what the router still has under way.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dualpath.base.errors import EngineLost
from dualpath.base.ids import MiB
from dualpath.bench.harness import Progress
from dualpath.bench.server import ServeProcess
from dualpath.bench.vllm_load import Load, Question
from dualpath.bench.vllm_server import BLOCK_TOKENS, VllmServer, get_text, metric_sum
from dualpath.engine.tiny import write_random_model
from dualpath.router.kv_capacity import kv_capacity_tokens

__all__ = ["FaultRun", "change_block", "cut_block", "measure_faults"]

_MODEL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
_VOCABULARY = 250
_DEVICE_BYTES = 48 * MiB
"""96 blocks, for eight requests of up to 15."""
_BUFFER_BYTES = 96 * MiB
_LEASE_S = 5.0
_IDLE_S = 40.0
_POLL_S = 0.25
_CLIENTS = 8
_CONVERSATIONS = 10
_TURNS = 3
_READ_PATHS = ("pe", "de", "split")
_ANSWERS = 40
"""Whole answers in each part."""
_KILL_GAP_S = 0.005
_SPOIL_GAP_S = 0.05
_GONE_S = 0.5
_GONE_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class FaultRun:
    """What is played. `aborts`: clients that leave, in all."""

    python: str
    aborts: int
    seed: int


def measure_faults(run: FaultRun, directory: Path, progress: Progress) -> dict[str, int]:
    """The figures; `leaks`, `lost_requests` and `wrong_tokens` are each 0 in a sound system."""
    directory.mkdir()
    write_random_model(_MODEL, directory / "model")
    with _Bed(run.python, directory, progress) as bed:
        load = Load(bed.questions(run.seed), clients=_CLIENTS, seed=run.seed)
        faults = _Faults(bed, load, progress)
        faults.clients_leave(run.aborts)
        faults.store_spoils(run.seed)
        faults.decode_server_dies()
        faults.prefill_server_dies()
    tally = load.tally
    for reason, count in Counter(tally.lost).most_common(5):
        progress(f"lost {count}: {reason}")
    return {
        "leaks": sum(faults.leaks.values()),
        "lost_requests": len(tally.lost),
        "wrong_tokens": tally.wrong_tokens,
        "aborted_requests": tally.aborted,
        "answered_requests": tally.answered,
        "compared_tokens": tally.compared_tokens,
        "spoilt_blocks": faults.spoilt,
        "retried_requests": faults.retried,
    }


class _Bed:
    """The servers. `living`: those with the connector that run."""

    def __init__(self, python: str, directory: Path, progress: Progress) -> None:
        self._python = python
        self._directory = directory
        self._progress = progress
        self._stack = ExitStack()
        self.disk = directory / "disk"
        """Where blocks are; `store` is the way to it."""
        self.store = directory / "store"

    def __enter__(self) -> _Bed:
        self.disk.mkdir()
        self.store.symlink_to(self.disk)
        self._progress("starting a plain, a prefill and two decode servers")
        with self._stack:
            self.plain = self._start("plain", connector=False)
            self.prefill = self._start("pe", "--no-enable-prefix-caching")
            self.decode = (self._start("de0"), self._start("de1", "--no-enable-prefix-caching"))
            self.living = [self.prefill, *self.decode]
            for server in (self.plain, *self.living):
                server.wait_ready()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, name: str, *arguments: str, connector: bool = True) -> VllmServer:
        settings = {"store": str(self.store), "buffer_bytes": _BUFFER_BYTES, "lease_s": _LEASE_S}
        server = VllmServer(
            self._directory / "model",
            self._directory / f"{name}.log",
            connector=settings if connector else None,
            kv_bytes=_DEVICE_BYTES,
            arguments=("--max-model-len", "4096", *arguments),
            python=self._python,
        )
        self._stack.callback(server.stop)
        return server

    def router(self, read_path: str) -> ServeProcess:
        urls = [f"http://127.0.0.1:{s.port}#kv={s.kv_port}" for s in (self.prefill, *self.decode)]
        arguments = ("--prefill", urls[0], "--decode", *urls[1:], "--read-path", read_path)
        command = (sys.executable, "-m", "dualpath", "router")
        return ServeProcess(arguments, self._directory / "router.log", command=command)

    def questions(self, seed: int) -> list[Question]:
        """Conversations, each turn with all before it, and what plain vLLM answers."""
        dice = random.Random(seed)

        def drawn(n_tokens: int) -> list[int]:
            return [dice.randrange(_VOCABULARY) for _ in range(n_tokens)]

        starts = [drawn(dice.randrange(100, 1200)) for _ in range(_CONVERSATIONS)]
        later = [[drawn(dice.randrange(20, 200)) for _ in range(_TURNS)] for _ in starts]
        lengths = [[dice.randrange(8, 48) for _ in range(_TURNS)] for _ in starts]

        def converse(number: int) -> list[Question]:
            prompt, asked = starts[number], []
            for said, length in zip(later[number], lengths[number], strict=True):
                asked.append(Question(prompt, self.plain.complete(prompt, length).tokens))
                prompt = prompt + asked[-1].answer + said
            return asked

        with ThreadPoolExecutor(2) as pool:
            return [each for asked in pool.map(converse, range(_CONVERSATIONS)) for each in asked]


@dataclass(slots=True)
class _Faults:
    """The parts of the run, in order, and what they left."""

    bed: _Bed
    load: Load
    progress: Progress
    leaks: Counter[str] = field(default_factory=Counter)
    spoilt: int = 0
    retried: int = 0

    def clients_leave(self, aborts: int) -> None:
        for number, read_path in enumerate(_READ_PATHS):
            share = aborts * (number + 1) // len(_READ_PATHS) - aborts * number // len(_READ_PATHS)
            self._play(f"clients leave, read path {read_path}", read_path, aborts=share)

    def store_spoils(self, seed: int) -> None:
        with _spoiling(self.bed, seed) as count:
            self._play("the store spoils", "split")
        self.spoilt = count["cut"] + count["changed"] + count["removed"]
        self.progress(f"the store: {dict(count)}")

    def decode_server_dies(self) -> None:
        victim = self.bed.decode[1]
        self._play("a decode server dies", "split", victim=victim)
        self.progress("starting it again")
        victim.restart()
        self.bed.living.append(victim.wait_ready())
        self._play("it is back", "split")

    def prefill_server_dies(self) -> None:
        self._play("the prefill server dies", "split", victim=self.bed.prefill)

    def _play(
        self, what: str, read_path: str, *, aborts: int = 0, victim: VllmServer | None = None
    ) -> None:
        tally, began_s = self.load.tally, time.monotonic()
        before = (tally.answered, tally.aborted, len(tally.lost), tally.wrong_tokens)
        with self.bed.router(read_path) as router, ExitStack() as stack:
            if victim is not None:
                due_answers = tally.answered + _ANSWERS // 3
                stack.enter_context(
                    _killing(victim, router.base_url, lambda: tally.answered >= due_answers)
                )
                self.bed.living.remove(victim)
            streams = victim is None
            asyncio.run(
                self.load.play(router.base_url, answers=_ANSWERS, aborts=aborts, streams=streams)
            )
            left = Counter(router=_left_in_router(router.base_url))
            self.retried += _retried(router.base_url)
        for server in self.bed.living:
            left += _left_on(server)
        self.leaks += left
        after = (tally.answered, tally.aborted, len(tally.lost), tally.wrong_tokens)
        answered, aborted, lost, wrong = (b - a for a, b in zip(before, after, strict=True))
        self.progress(
            f"{what}: {answered} answered, {aborted} aborted, {lost} lost, {wrong} wrong tokens, "
            f"left in use {dict(left) or 'nothing'}, {time.monotonic() - began_s:.0f} s"
        )


@contextmanager
def _killing(victim: VllmServer, router_url: str, due: Callable[[], bool]) -> Iterator[None]:
    """SIGKILL for the victim once it is due and requests run there. EngineLost when none ever did."""
    over, killed = threading.Event(), threading.Event()

    def kill() -> None:
        while not over.wait(_KILL_GAP_S):
            if due() and _requests(router_url)[f"127.0.0.1:{victim.port}"]:
                victim.kill()
                killed.set()
                return

    thread = threading.Thread(target=kill, name="kill")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if not killed.is_set():
        raise EngineLost(f"port {victim.port}: nothing ran there when it was to be killed")


@contextmanager
def _spoiling(bed: _Bed, seed: int) -> Iterator[Counter[str]]:
    """Meanwhile blocks are spoilt, and the way to the store leads nowhere at times."""
    dice, count, over = random.Random(seed), Counter[str](), threading.Event()
    spoils: Sequence[tuple[str, Callable[[Path], None]]] = (
        ("cut", cut_block),
        ("changed", change_block),
        ("removed", Path.unlink),
    )

    def spoil() -> None:
        while not over.wait(_SPOIL_GAP_S):
            if dice.random() < _GONE_SHARE:
                _lead(bed.store, bed.disk / "nowhere")
                over.wait(_GONE_S)
                _lead(bed.store, bed.disk)
                count["gone"] += 1
            files = sorted(bed.disk.rglob("*.kv"))
            if files:
                name, act = dice.choice(spoils)
                try:
                    act(dice.choice(files))
                    count[name] += 1
                except FileNotFoundError:
                    pass  # A server found it spoilt before, and removed it.

    thread = threading.Thread(target=spoil, name="spoil")
    thread.start()
    try:
        yield count
    finally:
        over.set()
        thread.join()


def _lead(way: Path, place: Path) -> None:
    new = way.with_suffix(".new")
    new.symlink_to(place)
    new.replace(way)


def cut_block(file: Path) -> None:
    """As a writer that died leaves a stored block's file."""
    with file.open("r+b") as opened:
        opened.truncate(5000)


def change_block(file: Path) -> None:
    """As a disk that lies leaves it."""
    with file.open("r+b") as opened:
        opened.seek(9000)
        opened.write(b"spoilt")


def _left_on(server: VllmServer) -> Counter[str]:
    """What is in use there once it is idle: blocks, slots (those of leases too), and requests."""
    capacity_tokens = kv_capacity_tokens(server.get("/metrics"))
    if capacity_tokens is None:
        raise EngineLost(f"port {server.port}: its metrics do not say how many blocks there are")
    until_s = time.monotonic() + _IDLE_S
    while True:
        server.complete([1, 2, 3], 2)  # A step, which brings the metrics up to date.
        in_use = server.metric("vllm:kv_cache_usage_perc")
        left = Counter(
            device_blocks=math.ceil(in_use * capacity_tokens / BLOCK_TOKENS),
            buffer_slots=int(server.metric("vllm:dualpath_slots_in_use")),
            requests=int(
                server.metric("vllm:num_requests_running")
                + server.metric("vllm:num_requests_waiting")
            ),
        )
        if not left.total() or time.monotonic() > until_s:
            return +left
        time.sleep(_POLL_S)


def _left_in_router(base_url: str) -> int:
    """Requests that it still has, though no client waits."""
    until_s = time.monotonic() + _IDLE_S
    while True:
        left = _requests(base_url).total()
        if not left or time.monotonic() > until_s:
            return left
        time.sleep(_POLL_S)


def _requests(base_url: str) -> Counter[str]:
    """That the router has: by server, and those that wait for one."""
    state = json.loads(_get(base_url, "health"))
    servers = {each["name"]: each["requests"] for each in state["servers"]}
    return Counter({**servers, "waiting": state["waiting"]})


def _retried(base_url: str) -> int:
    return int(metric_sum(_get(base_url, "metrics"), "dualpath:request_retries_total"))


def _get(base_url: str, name: str) -> str:
    return get_text(f"{base_url.removesuffix('/v1')}/{name}")
