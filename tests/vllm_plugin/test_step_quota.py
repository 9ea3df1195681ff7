"""The quota of a step: as `dualpath.policy.pack`, request by request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.base.errors import ConfigError
from dualpath.base.ids import RequestId
from dualpath.policy.quota import AttentionFit, PrefillEntry, pack, pairs
from dualpath.vllm.step_quota import QuotaSettings, StepQuota, quota_settings

PAIRS = QuotaSettings(quota_s=1000, per_pair_s=1)


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), max_size=8),
    st.integers(1, 3000),
    st.integers(0, 30),
    st.integers(0, 3),
)
def test_the_same_as_pack(
    waiting: list[tuple[int, int]], quota: int, per_entry: int, per_token: int
) -> None:
    settings = QuotaSettings(
        quota_s=quota, per_pair_s=1, per_entry_s=per_entry, per_token_s=per_token
    )
    step = StepQuota(settings)
    step.begin()
    grants = [step.grant(cached, tokens) for cached, tokens in waiting]
    entries = [PrefillEntry(RequestId(str(n)), *each) for n, each in enumerate(waiting)]
    fit = AttentionFit(0, per_entry, 1, per_token)
    batch = pack(entries, fit, quota_s=quota, max_batch_tokens=10**6)
    assert [each for each in grants if each] == [each.bsz_tokens for each in batch.entries]


def test_the_first_always_gets_a_token() -> None:
    step = StepQuota(PAIRS)
    step.begin()
    assert step.grant(5000, 10) == 1
    assert step.grant(0, 1) == 0


def test_each_step_begins_anew() -> None:
    step = StepQuota(PAIRS)
    for _ in range(2):
        step.begin()
        granted = step.grant(0, 100)
        assert pairs(0, granted) <= 1000 < pairs(0, granted + 1)
        assert step.grant(0, 1) == 0, "the one that was cut ends the batch"


def test_settings() -> None:
    config = {"dualpath": {"quota_s": 0.3, "per_pair_s": 1e-9}}
    assert quota_settings(config).fit == AttentionFit(0, 0, 1e-9, 0)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, "needs its quota"),
        ({}, "needs its quota"),
        ({"dualpath": {"quota_s": 0, "per_pair_s": 1}}, "quota_s"),
        ({"dualpath": {"quota_s": 1}}, "per_pair_s"),
        ({"dualpath": {"quota_s": 1, "per_pair_s": 1, "pairs": 2}}, "pairs"),
    ],
)
def test_bad_settings(config: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        quota_settings(config)
