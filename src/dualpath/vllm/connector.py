"""`DualPathConnector`: the KV connector of vLLM (V1), loaded by `kv_connector_module_path`.

    --kv-transfer-config '{"kv_connector": "DualPathConnector",
      "kv_connector_module_path": "dualpath.vllm.connector", "kv_role": "kv_both",
      "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"store": "/mnt/kv", "kv_port": 9000}}'

One class for both roles: in vLLM's scheduler it feeds a `RequestBook`, in a worker a `WorkerSide` and its
`KvAgent`. Here is only what translates between vLLM's calls and those."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.request import RequestStatus

from dualpath.base.errors import ConfigError, RequestError, UnsupportedModel
from dualpath.engine.model_source import ModelSpec, model_identity, resolve_model
from dualpath.kv import BufferPool, TrieIndex, is_root
from dualpath.store import Catalog, open_store
from dualpath.vllm.agent import KvAgent
from dualpath.vllm.agent_parts import AgentParts
from dualpath.vllm.block_format import BlockFacts, block_fingerprint, opaque_layout, tenant_salt
from dualpath.vllm.connector_stats import SLOTS_IN_USE, DualPathPromMetrics, DualPathStats
from dualpath.vllm.kv_tensors import KvTensors
from dualpath.vllm.orders import StepOrders, WorkerReport
from dualpath.vllm.params import decode_params
from dualpath.vllm.request_book import RequestBook, ScheduledPart
from dualpath.vllm.settings import ConnectorSettings, connector_settings
from dualpath.vllm.versions import check_parallelism, check_version
from dualpath.vllm.worker_side import WorkerSide

if TYPE_CHECKING:
    import torch

__all__ = ["DualPathConnector", "DualPathStepOrders", "DualPathWorkerReport"]

log = logging.getLogger(__name__)


def _log_as_vllm() -> None:
    """Our lines go where vLLM's go, in its form."""
    ours, theirs = logging.getLogger("dualpath"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), False
        ours.setLevel(theirs.level)


_log_as_vllm()

_ABORTED = {RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR}


@dataclass
class DualPathStepOrders(KVConnectorMetadata):
    """The orders of a step, in vLLM's envelope."""

    orders: StepOrders


@dataclass
class DualPathWorkerReport(KVConnectorWorkerMetadata):
    """A worker's report, in vLLM's envelope."""

    report: WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> DualPathWorkerReport:
        assert isinstance(other, DualPathWorkerReport)
        return DualPathWorkerReport(self.report.merged(other.report))


@dataclass
class _WorkerParts:
    side: WorkerSide
    agent: KvAgent
    tensors: KvTensors
    pool: BufferPool
    store: Any
    catalog: Catalog | None


