"""Time to the first token of a turn with a long stored prefix, against the same turn computed whole.

A real `dualpath serve` process, streamed over HTTP, as a client sees it. The turn is 8K tokens that are
stored and 64 new ones. A hit reads the 8K from the store; a miss is the same prompt under a `cache_salt`
never used before, so the same server finds nothing; the first miss has no salt, and stores what the hits
read. Misses and hits alternate, and medians are compared, because machines drift. The other read paths
are measured with hits only, later, each on a server of its own over the same store: they show that every
path works as well, not small differences.

No read may come from the page cache: the store reads with O_DIRECT (`direct_io` in the setup tells
whether the file system lets it), and before every hit the kernel is told to drop what it may hold of the
block files. What a request wrote is waited for before the next one starts.

The model has random weights, bfloat16 by default, and is made for the run: 12 of the 30 layers of
SmolLM2-135M, so that computing 8K tokens on a small machine takes seconds. A larger one gains more.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import secrets
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualpath.base.errors import ConfigError
from dualpath.bench.harness import BenchResult, Figure, Progress
from dualpath.bench.openai_client import (
    Completion,
    RequestFailed,
    complete,
    connect,
    read_metrics,
    require_openai,
)
from dualpath.bench.server import ServeProcess
from dualpath.engine.model_source import cache_directory
from dualpath.engine.tiny import write_random_model
from dualpath.serve.cluster import describe_model
from dualpath.serve.config import Dtype, ServeConfig
from dualpath.store import open_store

if TYPE_CHECKING:
    import openai

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "ttft"
HELP = "time to the first token with 8K tokens stored and 64 appended, against computing all"

_SMOLLM2: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "initializer_range": 0.04,
}
_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "12-layers": {**_SMOLLM2, "num_hidden_layers": 12},
    "135m": _SMOLLM2,
    "0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "initializer_range": 0.04,
    },
    "tiny": {"model_type": "llama", "num_key_value_heads": 2},
}
"""12 layers of SmolLM2-135M, it whole, Qwen2-0.5B, and one for tests; all but for the vocabulary."""

_MAX_TOKENS = 2
_BYTE_TOKENS = 256
_BLOCK_TOKENS = 64
_STORE_DEADLINE_S = 120.0
_POLL_S = 0.1
_PATHS = ("split", "pe", "de", "shorter")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The sizes; the published figures are for the defaults."""
    parser.add_argument("--shape", choices=tuple(_SHAPES), default="12-layers", help="of the model")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--stored-tokens", type=int, default=8192, metavar="N")
    parser.add_argument("--new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--misses", type=int, default=3, metavar="N", help="misses measured")
    parser.add_argument(
        "--hits", type=int, default=3, metavar="N", help="hits measured after each miss"
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="of each engine (default: as `dualpath serve`)"
    )
    parser.add_argument(
        "--paths",
        nargs="*",
        choices=_PATHS,
        default=list(_PATHS),
        help="read paths; misses are measured with the first",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help="where a directory for model and store is made, removed at the end (default: the cache "
        "directory)",
    )


def run(args: argparse.Namespace, progress: Progress) -> BenchResult:
    """Figures `ttft_gain`, `ttft_hit_ms`, `ttft_miss_ms`, and what is behind them. Times in ms."""
    require_openai()
    for flag in ("misses", "hits", "new_tokens"):
        if getattr(args, flag) < 1:
            raise ConfigError(f"--{flag.replace('_', '-')}: expected a whole number >= 1")
    if args.stored_tokens < _BLOCK_TOKENS or args.stored_tokens % _BLOCK_TOKENS:
        raise ConfigError(f"--stored-tokens: expected a multiple of {_BLOCK_TOKENS}")
    parent: Path = args.directory or cache_directory()
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-ttft-", dir=parent) as name:
        place = _Place(Path(name), args)
        progress(f"making a model of the shape {args.shape}")
        place.model.mkdir()
        write_random_model(_SHAPES[args.shape], place.model)
        direct_io = place.direct_io()
        paths = list(dict.fromkeys(args.paths)) or [_PATHS[0]]
        measured = {path: _measure(place, path, path == paths[0], progress) for path in paths}
    return _result(args, measured, direct_io)


@dataclass(slots=True)
class _Measured:
    """What one server gave: seconds at the client, and the parts that the server tells of hits."""

    hits: list[Completion] = field(default_factory=list)
    misses: list[Completion] = field(default_factory=list)


