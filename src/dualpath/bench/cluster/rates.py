"""What computing takes here: the model's prefill batches and decode steps, alone and beside others.

Processes like engine processes, each with a copy of the model, compute the same shapes at the same time: one,
then two, and so on. Nothing is read, transferred or served. A shared machine is faster and slower by the
minute, so rounds of this are taken at several times, best between the runs that are to be predicted, and
`fit_rates`, which is pure, goes by their medians.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import TypeAlias

from dualpath.bench.cluster.workload import Shape
from dualpath.engine.decode import DecodeEngine
from dualpath.engine.model import LoadedModel, load_model
from dualpath.engine.model_source import ModelSpec
from dualpath.engine.prefill import LayerwisePrefill, PrefillChunk
from dualpath.engine.profile import fit_seconds
from dualpath.engine.sampling import SamplingParams
from dualpath.policy.quota import pairs
from dualpath.sim.testbed import ComputeRates

__all__ = ["MeasuredShapes", "RatesRound", "Seconds", "fit_rates", "measure_round", "model_spec"]

_REPEATS = 32
_LONGEST_S = 300.0


@dataclass(frozen=True, slots=True)
class MeasuredShapes:
    """`prefill`: (cached, new) tokens of one request; `decode`: (sequences, context tokens of each);
    `join_tokens`: of a prompt that joins the decode batch."""

    prefill: tuple[tuple[int, int], ...]
    decode: tuple[tuple[int, int], ...]
    join_tokens: int

    @classmethod
    def of(cls, shape: Shape, agents: int) -> MeasuredShapes:
        """Around what agents of this shape ask for."""
        context, append = shape.context_tokens, shape.append_tokens
        return cls(
            prefill=(
                (context, append),
                (context, 4 * append),
                (context // 2, append),
                (0, append),
                (0, 8 * append),
            ),
            decode=tuple(
                (batch, tokens)
                for batch in sorted({1, (agents + 1) // 2, agents})
                for tokens in (context, context // 2)
            ),
            join_tokens=context,
        )


@dataclass(frozen=True, slots=True)
class Seconds:
    """Means, one for each of `MeasuredShapes`."""

    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    join: float

    @property
    def all(self) -> tuple[float, ...]:
        return (*self.prefill, *self.decode, self.join)


def model_spec(model: str, *, threads: int, block_tokens: int) -> ModelSpec:
    """As the benchmark's engines load it. `model`: its name or directory."""
    return ModelSpec(
        model,
        dtype="float32",
        device="cpu",
        block_tokens=block_tokens,
        threads=threads,
        check=False,
    )


RatesRound: TypeAlias = Sequence[Sequence[Seconds]]
"""`[n]`: of each of n + 1 engines that computed at once."""


def measure_round(
    spec: ModelSpec, shapes: MeasuredShapes, *, engines: int, progress: Callable[[str], None]
) -> RatesRound:
    """One engine alone, then beside others, up to `engines` in all. Takes a minute."""
    found: list[list[Seconds]] = []
    for at_once in range(1, engines + 1):
        progress(f"measuring what computing takes with {at_once} engines at once")
        found.append(_measure_at_once(spec, shapes, at_once))
    return found


def fit_rates(shapes: MeasuredShapes, rounds: Sequence[RatesRound]) -> ComputeRates:
    """Costs are those of an engine that was alone. How much slower others make it is told within a round."""
    alone = [found[0][0] for found in rounds]
    prefill = fit_seconds(
        [[1.0, new, pairs(cached, new)] for cached, new in shapes.prefill],
        _medians(each.prefill for each in alone),
    )
    decode = fit_seconds(
        [[1.0, batch, batch * context] for batch, context in shapes.decode],
        _medians(each.decode for each in alone),
    )
    slowdown = _medians([_slower(group, found[0][0]) for group in found] for found in rounds)
    return ComputeRates(
        prefill_base_s=prefill[0],
        prefill_token_s=prefill[1],
        prefill_pair_s=prefill[2],
        decode_base_s=decode[0],
        decode_sequence_s=decode[1],
        decode_context_token_s=decode[2],
        join_token_s=statistics.median(each.join for each in alone) / shapes.join_tokens,
        # Noise must not make more of them faster.
        slowdown=tuple(itertools.accumulate(slowdown, max)),
    )


