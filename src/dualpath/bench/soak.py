"""Many agent sessions at once on a cluster whose engines are killed, whose clients leave, whose store fails.

A real `dualpath serve tiny` process with 2P2D, streamed over HTTP. Each client holds a conversation: every
turn sends the whole text so far and a few new tokens, and takes a greedy answer. Some turns are aborted after
a random number of tokens. One prefill and one decode engine get SIGKILL meanwhile. At the end
the server is asked to stop, and whatever it left is counted.

Right tokens. Answers are compared by teacher forcing: one forward pass of plain `transformers` over a
conversation; at every generated position the largest logit must be that of the token that came. That is
what greedy generation gives, and costs one pass a conversation. Batches and blocks sum floats in another
order, so a token whose logit is within `_TIE` of the largest counts as right; `ties` tells how many were
right only by that. Answers of aborted turns are compared as far as they came.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import random
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from dualpath.base.errors import ConfigError
from dualpath.bench.harness import BenchResult, Figure, Progress
from dualpath.bench.server import ServeProcess
from dualpath.engine.model_source import ModelSpec, resolve_model

if TYPE_CHECKING:
    import httpx

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "soak"
HELP = "agent sessions under kills, aborts and store faults: wrong tokens, lost requests, leaks"

_MODEL = "tiny"
_BYTE_TOKENS = 256
_FIRST_TOKENS = (100, 300)
_TURN_TOKENS = (10, 60)
_ANSWER_TOKENS = (8, 40)
_ABORT_SHARE = 0.1
_TURN_DEADLINE_S = 120.0
_QUIET_DEADLINE_S = 60.0
_POLL_S = 0.1
_GAUGES_S = 1.5
"""Some gauges are set every half second: what is read after this is not older than the last turn."""
_TIE = 1e-3
"""Of logits whose spread is about 5: a hundred times what fp32 sums differ by."""

_SPAWNED = re.compile(r"(\w+\.\d+) starts as process (\d+)")
_SAMPLE = re.compile(r"^dualpath:(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The size of the run; the published figures are for the defaults."""
    parser.add_argument(
        "--clients", type=int, default=20, metavar="N", help="conversations at once"
    )
    parser.add_argument("--turns", type=int, default=50, metavar="N", help="turns of each")
    parser.add_argument("--prefill", type=int, default=2, metavar="N", help="prefill engines")
    parser.add_argument("--decode", type=int, default=2, metavar="N", help="decode engines")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, aborts and kills")
    parser.add_argument(
        "--store-faults",
        metavar="SPEC",
        help="faults of the store, as `dualpath serve` takes them, e.g. "
        "'fault=read:flip:0.01,read:hang:0.002,write:error:0.05;seed=1;hang_s=5'",
    )


def run(args: argparse.Namespace, progress: Progress) -> BenchResult:
    """Figures `wrong_tokens`, `lost_requests` and `leaks`, each 0 in a sound system, and what happened."""
    _require_httpx()
    shm = set(os.listdir("/dev/shm"))
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dualpath-soak-") as name:
        server = _Server(Path(name), args)
        with server.process:
            soak = _Soak(server, args, progress)
            asyncio.run(soak.run())
            served_s = time.monotonic() - started_s
            progress(f"{soak.counts['turns']} turns in {served_s:.0f} s; stopping the server")
        leaks = soak.leaks + server.left_behind(shm)
    progress("comparing the answers with plain transformers")
    verdict = _compare(soak.conversations)
    for what, count in sorted(leaks.items()):
        progress(f"leak: {what}: {count}")
    figures: dict[str, Figure] = {
        "wrong_tokens": verdict["wrong"],
        "lost_requests": len(soak.lost),
        "leaks": sum(leaks.values()),
        "ties": verdict["ties"],
        "compared_tokens": verdict["right"] + verdict["ties"] + verdict["wrong"],
        "turns": soak.counts["turns"],
        "aborts": soak.counts["aborts"],
        "kills": soak.counts["kills"],
        **soak.metrics,
        "seconds": round(time.monotonic() - started_s, 1),
    }
    setup: dict[str, Figure] = {
        "model": _MODEL,
        "engines": f"{args.prefill}P{args.decode}D",
        "clients": args.clients,
        "turns_per_client": args.turns,
        "seed": args.seed,
        "store_faults": args.store_faults or "none",
        "leaks_by_kind": {what: float(count) for what, count in leaks.items()},
    }
    return BenchResult(NAME, figures, setup)


