"""A worker's step around a forward pass, with real tensors and a real agent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from vllm_kit import SIZE, Rig, rig, tokens_of

from dualpath.base.errors import UnsupportedModel
from dualpath.testing import MemoryDevice, wait_until
from dualpath.vllm.kv_tensors import KvTensors
from dualpath.vllm.orders import LoadOrder, SaveOrder, Staged, StageOrder, StepOrders
from dualpath.vllm.worker_side import WorkerSide

N_BLOCKS = 12
LAYERS = ("l0", "l1")


@dataclass
class Worker:
    rig: Rig
    caches: dict[str, torch.Tensor]
    side: WorkerSide

    def step(self, orders: StepOrders, layers: tuple[str, ...] = LAYERS) -> None:
        self.side.begin(orders)
        for layer in layers:
            self.side.layer_starts(layer)
            self.side.layer_ends(layer)
        self.side.end()

    def staged(self, tokens: tuple[int, ...], serial: int) -> Staged:
        self.step(StepOrders(stages=(StageOrder("a", serial, tokens, 0, "", None),)), ())
        reports: list[Staged] = []

        def ended() -> bool:
            reports.extend(self.side.report().staged)
            return bool(reports)

        wait_until(ended, "staged")
        return reports[0]

    def save(self, tokens: tuple[int, ...], ids: tuple[int, ...], **fields: object) -> SaveOrder:
        stop = len(ids) * SIZE
        order = SaveOrder("w", 0, ids, 0, tokens[:stop], "", stop, True, None)
        return SaveOrder(**{n: fields.get(n, getattr(order, n)) for n in order.__slots__})


@pytest.fixture
def worker() -> Iterator[Worker]:
    torch.manual_seed(1)
    caches = {name: torch.randn(N_BLOCKS, 2, SIZE, 64) for name in LAYERS}
    with rig(MemoryDevice()) as made:
        tensors = KvTensors(caches, N_BLOCKS)
        tensors.use(made.pool)
        yield Worker(made, caches, WorkerSide(made.agent, tensors, SIZE))
        tensors.close()


def blocks(worker: Worker, ids: tuple[int, ...]) -> list[torch.Tensor]:
    return [worker.caches[name][list(ids)].clone() for name in LAYERS]


def written(worker: Worker, n_blocks: int) -> None:
    wait_until(lambda: worker.rig.agent.stats.written_blocks == n_blocks, "written")


def test_saved_blocks_come_back_in_other_places(worker: Worker) -> None:
    tokens = tokens_of(1, 14)
    kept = blocks(worker, (5, 2, 7))
    worker.step(StepOrders(saves=(worker.save(tokens, (5, 2, 7)),)))
    written(worker, 3)
    for cache in worker.caches.values():
        cache.zero_()
    staged = worker.staged(tokens, 1)
    assert staged.tokens == 12
    worker.step(StepOrders(loads=(LoadOrder("a", 1, 0, 12, (9, 0, 4)),)))
    assert all(map(torch.equal, blocks(worker, (9, 0, 4)), kept))
    assert worker.side.take_failed_blocks() == set()
    worker.step(StepOrders(ended=("a", "w")), ())
    worker.rig.wait_free()


def test_a_staging_that_is_gone_is_reported(worker: Worker) -> None:
    """And nothing that the step computed is saved: it may have read those blocks."""
    save = worker.save(tokens_of(1, 8), (1, 2))
    worker.step(StepOrders(loads=(LoadOrder("a", 1, 0, 8, (3, 4)),), saves=(save,)))
    assert worker.side.take_failed_blocks() == {3, 4}
    assert worker.side.take_failed_blocks() == set()
    worker.step(StepOrders(ended=("w",)), ())
    worker.rig.wait_free()
    assert worker.rig.agent.stats.saved_blocks == 0


def test_a_layer_that_was_not_announced(worker: Worker) -> None:
    """Its blocks were not loaded; a save makes up for it."""
    tokens = tokens_of(1, 14)
    worker.step(StepOrders(saves=(worker.save(tokens, (5, 2, 7)),)), ("l1",))
    written(worker, 3)
    kept = blocks(worker, (5, 2, 7))
    assert worker.staged(tokens, 1).tokens == 12
    worker.step(StepOrders(loads=(LoadOrder("a", 1, 0, 12, (9, 0, 4)),)), ("l1",))
    assert worker.side.take_failed_blocks() == {9, 0, 4}
    assert worker.staged(tokens, 2).tokens == 12
    worker.step(StepOrders(loads=(LoadOrder("a", 2, 0, 12, (9, 0, 4)),)))
    assert all(map(torch.equal, blocks(worker, (9, 0, 4)), kept))


def test_late_saves_are_made_before_the_step(worker: Worker) -> None:
    tokens = tokens_of(1, 8)
    kept = blocks(worker, (5, 2))
    worker.side.begin(StepOrders(saves=(worker.save(tokens, (5, 2), late=True),), ended=("w",)))
    for cache in worker.caches.values():
        cache.zero_()
    worker.side.end()
    assert worker.side.take_sent() == {"w"}
    assert worker.side.take_sent() == set()
    written(worker, 2)
    worker.staged((*tokens, 1), 1)
    worker.step(StepOrders(loads=(LoadOrder("a", 1, 0, 8, (9, 0)),)))
    assert all(map(torch.equal, blocks(worker, (9, 0)), kept))


@pytest.mark.parametrize(
    "shape", [(6, 2, 4, 8), (2, 6, 4, 8), (12, 2, 2, 8), (2, 18, 4, 4)], ids=str
)
def test_any_shape_of_cache(shape: tuple[int, ...]) -> None:
    """Blocks first or second, or cut in several of the kernel's."""
    from dualpath.kv import BufferPool

    cache = torch.randn(*shape)
    tensors = KvTensors({"l": cache}, 6)
    (size,) = tensors.block_bytes
    assert size * 6 == cache.numel() * 4
    pool = BufferPool(4, 4096)
    tensors.use(pool)
    before = cache.clone()
    tensors.save("l", (3, 1), (4, 2))
    cache.zero_()
    tensors.load("l", (3, 1), (4, 2))
    kept = int((cache != 0).sum())
    assert kept == 2 * size // 4
    assert torch.equal(cache[cache != 0], before[cache != 0])
    tensors.close()
    pool.close()


def test_layers_that_share_a_cache_count_once() -> None:
    cache = torch.zeros(6, 2, 4, 8)
    assert KvTensors({"a": cache, "b": cache}, 6).names() == ["a"]


def test_a_cache_without_blocks_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="no dimension"):
        KvTensors({"a": torch.zeros(5, 3, 4, 8)}, 6)
