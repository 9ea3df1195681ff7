"""How a prefix is shared between the sides, and how far the store is probed."""

from __future__ import annotations

import pytest
from vllm_kit import PEER

from dualpath.vllm.params import PairParams
from dualpath.vllm.staging import ReadSplit, next_probe, split_reads


def plan(hit_tokens: int, pe_tokens: int) -> PairParams:
    return PairParams("prefill", "r", 1, PEER, hit_tokens, pe_tokens)


@pytest.mark.parametrize(
    ("first", "stop", "pair", "middle"),
    [
        (0, 10, None, 10),
        (0, 10, plan(40, 40), 10),
        (0, 10, plan(40, 0), 0),
        (0, 10, plan(40, 12), 3),
        (5, 10, plan(40, 12), 5),
        (0, 20, plan(40, 12), 6),
        (0, 5, plan(40, 12), 2),
        (0, 10, plan(0, 0), 10),
        (0, 0, plan(40, 12), 0),
        (0, 10, PairParams("decode", "r", 1, PEER, 40, 0), 10),
    ],
)
def test_split(first: int, stop: int, pair: PairParams | None, middle: int) -> None:
    expected = ReadSplit(range(first, middle), range(middle, stop))
    assert split_reads(first, stop, pair, 4) == expected


def test_probes_double_up_to_the_end() -> None:
    seen, stop, last = [], 3, 0
    while probe := next_probe(stop, 300, last):
        seen.append(len(probe))
        stop, last = probe.stop, len(probe)
    assert seen == [1, 2, 4, 8, 16, 32, 64, 64, 64, 42]
    assert stop == 300
