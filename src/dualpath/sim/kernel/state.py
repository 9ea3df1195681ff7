"""Everything that the kernel knows, in arrays. Pure data; `make_state` fills it, the kernel owns it then.

One agent has at most one request at a time, so requests live in slots, one an agent. Its two sides, its
flows and their parts have fixed places: side 2 * slot is of its prefill engine, 2 * slot + 1 of its decode
engine; its flows are [slot * FLOWS, (slot + 1) * FLOWS), the parts of a flow [flow * PARTS, (flow + 1) *
PARTS).

Engines of a role are consecutive, those of a node and those of an instance too; prefill engines come first.
The links of an engine's compute NIC, out and in, are consecutive, and those of consecutive engines too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dualpath.sim.kernel.heaps import NONE
from dualpath.sim.kernel.jit import Floats, Ints, Records

__all__ = [
    "CLOCK",
    "COPY_IN",
    "COPY_OUT",
    "DONE",
    "ENGINE",
    "FLOWS",
    "HAND_OVER",
    "INSTANCE",
    "LINK",
    "NODE",
    "PARAMETERS",
    "PARTS",
    "READ",
    "RECORD",
    "REMOTE_IN",
    "SIDE",
    "SLOT",
    "State",
    "blank",
    "nothing",
    "reports_of",
]

FLOWS = 6
READ, COPY_IN, REMOTE_IN, COPY_OUT, HAND_OVER = 0, 2, 3, 4, 5
"""A slot's flows: reads of both sides, READ and READ + 1; of a prefill step: hit KV from the own buffer, KV
from the decode engine's buffer, KV to it; from the decode engine's buffer to its device."""
PARTS = 3
"""Links that a flow can be on."""

PARAMETERS = np.dtype(
    [
        ("kv_bytes_token", "f8"),
        ("block_tokens", "i8"),
        ("layers", "i8"),
        ("layerwise", "i8"),
        ("isolated", "i8"),
        # Reads
        ("read_latency_s", "f8"),
        ("front_end_s", "f8"),
        ("reads_in_order", "i8"),
        ("submit_s", "f8"),
        # Prefill: what a step really takes, and what the quota goes by
        ("quota_s", "f8"),
        ("max_batch_tokens", "i8"),
        ("fit_base_s", "f8"),
        ("fit_entry_s", "f8"),
        ("fit_token_s", "f8"),
        ("fit_pair_s", "f8"),
        ("prefill_base_s", "f8"),
        ("attention_entry_s", "f8"),
        ("attention_token_s", "f8"),
        ("attention_pair_s", "f8"),
        ("linear_token_s", "f8"),
        ("prefill_weights_s", "f8"),
        ("prefill_collective_s", "f8"),
        ("copy_bytes_s", "f8"),
        # Decode
        ("decode_base_s", "f8"),
        ("sequence_s", "f8"),
        ("linear_sequence_s", "f8"),
        ("decode_weights_s", "f8"),
        ("context_token_s", "f8"),
        ("decode_collective_s", "f8"),
        # Recording
        ("window_s", "f8"),
    ]
)

CLOCK = np.dtype(
    [
        ("now_s", "f8"),
        ("events", "i8"),
        ("heap_size", "i8"),
        ("pushed", "i8"),
        ("log_size", "i8"),
        ("log_full", "i8"),
        ("due", "i8"),
        ("live", "i8"),
        ("unfinished_agents", "i8"),
        ("records", "i8"),
    ]
)

LINK = np.dtype(
    [
        ("capacity_bytes_s", "f8"),
        ("flow_cap_bytes_s", "f8"),
        # What collectives of model execution take of the capacity
        ("high_share", "f8"),
        # What each flow got since the link was last empty
        ("virtual_bytes", "f8"),
        ("updated_s", "f8"),
        ("active", "i8"),
        ("first_part", "i8"),
        ("finish_sum_bytes", "f8"),
        ("served_bytes", "f8"),
        ("series", "i8"),
    ]
)

NODE = np.dtype([("snic", "i8"), ("memory", "i8"), ("waiting_tokens", "i8")])

ENGINE = np.dtype(
    [
        ("node", "i8"),
        ("instance", "i8"),
        ("nic_out", "i8"),
        ("nic_in", "i8"),
        # What a leader reports: see `reports_of`
        ("seen", "i8"),
        ("requests", "i8"),
        ("tokens", "i8"),
        ("free_hbm_tokens", "i8"),
        # Admission: staging buffer, or device memory where the whole KV must be there. A queue of sides
        ("room_tokens", "i8"),
        ("used_tokens", "i8"),
        ("admit_head", "i8"),
        ("admit_tail", "i8"),
        # With reads in order: the side that is read, and those after it
        ("read_head", "i8"),
        ("read_tail", "i8"),
        # Prefill: requests that are read, in order
        ("ready_head", "i8"),
        ("ready_tail", "i8"),
        ("attention_s", "f8"),
        # Entries of the prefill step, which are the first that are ready; sequences that are decoded
        ("batch", "i8"),
        ("context_tokens", "i8"),
    ]
)

INSTANCE = np.dtype(
    [
        ("role", "i8"),
        ("first_engine", "i8"),
        ("engines", "i8"),
        # Whether collectives leave the node
        ("spread", "i8"),
        ("stepping", "i8"),
        ("steps", "i8"),
        # Prefill: flows of the step under way, whether the rest of it is done, requests that are read; in
        # `due`
        ("transfers", "i8"),
        ("computed", "i8"),
        ("ready", "i8"),
        ("is_due", "i8"),
        # Decode: sequences that join at the next step, or have joined with this one, through `next_joining`
        ("joining", "i8"),
        ("joined", "i8"),
        ("first_end", "i8"),
        ("batch", "i8"),
        # Sums, for means
        ("step_started_s", "f8"),
        ("busy_s", "f8"),
        ("attention_max_s", "f8"),
        ("attention_mean_s", "f8"),
    ]
)

SLOT = np.dtype(
    [
        ("trajectory", "i4"),
        ("first_round_tokens", "i4"),
        ("turn", "i4"),
        ("prefill", "i4"),
        ("decode", "i4"),
        ("prompt_tokens", "i4"),
        ("hit_tokens", "i4"),
        ("output_tokens", "i4"),
        ("bypass", "i4"),
        # Sides that are not admitted and read
        ("pending", "i4"),
        # Prefill: tokens that have KV, and that the step computes
        ("cached_tokens", "i4"),
        ("batch_tokens", "i4"),
        ("next_ready", "i4"),
        ("next_joining", "i4"),
        ("record", "i4"),
    ]
)

SIDE = np.dtype(
    [
        ("engine", "i4"),
        ("read_tokens", "i4"),
        # Of the engine's room
        ("need_tokens", "i4"),
        ("next", "i4"),
    ]
)

RECORD = np.dtype(
    [
        ("agent", "i4"),
        ("turn", "i4"),
        ("prefill", "i4"),
        ("decode", "i4"),
        ("prompt_tokens", "i4"),
        ("hit_tokens", "i4"),
        ("pe_tokens", "i4"),
        ("output_tokens", "i4"),
        ("arrived_s", "f8"),
        ("assigned_s", "f8"),
        ("read_s", "f8"),
        ("prefill_s", "f8"),
        ("first_token_s", "f8"),
        ("second_token_s", "f8"),
        ("finished_s", "f8"),
    ]
)
"""A request that arrived. Times from the start of the run; 0 where it did not come so far. `read_s`: both
engines had admitted it and its reads were complete; `prefill_s`: its first prefill step started."""

DONE = np.dtype(
    [
        ("time_s", "f8"),
        ("kind", "i8"),
        ("slot", "i8"),
        ("tokens", "i8"),
        # Of a request that arrived; otherwise as it was
        ("turn", "i8"),
        ("hit_tokens", "i8"),
        ("output_tokens", "i8"),
    ]
)
"""What happened, for the driver: see `kernel.log`. `tokens`: of an arrival, its prompt."""


class State(NamedTuple):
    """All arrays. `clock` and `parameters` have one element each.

    `heap`: see `events`; `link_end_s`, `link_winners`, `parts`: see `links`; `ends`: heaps of the
    decode instances' sequences by the step in which they end; `due`: prefill instances that may start a
    step, the first `clock.due`. `series_bytes[s, w]`: bytes that link series s served in window w.
    `attention_s[e, w]`: attention time of prefill engine e in steps that started in it. Workload arrays as
    in `Workload`.
    """

    clock: Records
    parameters: Records
    links: Records
    nodes: Records
    engines: Records
    instances: Records
    slots: Records
    sides: Records
    records: Records
    log: Records
    heap: Records
    link_end_s: Floats
    link_winners: Ints
    flow_left: Ints
    parts: Records
    ends: Records
    due: Ints
    series_bytes: Floats
    attention_s: Floats
    prompt_tokens: Ints
    reused_tokens: Ints
    output_tokens: Ints
    delay_s: Floats
    first_turn: Ints
    start_s: Floats


def blank(count: int, dtype: np.dtype[np.void]) -> Records:
    """Records of zeros whose fields are attributes."""
    return np.zeros(count, dtype).view(np.recarray)


def nothing(count: int) -> Ints:
    """Indices that point nowhere."""
    return np.full(count, NONE, np.int64)


def reports_of(state: State) -> Ints:
    """[field, engine]: a view of what engines report, fields as the policy's `EngineReport` has them."""
    engines = state.engines.view(np.ndarray)
    numbers: Ints = engines.view(np.int64).reshape(len(engines), -1)
    names = list(ENGINE.fields or ())
    first, end = names.index("seen"), names.index("free_hbm_tokens") + 1
    return numbers[:, first:end].T
