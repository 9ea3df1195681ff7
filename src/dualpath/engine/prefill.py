"""Layerwise prefill: the KV of two layers of a batch on the device, whatever the model's depth
(paper, section on layerwise prefill).

While layer i computes, loads of layer i + 1 are under way and layer i - 1 is handed over. A load of layer
i + 2 starts as soon as the attention of layer i, which read the same memory, is over. Hand-over has a
thread of its own; loads have none here: a `LayerSource` starts one and gives a future, so that the
loads of all requests of a layer are in flight together, and a source that only copies memory may
do so at once (a thread would cost more than the copy).

Failure isolation: a request whose load or hand-over fails, or that is abandoned, gets its error in its
result; its cached rows are zeros from then on and the others' tokens are right.
This module knows neither schedulers nor transports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dualpath.base.errors import DeadlineExceeded, DualPathError, InvariantViolation
from dualpath.base.kv_threads import kv_executor
from dualpath.engine.buffers import RESIDENT_LAYERS, LayerBuffers, layer_buffers
from dualpath.engine.forward import forward_packed
from dualpath.engine.model import LoadedModel
from dualpath.engine.packed import PackedBatch, PackedKV
from dualpath.kv.layout import KVLayout

__all__ = ["ChunkResult", "LayerSink", "LayerSource", "LayerwisePrefill", "PrefillChunk"]

_CAPACITY_STEP_TOKENS = 256
_LOAD_DEADLINE_S = 120.0


class LayerSource(Protocol):
    """Where the cached rows of one request come from."""

    def start_load(self, layer: int, into: memoryview) -> Future[int]:
        """Fill `into`, the rows `[cached_tokens, row_bytes]` of this layer, writable and flat.

        The future is done only when nothing can touch `into` any more, and by a deadline of the
        source's own; it, or this call, raises DualPathError when the rows did not arrive.
        """


class LayerSink(Protocol):
    """Where the new rows of one request go."""

    def hand_over(self, layer: int, first_token: int, rows: memoryview) -> None:
        """Take the rows `[new_tokens, row_bytes]` of tokens from `first_token` on; valid in the call.

        Called once a layer, in order, from the hand-over thread. Raises DualPathError when the
        request cannot go on.
        """


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """What to compute of one request: `token_ids` at positions from `cached_tokens` on.

    `name` is for messages. `needs_logits`: it ends with the prompt's last token. `abandoned` is asked
    once a layer; when true, the chunk's loads and hand-overs stop.
    """

    name: str
    token_ids: Sequence[int]
    cached_tokens: int
    source: LayerSource
    sink: LayerSink
    needs_logits: bool = True
    abandoned: Callable[[], bool] = _never


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """How one chunk ended. Without error and not abandoned: every layer was handed over.

    `logits` `[vocabulary]` of the last token, raw, if asked for. `load_wait_s`: time computing stood
    still for this chunk's loads; `late_loads` of its `loads` had not ended when their layer's turn
    came. `compute_s` and `attention_s` (CPU) are the whole batch's.
    """

    name: str
    logits: npt.NDArray[np.float32] | None
    error: DualPathError | None
    abandoned: bool
    load_wait_s: float
    loads: int
    late_loads: int
    compute_s: float
    attention_s: float


@dataclass(slots=True, eq=False)
class _Work:
    """One chunk of the running batch: its rows are `[start, start + cached + new)` of each half."""

    chunk: PrefillChunk
    start: int
    loads: dict[int, Future[int]] = field(default_factory=dict)
    error: DualPathError | None = None
    abandoned: bool = False
    load_wait_s: float = 0.0
    loads_ended: int = 0
    late_loads: int = 0

    @property
    def live(self) -> bool:
        return self.error is None and not self.abandoned

    @property
    def cached_stop(self) -> int:
        return self.start + self.chunk.cached_tokens

    @property
    def stop(self) -> int:
        return self.cached_stop + len(self.chunk.token_ids)


class _NothingLeft(Exception):
    """Every chunk of the batch failed or was abandoned: ends the forward pass."""


class _Pipeline(PackedKV):
    """Drives loads, stores and hand-overs from the model's own calls, layer by layer."""

    def __init__(
        self,
        works: Sequence[_Work],
        layout: KVLayout,
        buffers: LayerBuffers,
        hand_overs: ThreadPoolExecutor,
        deadline_s: float,
    ) -> None:
        batch = PackedBatch.of(
            [w.chunk.cached_tokens for w in works], [len(w.chunk.token_ids) for w in works]
        )
        super().__init__(batch, layout)
        self._works = works
        self._buffers = buffers
        self._executor = hand_overs
        self._hand_overs: dict[int, Future[None]] = {}
        self._deadline_s = deadline_s

    def start_loads(self, layer: int) -> None:
        if layer >= self.layout.n_layers:
            return
        self._buffers.before_load(layer)
        for work in self._works:
            if not work.chunk.cached_tokens or not work.live:
                continue
            into = self._buffers.host_rows(layer, work.start, work.cached_stop)
            try:
                work.loads[layer] = work.chunk.source.start_load(layer, into)
            except DualPathError as error:
                work.error = error

    def store(self, layer: int, first: Tensor, second: Tensor) -> None:
        for work in self._works:
            self._finish_load(layer, work)
        if not any(work.live for work in self._works):
            raise _NothingLeft
        self._finish_hand_over(layer - RESIDENT_LAYERS)
        first_part, second_part = self.layout.parts
        columns = first_part.heads * first_part.dim
        keys, values = first[0].transpose(0, 1), second[0].transpose(0, 1)
        for work, segment in zip(self._works, self.batch.segments, strict=True):
            rows = self._buffers.rows(layer, work.cached_stop, work.stop)
            new = slice(segment.start, segment.stop)
            rows[:, :columns].view(-1, first_part.heads, first_part.dim).copy_(keys[new])
            rows[:, columns:].view(-1, second_part.heads, second_part.dim).copy_(values[new])
            self._buffers.computed(layer, work.cached_stop, work.stop)
        self._hand_overs[layer] = self._executor.submit(self._hand_over, layer)

    def rows(self, layer: int, index: int) -> Tensor:
        work = self._works[index]
        return self._buffers.rows(layer, work.start, work.stop)

    def attended(self, layer: int) -> None:
        self.start_loads(layer + RESIDENT_LAYERS)

    def _finish_load(self, layer: int, work: _Work) -> None:
        if not work.chunk.cached_tokens:
            work.abandoned = work.abandoned or work.chunk.abandoned()
            return
        load = work.loads.get(layer)
        if work.live and load is not None:
            started = time.perf_counter()
            work.late_loads += not load.done()
            work.loads_ended += 1
            try:
                load.result(timeout=self._deadline_s)
            except TimeoutError:
                work.error = DeadlineExceeded(
                    f"{work.chunk.name}: layer {layer} was not loaded in {self._deadline_s} s"
                )
            except DualPathError as error:
                work.error = error
            else:
                del work.loads[layer]
            work.load_wait_s += time.perf_counter() - started
            work.abandoned = work.chunk.abandoned()
        if work.live:
            self._buffers.loaded(layer, work.start, work.cached_stop)
        else:
            self._buffers.rows(layer, work.start, work.cached_stop).zero_()

    def _hand_over(self, layer: int) -> None:
        self._buffers.wait_computed(layer)
        for work in self._works:
            if work.live:
                rows = self._buffers.host_rows(layer, work.cached_stop, work.stop)
                try:
                    work.chunk.sink.hand_over(layer, work.chunk.cached_tokens, rows)
                except DualPathError as error:
                    work.error = error

    def _finish_hand_over(self, layer: int) -> None:
        future = self._hand_overs.pop(layer, None)
        if future is None:
            return
        try:
            future.result(timeout=self._deadline_s)
        except TimeoutError as error:
            raise InvariantViolation(
                f"layer {layer} was not handed over in {self._deadline_s} s"
            ) from error

    def drain(self) -> bool:
        """End everything under way. False: a load did not end, its memory must not be used again."""
        for layer in list(self._hand_overs):
            self._finish_hand_over(layer)
        pending = [load for work in self._works for load in work.loads.values()]
        until = time.monotonic() + self._deadline_s
        for load in pending:
            try:
                load.exception(timeout=max(0.0, until - time.monotonic()))
            except TimeoutError:
                return False
        return True


