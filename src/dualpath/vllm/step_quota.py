"""The compute quota of one scheduling step, granted request by request (paper, section on intra-engine
scheduling).

The same rule as `dualpath.policy.pack`, for a scheduler that walks its own queue: FIFO, until the estimated
attention time reaches the quota; the request that would overflow is cut to the most tokens that fit, and
ends the batch. The first always gets a token, so a prompt of any length ends. Pure. It knows no requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from dualpath.base.errors import ConfigError
from dualpath.policy.quota import AttentionFit, largest_that_fits

__all__ = ["QUOTA_KEY", "QuotaSettings", "StepQuota", "quota_settings"]

QUOTA_KEY = "dualpath"
"""Where vLLM's `--additional-config` holds the settings."""

_NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class QuotaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The quota, and the coefficients of its estimate as in `AttentionFit`.

    To bound query-key pairs instead of seconds: `quota_s` is their number, `per_pair_s` 1, and the others
    0."""

    quota_s: Annotated[float, msgspec.Meta(gt=0)]
    per_pair_s: _NotNegative
    base_s: _NotNegative = 0.0
    per_entry_s: _NotNegative = 0.0
    per_token_s: _NotNegative = 0.0

    @property
    def fit(self) -> AttentionFit:
        return AttentionFit(self.base_s, self.per_entry_s, self.per_pair_s, self.per_token_s)


def quota_settings(additional_config: object) -> QuotaSettings:
    """Read vLLM's `additional_config`. Raises ConfigError: a scheduler with a quota needs one."""
    config = additional_config if isinstance(additional_config, Mapping) else {}
    if QUOTA_KEY not in config:
        raise ConfigError(
            f"the scheduler needs its quota: --additional-config "
            f'\'{{"{QUOTA_KEY}": {{"quota_s": 0.3, "per_pair_s": 1e-9}}}}\''
        )
    try:
        return msgspec.convert(config[QUOTA_KEY], QuotaSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--additional-config {QUOTA_KEY!r}: {error}") from None


class StepQuota:
    """What is left of the quota in the step that `begin` began."""

    def __init__(self, settings: QuotaSettings) -> None:
        self._fit = settings.fit
        self._quota_s = settings.quota_s
        self._closed = False
        self.entries = 0
        self.spent_s = 0.0

    def begin(self) -> None:
        """A new step."""
        self._closed = False
        self.entries = 0
        self.spent_s = self._fit.base_s

    def grant(self, cached_tokens: int, wanted_tokens: int) -> int:
        """How many of a request's next tokens this step computes, and takes them from the quota."""
        if self._closed or wanted_tokens <= 0:
            return 0
        fit = self._fit
        granted = largest_that_fits(
            cached_tokens,
            wanted_tokens,
            wanted_tokens,
            fit.per_entry_s,
            fit.per_pair_s,
            fit.per_token_s,
            self.spent_s,
            self._quota_s,
            1,
        )
        if granted == 0 and self.entries == 0:
            granted = 1
        self._closed = granted < wanted_tokens
        if granted:
            self.entries += 1
            self.spent_s += fit.entry_s(cached_tokens, granted)
        return granted