class DualPathConnector(KVConnectorBase_V1):
    """See the module. Raises ConfigError, at vLLM's start, for settings that cannot work."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_version(vllm.__version__)
        self._settings = connector_settings(self._kv_transfer_config.kv_connector_extra_config)
        check_parallelism(vllm_config.parallel_config, has_peers=self._settings.kv_port is not None)
        self._cache_config = kv_cache_config
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise UnsupportedModel(
                f"this model has {len(groups)} KV cache groups (hybrid attention); the connector "
                f"serves models with one: run it without --kv-transfer-config"
            )
        self._block_tokens = int(groups[0].kv_cache_spec.block_size)
        self._book = RequestBook(
            self._block_tokens,
            ranks=vllm_config.parallel_config.tensor_parallel_size,
            has_store=bool(self._settings.store),
            own=self._settings.peer(),
        )
        self._block_ids: dict[str, list[int]] = {}
        self._stored_events: list[BlockStored] = []
        self._worker: _WorkerParts | None = None
        self._reported_in_use = 0

    # What vLLM asks of the class.

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True  # Layers are loaded and saved by Python between them.

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # What a peer did not get it computes.

    # In the scheduler.

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if request.request_id not in self._block_ids:
            self._arrived(request)
        return self._book.matched(request.request_id, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        ids = blocks.get_block_ids()[0]
        self._book.allocated(request.request_id, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> DualPathStepOrders:
        parts = []
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            ids = self._block_ids[new.req_id] = list(new.block_ids[0])
            parts.append(
                ScheduledPart(new.req_id, new.num_computed_tokens, scheduled[new.req_id], ids)
            )
        cached = scheduler_output.scheduled_cached_reqs
        for index, request in enumerate(cached.req_ids):
            ids = self._block_ids.setdefault(request, [])
            if request in cached.resumed_req_ids:
                ids.clear()
            ids += (cached.new_block_ids[index] or ((),))[0]
            parts.append(
                ScheduledPart(request, cached.num_computed_tokens[index], scheduled[request], ids)
            )
        return DualPathStepOrders(self._book.step(parts))

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, DualPathWorkerReport):
            self._book.reported(meta.report)
            self._note_stored(meta.report)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._block_ids.pop(request.request_id, None)
        ending = self._book.ended(
            request.request_id,
            block_ids,
            min(request.num_computed_tokens, len(block_ids) * self._block_tokens),
            aborted=request.status in _ABORTED,
        )
        return ending.keep_blocks, ending.answer

    def take_events(self) -> Iterable[BlockStored]:
        events, self._stored_events = self._stored_events, []
        return events

    def _arrived(self, request: Any) -> None:
        self._block_ids[request.request_id] = []
        if request.mm_features or request.prompt_token_ids is None:
            return  # Its KV depends on more than tokens.
        if request.prompt_embeds is not None or request.pooling_params is not None:
            return
        try:
            pair = decode_params(request.kv_transfer_params)
        except RequestError as error:
            log.warning("%s: %s", request.request_id, error)
            pair = None
        lora = request.lora_request
        adapter = f"{lora.lora_name} {lora.lora_path}" if lora is not None else None
        self._book.arrived(
            request.request_id,
            request.all_token_ids,
            salt=tenant_salt(request.cache_salt, adapter),
            pair=pair,
        )

    def _note_stored(self, report: WorkerReport) -> None:
        events = self._vllm_config.kv_events_config
        if events is None or not events.enable_kv_cache_events:
            return
        for block in report.stored:
            self._stored_events.append(
                BlockStored(
                    block_hashes=[block.key],
                    parent_block_hash=None if is_root(block.parent) else block.parent,
                    token_ids=list(block.tokens),
                    block_size=self._block_tokens,
                    lora_id=None,
                    medium="dualpath",
                    lora_name=None,
                )
            )

    # In a worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker = _open_worker(
            self._vllm_config, self._cache_config, self._settings, self._block_tokens, kv_caches
        )

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, DualPathStepOrders)
        self._side.begin(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: `handle_preemptions`, which comes first, has begun it, and layers are loaded as they
        come."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._side.layer_starts(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._side.layer_ends(layer_name)

    def wait_for_save(self) -> None:
        self._side.end()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self._side.take_sent() or None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._side.take_failed_blocks()

    def build_connector_worker_meta(self) -> DualPathWorkerReport | None:
        report = self._side.report()
        return DualPathWorkerReport(report) if report.staged or report.stored else None

    def get_kv_connector_stats(self) -> DualPathStats | None:
        if self._worker is None:
            return None
        added = self._worker.agent.stats.taken()
        pool = self._worker.pool
        in_use = pool.geometry.n_slots - pool.n_free
        if not added and in_use == self._reported_in_use:
            return None
        self._reported_in_use = in_use
        return DualPathStats(data={**added, SLOTS_IN_USE: in_use})

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> DualPathStats | None:
        return DualPathStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> DualPathPromMetrics:
        return DualPathPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is None:
            return
        parts, self._worker = self._worker, None
        parts.agent.close()
        if parts.catalog is not None:
            parts.catalog.close()
        if parts.store is not None:
            parts.store.close()
        parts.tensors.close()
        parts.pool.close()

    @property
    def _side(self) -> WorkerSide:
        assert self._worker is not None, "vLLM registers its caches before the first step"
        return self._worker.side


def _open_worker(
    vllm_config: Any,
    cache_config: Any,
    settings: ConnectorSettings,
    block_tokens: int,
    kv_caches: dict[str, torch.Tensor],
) -> _WorkerParts:
    tensors = KvTensors(kv_caches, cache_config.num_blocks)
    rank = get_tensor_model_parallel_rank()
    facts = BlockFacts(
        model=_model_identity(vllm_config, settings),
        revision=vllm_config.model_config.revision or "",
        vllm_version=".".join(vllm.__version__.split(".")[:2]),
        backend=_backend(cache_config),
        kv_spec=repr(cache_config.kv_cache_groups[0].kv_cache_spec),
        layers=tensors.layers,
        block_tokens=block_tokens,
        block_bytes=tensors.block_bytes,
        rank=rank,
        ranks=vllm_config.parallel_config.tensor_parallel_size,
    )
    layout, fingerprint = opaque_layout(facts), block_fingerprint(facts)
    n_slots = settings.buffer_bytes // layout.slot_bytes
    if n_slots < 1:
        raise ConfigError(
            f"buffer_bytes {settings.buffer_bytes} holds no block of {layout.slot_bytes} bytes: raise it"
        )
    pool = BufferPool(n_slots, layout.slot_bytes, name=f"vllm-{rank}")
    tensors.use(pool)
    store, catalog = None, None
    if settings.store:
        store = open_store(
            settings.store, fingerprint, layout, model=str(vllm_config.model_config.model)
        )
        catalog = Catalog(store, TrieIndex(), settings.store_capacity_bytes)
        catalog.load()
        catalog.start()
    agent = KvAgent(
        AgentParts(
            layout=layout,
            fingerprint=fingerprint,
            pool=pool,
            store=store,
            catalog=catalog,
            peer=settings.peer(rank),
            transfer=settings.transfer,
            rank=rank,
            host=settings.kv_host,
            secret=settings.secret(),
            stage_deadline_s=settings.stage_deadline_s,
            lease_s=settings.lease_s,
        )
    )
    return _WorkerParts(
        WorkerSide(agent, tensors, block_tokens), agent, tensors, pool, store, catalog
    )


def _model_identity(vllm_config: Any, settings: ConnectorSettings) -> str:
    """The weights' content where they lie in a directory, else the name that vLLM was given."""
    if settings.model_id:
        return settings.model_id
    model = str(vllm_config.model_config.model)
    load_format = str(vllm_config.load_config.load_format)
    if Path(model).is_dir() and load_format != "dummy":
        return model_identity(resolve_model(ModelSpec(model=model)))
    return f"{model} {load_format} {vllm_config.model_config.seed}"


def _backend(cache_config: Any) -> str:
    """What else decides where a byte of a block lies."""
    return f"{getattr(cache_config, 'kv_cache_layout', None)}"
