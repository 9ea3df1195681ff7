from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba")

from dualpath.sim.kernel.state import RECORD, blank
from dualpath.sim.plan.figures import held_in, mean_latencies_s, most_at_once
from dualpath.sim.plan.result import Held

FIELDS = (
    "agent", "turn", "prefill", "decode", "prompt_tokens", "hit_tokens", "pe_tokens", "output_tokens",
    "arrived_s", "assigned_s", "read_s", "prefill_s", "first_token_s", "second_token_s", "finished_s",
)  # fmt: skip


class Run(NamedTuple):
    """What is looked at of an outcome."""

    records: np.recarray
    end_s: float


def outcome(*rows, end_s):
    records = blank(len(rows), RECORD)
    for record, row in zip(records, rows, strict=True):
        for name, value in zip(FIELDS, row, strict=True):
            record[name] = value
    return Run(records, end_s)


RUN = outcome(
    (0, 0, 0, 1, 100, 0, 0, 11, 0.0, 1.0, 1.5, 2.0, 3.0, 4.0, 13.0),
    (1, 0, 0, 1, 300, 192, 192, 1, 0.0, 2.0, 4.0, 5.0, 6.0, 0.0, 6.0),
    end_s=20.0,
)


def test_what_engines_held():
    assert held_in(RUN, block_tokens=64) == Held(
        pe_staging_tokens=192, de_staging_tokens=128 + 320, decoding=1
    )
    nothing = outcome(end_s=0.0)
    assert held_in(nothing, 64) == Held(pe_staging_tokens=0, de_staging_tokens=0, decoding=0)


def test_means_count_what_has_not_ended():
    run = outcome(
        (0, 0, 0, 1, 100, 0, 0, 11, 0.0, 1.0, 1.5, 2.0, 3.0, 4.0, 13.0),
        (1, 0, 0, 1, 300, 192, 192, 6, 6.0, 7.0, 7.0, 7.5, 8.0, 9.0, 0.0),
        (2, 0, 0, 0, 300, 192, 0, 5, 8.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
        end_s=13.0,
    )
    # Request 1 has had two tokens for a second, and should have four more; request 2 waits.
    means = mean_latencies_s(run, 5.0, 10.0)
    assert means == {"ttft": 2.0, "ttst": 1.0, "tpot": 0.25, "e2e": 3.0}
    assert mean_latencies_s(run, 9.0, 10.0) == {}


stays = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 9), st.integers(0, 5)),
    max_size=12,
)


@given(stays)
def test_most_at_once_is_the_naive_maximum(found):
    engine, first, second, size = (
        np.array([each[i] for each in found], np.int64) for i in range(4)
    )
    start, end = np.minimum(first, second), np.maximum(first, second)
    naive = max(
        (
            int(size[(engine == one) & (start <= at) & (at < end)].sum())
            for one in range(3)
            for at in range(10)
        ),
        default=0,
    )
    assert most_at_once(engine, start.astype(float), end.astype(float), size) == naive