class _Server:
    """The server of the run, and what can be seen of it from outside."""

    def __init__(self, directory: Path, args: argparse.Namespace) -> None:
        self._store = directory / "store"
        self._log = directory / "server.log"
        faults = ["--store-faults", args.store_faults] if args.store_faults else []
        arguments = [
            _MODEL,
            *("--dtype", "float32"),
            *("--prefill", str(args.prefill)),
            *("--decode", str(args.decode)),
            *("--threads", "1"),
            *("--store", str(self._store)),
            *("--block-tokens", "32"),
            *faults,
        ]
        self.process = ServeProcess(arguments, self._log)

    def engines(self) -> dict[str, int]:
        """Process ids of all engines that were ever started, by their id."""
        log = self._log.read_text(encoding="utf-8", errors="replace")
        return {engine: int(pid) for engine, pid in _SPAWNED.findall(log)}

    def kill(self, role: str, dice: random.Random) -> str:
        """SIGKILL for a random engine ("pe" or "de") that lives; returns its id."""
        living = self.process.engine_pids
        victims = [e for e, pid in self.engines().items() if e.startswith(role) and pid in living]
        victim = dice.choice(sorted(victims))
        os.kill(self.engines()[victim], signal.SIGKILL)
        return victim

    def open_files(self) -> int:
        """Descriptors of the frontend."""
        count: int = psutil.Process(self.process.pid).num_fds()
        return count

    def left_behind(self, shm_before: set[str]) -> Counter[str]:
        """What is still there of a server that has ended."""
        return Counter(
            processes=len([pid for pid in self.engines().values() if psutil.pid_exists(pid)]),
            shared_memory=len(set(os.listdir("/dev/shm")) - shm_before),
            temp_files=len(list(self._store.glob("*/tmp/*"))),
        )


@dataclass(slots=True)
class _Conversation:
    """`answers`: half-open ranges of `tokens` that were generated. `partial`: answers cut off by an abort,

    each with the prompt before it.
    """

    tokens: list[int]
    answers: list[range] = field(default_factory=list)
    partial: list[tuple[int, list[int]]] = field(default_factory=list)


class _Soak:
    """The clients, the one who kills, and the search for what is held at the end."""

    def __init__(self, server: _Server, args: argparse.Namespace, progress: Progress) -> None:
        self.conversations: list[_Conversation] = []
        self.counts: Counter[str] = Counter()
        self.lost: list[str] = []
        self.leaks: Counter[str] = Counter()
        self.metrics: dict[str, Figure] = {}
        self._server = server
        self._args = args
        self._progress = progress
        self._kill_at = {
            args.clients * args.turns * 1 // 3: "pe",
            args.clients * args.turns * 2 // 3: "de",
        }

    async def run(self) -> None:
        base_url = self._server.process.base_url
        await self._quiet(base_url)
        open_files = self._server.open_files()
        async with _connect(base_url) as client:
            await asyncio.gather(
                *(self._converse(client, number) for number in range(self._args.clients))
            )
        await self._quiet(base_url)
        self._take_metrics(await _metrics(base_url))
        await self._descriptors_back_to(open_files)

    async def _converse(self, client: httpx.AsyncClient, number: int) -> None:
        dice = random.Random(f"{self._args.seed} {number}")
        talk = _Conversation(_new_tokens(dice, _FIRST_TOKENS))
        self.conversations.append(talk)
        for _ in range(self._args.turns):
            wanted = dice.randint(*_ANSWER_TOKENS)
            leave_after = dice.randrange(wanted) if dice.random() < _ABORT_SHARE else None
            answer = await self._turn(client, talk.tokens, wanted, leave_after)
            if leave_after is not None:
                talk.partial.append((len(talk.tokens), answer))
            elif len(answer) == wanted:
                first = len(talk.tokens)
                talk.tokens += answer
                talk.answers.append(range(first, len(talk.tokens)))
            talk.tokens += _new_tokens(dice, _TURN_TOKENS)
            self._after_turn(dice)

    async def _turn(
        self,
        client: httpx.AsyncClient,
        prompt: list[int],
        wanted: int,
        leave_after: int | None,
    ) -> list[int]:
        """The tokens that came; a request that ends otherwise than it should is noted as lost."""
        import httpx

        tokens: list[int] = []
        body = _Body(prompt=prompt, max_tokens=wanted)
        try:
            async with (
                asyncio.timeout(_TURN_DEADLINE_S),
                client.stream("POST", "completions", content=_encoder.encode(body)) as response,
            ):
                async for line in response.aiter_lines():
                    tokens += _token_ids(line)
                    if leave_after is not None and len(tokens) > leave_after:
                        self.counts["aborts"] += 1
                        return tokens
        except (httpx.HTTPError, msgspec.DecodeError, TimeoutError) as error:
            self._lose(f"{type(error).__name__}: {error}")
            return tokens
        if len(tokens) != wanted:
            self._lose(f"{len(tokens)} tokens of {wanted} came")
        return tokens

    def _lose(self, what: str) -> None:
        self.lost.append(what)
        self._progress(f"lost request: {what}")

    def _after_turn(self, dice: random.Random) -> None:
        self.counts["turns"] += 1
        turns = self.counts["turns"]
        role = self._kill_at.pop(turns, None)
        if role is not None:
            self.counts["kills"] += 1
            self._progress(f"killed {self._server.kill(role, dice)} after {turns} turns")
        if turns % 100 == 0:
            self._progress(f"{turns} turns, {len(self.lost)} lost")

    def _take_metrics(self, metrics: _Metrics) -> None:
        queries = metrics.total("prefix_cache_queries_total")
        self.metrics = {
            "retries": int(metrics.total("request_retries_total")),
            "engine_restarts": int(metrics.total("engine_restarts_total")),
            "kv_load_failures": int(metrics.total("kv_load_failures_total")),
            "hit_rate": round(metrics.total("prefix_cache_hits_total") / max(queries, 1), 4),
        }

    async def _quiet(self, base_url: str) -> None:
        """Wait until all engines serve and nothing is held; what is still held then is a leak."""
        args = self._args
        until_s = time.monotonic() + _QUIET_DEADLINE_S
        await asyncio.sleep(_GAUGES_S)
        while True:
            metrics = await _metrics(base_url)
            held = Counter(
                slots=int(metrics.total("pool_slots_in_use")),
                engine_requests=int(metrics.total("engine_requests")),
                pinned_requests=int(metrics.total("store_pinned_requests")),
                requests=int(
                    metrics.total("num_requests_running") + metrics.total("num_requests_waiting")
                ),
                engines_missing=args.prefill + args.decode - int(metrics.total("engines_up")),
            )
            if not held.total():
                return
            if time.monotonic() > until_s:
                self.leaks += held
                return
            await asyncio.sleep(_POLL_S)

    async def _descriptors_back_to(self, before: int) -> None:
        until_s = time.monotonic() + _QUIET_DEADLINE_S
        while (now := self._server.open_files()) > before:
            if time.monotonic() > until_s:
                self.leaks["descriptors"] += now - before
                return
            await asyncio.sleep(_POLL_S)