def _medians(rounds: Iterable[Sequence[float]]) -> list[float]:
    """Place by place."""
    return [statistics.median(place) for place in zip(*rounds, strict=True)]


def _slower(group: Sequence[Seconds], alone: Seconds) -> float:
    """The mean of all that computed at once, over all shapes."""
    return statistics.fmean(
        mine / its for each in group for mine, its in zip(each.all, alone.all, strict=True)
    )


def _measure_at_once(spec: ModelSpec, shapes: MeasuredShapes, count: int) -> list[Seconds]:
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(count, timeout=_LONGEST_S)
    with ProcessPoolExecutor(
        count, mp_context=context, initializer=_stand_by, initargs=(together,)
    ) as pool:
        # Each waits for all others, so no process gets two.
        waiting = [pool.submit(_measure, spec, shapes) for _ in range(count)]
        return [each.result() for each in waiting]


_together: Barrier


def _stand_by(together: Barrier) -> None:
    """In a new process, before it measures."""
    global _together
    _together = together


def _measure(spec: ModelSpec, shapes: MeasuredShapes) -> Seconds:
    loaded = load_model(spec)
    with LayerwisePrefill(loaded) as engine:
        prefill = [
            _mean(lambda each=each: _prefill(engine, *each))  # type: ignore[misc]
            for each in shapes.prefill
        ]
    decode = [_decode(loaded, *each) for each in shapes.decode]
    return Seconds(tuple(prefill), tuple(decode), _join(loaded, shapes.join_tokens))


def _mean(step: Callable[[], object]) -> float:
    """Repeated while all other processes repeat theirs. A median would not see how cores are shared, as most
    steps are shorter than a turn on a core."""
    step()
    _together.wait()
    started_s = time.perf_counter()
    for _ in range(_REPEATS):
        step()
    return (time.perf_counter() - started_s) / _REPEATS


class _NoKV:
    """Nothing is loaded or handed over."""

    def start_load(self, layer: int, into: memoryview) -> Future[int]:
        done: Future[int] = Future()
        done.set_result(0)
        return done

    def hand_over(self, layer: int, first_token: int, rows: memoryview) -> None:
        pass


def _prefill(engine: LayerwisePrefill, cached_tokens: int, new_tokens: int) -> None:
    nothing = _NoKV()
    chunk = PrefillChunk("rates", [1] * new_tokens, cached_tokens, nothing, nothing)
    engine.run([chunk])


def _decode(loaded: LoadedModel, batch: int, context_tokens: int) -> float:
    """Contexts are as long as they should be in the middle of the measurement."""
    first_tokens, last_tokens = context_tokens - _REPEATS // 2, context_tokens + _REPEATS
    engine = DecodeEngine(loaded, hbm_tokens=batch * last_tokens)
    for number in range(batch):
        _take_in(engine, str(number), first_tokens, last_tokens)
    return _mean(engine.step)


def _join(loaded: LoadedModel, tokens: int) -> float:
    engine = DecodeEngine(loaded, hbm_tokens=tokens + 16)

    def once() -> None:
        _take_in(engine, "joins", tokens, tokens + 16)
        engine.remove("joins")

    return _mean(once)


def _take_in(engine: DecodeEngine, name: str, tokens: int, room_tokens: int) -> None:
    engine.reserve(name, room_tokens)
    params = SamplingParams(temperature=0, ignore_eos=True)
    engine.join(name, [1] * (tokens + 1), None, params, prompt_tokens=tokens)
