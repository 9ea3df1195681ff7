"""Stock vLLM with the plug-in, on the CPU: hits, recomputed tokens, and the time to the first token.

Real servers in processes of their own, of the vLLM that `--python` has: a prefill and a decode server with
the connector over one store, and a plain one, whose tokens are the right ones (fp32, greedy). The prefill
server caches nothing itself, so each hit that vLLM reports was read from the store.

1. Sessions are played turn by turn: `hit_rate` is what vLLM reports as cached of all prompt tokens,
   `wrong_tokens` how many tokens differ from the plain server's. Text becomes tokens by a hash of every four
   characters, which keeps what prompts share.
2. A prompt that is stored whole is asked for again: `recomputed_tokens` are those that vLLM computed, at
   most, by either server.
3. Time to the first token of a long prompt, unstored and stored, on the pair; and on one server alone,
   beside vLLM's own ExampleConnector (disk), which gets steps long enough for the whole prompt, as it cannot
   do chunks.

4. Clients that leave, a store that spoils, and servers that are killed (`vllm_faults`): `leaks`,
   `lost_requests`, and more of `wrong_tokens`.
5. Nine requests at once under a compute quota (`vllm_quota`): `quota_violations`.

Misses and hits alternate, and medians are compared, because machines drift. Before a hit of 3. on one server
the kernel is told to drop what it holds of the stored files: what is measured is the disk's hit.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from dualpath.base.errors import ConfigError
from dualpath.bench.harness import BenchResult, Figure, Progress
from dualpath.bench.vllm_faults import FaultRun, measure_faults
from dualpath.bench.vllm_quota import measure_quota
from dualpath.bench.vllm_server import BLOCK_TOKENS, VllmPair, VllmServer
from dualpath.engine.tiny import write_random_model
from dualpath.traces import Session, TextPrompt, open_trace

__all__ = ["HELP", "NAME", "NEEDS", "add_arguments", "run"]

NAME = "vllm"
HELP = "stock vLLM with the plug-in: hits, time to the first token, wrong tokens, leaks"
NEEDS = "an interpreter that has vLLM and dualpath (--python)"

_MODEL = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "initializer_range": 0.04,
}
"""Six of the thirty layers of SmolLM2-135M."""
_CHARACTERS = 4
_VOCABULARY = 250
_SETTLE_S = 60.0
_HITS_A_ROUND = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--python", default=sys.executable, metavar="PATH", help="an interpreter that has vLLM"
    )
    parser.add_argument(
        "--sessions",
        nargs="*",
        default=["miniswe"],
        metavar="TRACE",
        help="recorded sessions with their text; none: left out (%(default)s)",
    )
    parser.add_argument(
        "--turns", type=int, default=30, metavar="N", help="of each session, at most"
    )
    parser.add_argument(
        "--stored-tokens", type=int, default=8192, metavar="N", help="length of the long prompt"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of misses and hits")
    parser.add_argument(
        "--aborts", type=int, default=200, metavar="N", help="clients that leave, at least"
    )
    parser.add_argument("--seed", type=int, default=0, help="of requests, aborts and store faults")


def run(args: argparse.Namespace, progress: Progress) -> BenchResult:
    if args.rounds < 1 or args.turns < 1 or args.stored_tokens < 2 * BLOCK_TOKENS:
        raise ConfigError(f"needs a round, a turn, and a prompt of {2 * BLOCK_TOKENS} tokens")
    with tempfile.TemporaryDirectory() as directory:
        bed = _Bed(args.python, Path(directory), args.stored_tokens)
        write_random_model(_MODEL, bed.model)
        paired = _on_the_pair(bed, args, progress)
        beside = _beside_example_connector(bed, args, progress)
        faults = measure_faults(
            FaultRun(args.python, args.aborts, args.seed), bed.directory / "faults", progress
        )
        progress("nine requests at once under a compute quota")
        quota = measure_quota(args.python, bed.model)
    figures: dict[str, Figure] = {
        **paired,
        **beside,
        **faults,
        "wrong_tokens": paired.get("wrong_tokens", 0) + faults["wrong_tokens"],
        "quota_violations": quota.violations,
        "quota_steps": quota.steps,
        "quota_largest_share": quota.largest_share,
    }
    setup: dict[str, Figure] = {
        "stored_tokens": args.stored_tokens,
        "turns": args.turns,
        "seed": args.seed,
    }
    return BenchResult(NAME, figures, setup)


@dataclass(frozen=True, slots=True)
class _Bed:
    """What all servers of a run share."""

    python: str
    directory: Path
    stored_tokens: int

    @property
    def model(self) -> Path:
        return self.directory / "model"

    def server(self, name: str, *arguments: str, store: bool = True) -> VllmServer:
        connector = {"store": str(self.directory / "store"), "buffer_bytes": 768 << 20}
        length = str(max(32768, self.stored_tokens + 1024))
        return VllmServer(
            self.model,
            self.directory / f"{name}.log",
            connector=connector if store else None,
            kv_bytes=1 << 30,
            arguments=("--max-model-len", length, *arguments),
            python=self.python,
        )


def _on_the_pair(bed: _Bed, args: argparse.Namespace, progress: Progress) -> dict[str, float]:
    with ExitStack() as stack:
        made = (
            bed.server("plain", store=False),
            bed.server("pe", "--no-enable-prefix-caching"),
            bed.server("de"),
        )
        for server in made:
            stack.callback(server.stop)
        progress("starting a plain, a prefill and a decode server")
        plain, pe, de = (server.wait_ready() for server in made)
        pair = VllmPair(pe, de)
        figures: dict[str, float] = {}
        if args.sessions:
            figures |= _sessions(pair, plain, args, progress)
        return figures | _times(pair, args, progress)


def _sessions(
    pair: VllmPair, plain: VllmServer, args: argparse.Namespace, progress: Progress
) -> dict[str, float]:
    prompt_tokens = cached_tokens = wrong_tokens = turns = 0
    sessions: list[Session] = []
    for path in args.sessions:
        sessions += open_trace(path).sessions
    for session in sessions:
        stored = 0
        for prompt in _prompts(session, args.turns):
            first, answer = pair.complete(prompt, 8, hit_tokens=stored, pe_tokens=_half(stored))
            want = plain.complete(prompt, 8)
            wrong_tokens += sum(a != b for a, b in zip(answer.tokens, want.tokens, strict=True))
            prompt_tokens += len(prompt)
            cached_tokens += first.cached
            stored = len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS
            turns += 1
            _settle(pair.pe, pair.de)
        progress(f"session {session.id}: {cached_tokens} of {prompt_tokens} tokens so far")
    return {
        "hit_rate": round(cached_tokens / prompt_tokens, 4),
        "wrong_tokens": wrong_tokens,
        "session_turns": turns,
        "prompt_tokens": prompt_tokens,
    }


def _times(pair: VllmPair, args: argparse.Namespace, progress: Progress) -> dict[str, float]:
    misses: list[float] = []
    hits: list[float] = []
    recomputed = 0
    for number in range(args.rounds):
        prompt = _random_prompt(number, args.stored_tokens)
        misses.append(_timed(pair, prompt, 0))
        _settle(pair.pe, pair.de)
        stored = len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS
        start = time.monotonic()
        first, answer = pair.complete(prompt, 1, hit_tokens=stored, pe_tokens=_half(stored))
        hits.append(time.monotonic() - start)
        recomputed = max(recomputed, len(prompt) - first.cached, len(prompt) - answer.cached)
        progress(f"miss {misses[-1]:.2f} s, hit {hits[-1]:.2f} s")
    miss_s, hit_s = statistics.median(misses), statistics.median(hits)
    return {
        "ttft_miss_s": round(miss_s, 3),
        "ttft_hit_s": round(hit_s, 3),
        "ttft_gain": round(miss_s / hit_s, 2),
        "recomputed_tokens": recomputed,
    }


def _beside_example_connector(
    bed: _Bed, args: argparse.Namespace, progress: Progress
) -> dict[str, Figure]:
    """One server with ours and one with vLLM's own connector to a disk, in turn."""
    config = (
        '{"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": '
        f'{{"shared_storage_path": "{bed.directory / "example"}"}}}}'
    )
    uncached = "--no-enable-prefix-caching"
    batch = ("--max-num-batched-tokens", str(args.stored_tokens + BLOCK_TOKENS))
    progress("starting a server with ExampleConnector, and one with ours")
    with ExitStack() as stack:
        servers = {
            "example": bed.server(
                "example", uncached, *batch, "--kv-transfer-config", config, store=False
            ),
            "alone": bed.server("alone", uncached, *batch),
        }
        for server in servers.values():
            stack.callback(server.stop)
        prompt = _random_prompt(args.rounds, args.stored_tokens)
        for server in servers.values():
            server.wait_ready().complete(prompt, 1)
        _settle(servers["alone"])  # The other one has written when it answers.
        times: dict[str, list[float]] = {name: [] for name in servers}
        order = list(servers)
        for _ in range(_HITS_A_ROUND * args.rounds):
            for name in order:
                _drop_cached(bed.directory)
                start = time.monotonic()
                servers[name].complete(prompt, 1)
                times[name].append(time.monotonic() - start)
            order.reverse()  # The first of a round finds another machine than the second.
        hit_s = {name: statistics.median(each) for name, each in times.items()}
        progress(f"hits: {hit_s['alone']:.2f} s, ExampleConnector {hit_s['example']:.2f} s")
    return {
        "alone_hit_s": round(hit_s["alone"], 3),
        "example_hit_s": round(hit_s["example"], 3),
        "peer_gain": round(hit_s["example"] / hit_s["alone"], 2),
    }