class _Metrics:
    """The samples of one look at /metrics."""

    def __init__(self, text: str) -> None:
        self._samples: list[tuple[str, float]] = [
            (name, float(value)) for name, _, value in _SAMPLE.findall(text)
        ]

    def total(self, name: str) -> float:
        """The sum over all labels; 0 for what was never measured."""
        return sum((value for each, value in self._samples if each == name), 0.0)


def _require_httpx() -> None:
    if importlib.util.find_spec("httpx") is None:
        raise ConfigError("the client package is missing: pip install 'dualpath[demo]'")


def _connect(base_url: str) -> httpx.AsyncClient:
    import httpx

    # A proxy of the environment has no way to this machine's loopback.
    return httpx.AsyncClient(
        base_url=base_url,
        headers={"Content-Type": "application/json"},
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        timeout=_TURN_DEADLINE_S,
        trust_env=False,
    )


async def _metrics(base_url: str) -> _Metrics:
    async with _connect(base_url.removesuffix("/v1")) as client:
        response = await client.get("metrics")
    response.raise_for_status()
    return _Metrics(response.text)


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    prompt: list[int]
    max_tokens: int
    model: str = _MODEL
    temperature: float = 0
    stream: bool = True
    ignore_eos: bool = True
    return_token_ids: bool = True


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int] = []


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []


_encoder = msgspec.json.Encoder()
_chunk_decoder = msgspec.json.Decoder(_Chunk)


def _token_ids(line: str) -> Iterator[int]:
    """Of one line of an event stream; an error event has none."""
    if line.startswith("data: {"):
        for choice in _chunk_decoder.decode(line.removeprefix("data: ")).choices:
            yield from choice.token_ids


def _new_tokens(dice: random.Random, between: tuple[int, int]) -> list[int]:
    return dice.choices(range(_BYTE_TOKENS), k=dice.randint(*between))


def _compare(conversations: list[_Conversation]) -> Mapping[str, int]:
    """Tokens that are `right`, right as `ties`, and `wrong`."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    directory = resolve_model(ModelSpec(model=_MODEL)).directory
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    verdict: Counter[str] = Counter(right=0, ties=0, wrong=0)

    def forward(tokens: list[int], cache: Any) -> Any:
        with torch.inference_mode():
            return model(input_ids=torch.tensor([tokens]), cache=cache, use_cache=True).logits[0]

    def judge(rows: Any, answer: list[int]) -> None:
        """`rows` `[answer, vocabulary]`: what each token was drawn from."""
        for row, token in zip(rows, answer, strict=True):
            behind = float(row.max() - row[token])
            verdict["right" if behind == 0 else "ties" if behind <= _TIE else "wrong"] += 1

    for talk in conversations:
        cache = DynamicCache()
        logits = forward(talk.tokens, cache)
        for answer in talk.answers:
            judge(
                logits[answer.start - 1 : answer.stop - 1], talk.tokens[answer.start : answer.stop]
            )
        # From the back, each over what the cache holds of the text before it.
        for first, cut_off in reversed(talk.partial):
            if cut_off:
                cache.crop(
                    first - cache.get_seq_length()
                )  # How many to remove, as a negative number.
                after = forward(cut_off, cache)
                judge(torch.cat((logits[first - 1 : first], after[:-1])), cut_off)
    return verdict