class LayerwisePrefill:
    """Runs prefill batches of one model. One thread at a time; a context manager.

    Owns the double buffer, which grows to the largest batch seen (`peak_kv_bytes`, on the device).
    """

    def __init__(self, loaded: LoadedModel, *, load_deadline_s: float = _LOAD_DEADLINE_S) -> None:
        self._loaded = loaded
        self._deadline_s = load_deadline_s
        self._buffers: LayerBuffers | None = None
        self._executor = kv_executor(1, name="hand-over")
        self.peak_kv_bytes = 0

    def run(self, chunks: Sequence[PrefillChunk]) -> list[ChunkResult]:
        """Compute a batch; results in the order of `chunks`, after every hand-over has ended.

        Raises only for bugs (of ours, of a source or of a sink): what concerns one request is in
        its result.
        """
        if not chunks:
            return []
        works: list[_Work] = []
        start = 0
        for chunk in chunks:
            works.append(_Work(chunk, start))
            start = works[-1].stop
        pipeline = _Pipeline(
            works, self._loaded.layout, self._room_for(start), self._executor, self._deadline_s
        )
        started = time.perf_counter()
        rows = self._forward(pipeline, works)
        wall_s = time.perf_counter() - started
        waited_s = sum(work.load_wait_s for work in works)
        return [
            ChunkResult(
                name=work.chunk.name,
                logits=rows.get(i) if work.live else None,
                error=work.error,
                abandoned=work.abandoned,
                load_wait_s=work.load_wait_s,
                loads=work.loads_ended,
                late_loads=work.late_loads,
                compute_s=wall_s - waited_s,
                attention_s=pipeline.attention_s,
            )
            for i, work in enumerate(works)
        ]

    def _forward(
        self, pipeline: _Pipeline, works: Sequence[_Work]
    ) -> dict[int, npt.NDArray[np.float32]]:
        wanted = [i for i, work in enumerate(works) if work.chunk.needs_logits]
        tokens = [token for work in works for token in work.chunk.token_ids]
        quiet = False
        try:
            for layer in range(RESIDENT_LAYERS):
                pipeline.start_loads(layer)
            logits = forward_packed(self._loaded.model, tokens, pipeline, wanted).cpu().numpy()
        except _NothingLeft:
            return {}
        finally:
            try:
                quiet = pipeline.drain()
            finally:
                if not quiet:
                    self._buffers = None
        return dict(zip(wanted, logits, strict=True))

    def _room_for(self, tokens: int) -> LayerBuffers:
        if self._buffers is None or self._buffers.tokens < tokens:
            self._buffers = None  # Free the smaller one first.
            capacity = -(-tokens // _CAPACITY_STEP_TOKENS) * _CAPACITY_STEP_TOKENS
            self._buffers = layer_buffers(self._loaded.layout, capacity, self._loaded.device)
        self.peak_kv_bytes = max(self.peak_kv_bytes, self._buffers.device_bytes)
        return self._buffers

    def close(self) -> None:
        """End the hand-over thread and free the buffer. Idempotent."""
        self._executor.shutdown(wait=True)
        self._buffers = None

    def __enter__(self) -> LayerwisePrefill:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