def _timed(pair: VllmPair, prompt: list[int], stored: int) -> float:
    start = time.monotonic()
    pair.complete(prompt, 1, hit_tokens=stored, pe_tokens=_half(stored))
    return time.monotonic() - start


def _settle(*servers: VllmServer) -> None:
    """Wait until all that was saved is durable. A step of the engine reports it."""
    until_s = time.monotonic() + _SETTLE_S
    for server in servers:
        before = -1.0
        while time.monotonic() < until_s:
            server.complete([1, 2, 3], 2)
            written = server.metric("vllm:dualpath_written_blocks_total")
            if written == before:
                break
            before = written
            time.sleep(0.2)


def _drop_cached(directory: Path) -> None:
    """Have the kernel forget what it holds of these files, so that a hit is read from the disk."""
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_relative_to(directory / "model"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _half(tokens: int) -> int:
    return tokens // 2 // BLOCK_TOKENS * BLOCK_TOKENS


def _random_prompt(seed: int, n_tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(_VOCABULARY) for _ in range(n_tokens)]


def _prompts(session: Session, turns: int) -> Iterator[list[int]]:
    for turn in session.turns[:turns]:
        if not isinstance(turn.prompt, TextPrompt):
            raise ConfigError(f"session {session.id} has no text: give sessions with full text")
        text = turn.prompt.text
        yield [
            zlib.crc32(text[start : start + _CHARACTERS].encode()) % _VOCABULARY
            for start in range(0, len(text), _CHARACTERS)
        ]