class _Place:
    """The directory of the run, and how servers are started in it."""

    def __init__(self, directory: Path, args: argparse.Namespace) -> None:
        self.args = args
        self.model = directory / "model"
        self.store = directory / "store"
        self.log = directory / "server.log"
        stored: int = args.stored_tokens
        self.prompt = random.Random(0).choices(range(_BYTE_TOKENS), k=stored)
        self._serial = itertools.count(1)

    def server(self, path: str) -> ServeProcess:
        arguments = [
            str(self.model),
            *("--served-model-name", NAME),
            *("--dtype", self.args.dtype),
            *("--store", str(self.store)),
            *("--store-timeout-s", "60"),
            *("--block-tokens", str(_BLOCK_TOKENS)),
            *("--read-path", path),
        ]
        if self.args.threads is not None:
            arguments += ["--threads", str(self.args.threads)]
        return ServeProcess(arguments, self.log)

    def direct_io(self) -> bool:
        """Whether the store reads and writes past the page cache there."""
        config = ServeConfig(
            model=str(self.model), dtype=Dtype(self.args.dtype), block_tokens=_BLOCK_TOKENS
        )
        facts = describe_model(config)
        store = open_store(str(self.store), facts.fingerprint, facts.layout)
        try:
            return store.capabilities.direct_io
        finally:
            store.close()

    def turn(self) -> list[int]:
        """The stored tokens and new ones of its own."""
        new = random.Random(next(self._serial)).choices(range(_BYTE_TOKENS), k=self.args.new_tokens)
        return [*self.prompt, *new]

    def drop_page_cache(self) -> None:
        for file in self.store.rglob("*.kv"):
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def _measure(place: _Place, path: str, first: bool, progress: Progress) -> _Measured:
    progress(f"starting a server that reads through: {path}")
    with place.server(path) as server:
        return asyncio.run(_talk(place, server.base_url, path, first, progress))


async def _talk(
    place: _Place, base_url: str, path: str, first: bool, progress: Progress
) -> _Measured:
    measured = _Measured()
    async with connect(base_url) as client:
        session = _Session(place, base_url, client)
        if not first:
            await session.hit()  # Warms up: the first request of a size allocates its buffers.
        for turn in range(place.args.misses if first else 1):
            if first:
                measured.misses.append(await session.miss(salted=turn > 0))
                progress(f"miss: {measured.misses[-1].ttft_s:.2f} s")
            for _ in range(place.args.hits):
                measured.hits.append(await session.hit())
                progress(f"hit, {path}: {measured.hits[-1].ttft_s:.3f} s")
    return measured


class _Session:
    """Requests one at a time, each after what the one before wrote."""

    def __init__(self, place: _Place, base_url: str, client: openai.AsyncOpenAI) -> None:
        self._place = place
        self._base_url = base_url
        self._client = client

    async def hit(self) -> Completion:
        self._place.drop_page_cache()
        return await self._request(self._place.turn(), None, cached=len(self._place.prompt))

    async def miss(self, *, salted: bool) -> Completion:
        """Without a salt only while nothing is stored."""
        salt = secrets.token_hex(16) if salted else None
        return await self._request(self._place.turn(), salt, cached=0)

    async def _request(self, prompt: list[int], salt: str | None, *, cached: int) -> Completion:
        before = await self._stored_blocks()
        done = await complete(self._client, NAME, prompt, max_tokens=_MAX_TOKENS, cache_salt=salt)
        if done.cached_tokens != cached:
            raise RequestFailed(
                f"{done.cached_tokens} of {len(prompt)} tokens came from the store, expected {cached}"
            )
        # The last generated token has no KV yet.
        sequence = len(prompt) + _MAX_TOKENS - 1
        await self._wait_for_blocks(before + (sequence - cached) // _BLOCK_TOKENS)
        return done

    async def _wait_for_blocks(self, expected: int) -> None:
        until = time.monotonic() + _STORE_DEADLINE_S
        while (stored := await self._stored_blocks()) < expected:
            if time.monotonic() > until:
                raise RequestFailed(
                    f"{stored} blocks were stored after {_STORE_DEADLINE_S:g} s, expected {expected}"
                )
            await asyncio.sleep(_POLL_S)

    async def _stored_blocks(self) -> int:
        metrics = await read_metrics(self._base_url)
        return int(metrics["dualpath:store_blocks"])


def _result(
    args: argparse.Namespace, measured: Mapping[str, _Measured], direct_io: bool
) -> BenchResult:
    first = next(iter(measured.values()))
    hit_s = statistics.median([each.ttft_s for each in first.hits])
    miss_s = statistics.median([each.ttft_s for each in first.misses])
    parts = first.hits[0].timings
    figures: dict[str, Figure] = {
        "ttft_gain": round(miss_s / hit_s, 2),
        "ttft_hit_ms": _ms(hit_s),
        "ttft_miss_ms": _ms(miss_s),
        "ttft_hit_ms_by_path": {
            path: _ms(statistics.median([each.ttft_s for each in one.hits]))
            for path, one in measured.items()
        },
        "hit_parts_ms": {
            part.removesuffix("_s"): _ms(
                statistics.median([each.timings[part] for each in first.hits])
            )
            for part in parts
        },
        "ttft_hits_ms": [_ms(each.ttft_s) for each in first.hits],
        "ttft_misses_ms": [_ms(each.ttft_s) for each in first.misses],
    }
    setup: dict[str, Figure] = {
        "shape": args.shape,
        "weights": "random",
        "dtype": args.dtype,
        "stored_tokens": args.stored_tokens,
        "new_tokens": args.new_tokens,
        "threads": args.threads or "as serve",
        "engines": "1P1D",
        "read_path": next(iter(measured)),
        "direct_io": direct_io,
        "page_cache": "block files dropped before each hit",
    }
    return BenchResult(NAME, figures, setup)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)
