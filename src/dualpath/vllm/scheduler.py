"""vLLM schedulers with the compute quota, for `--scheduler-cls`.

    --scheduler-cls dualpath.vllm.scheduler.DualPathScheduler
    --additional-config '{"dualpath": {"quota_s": 0.3, "per_pair_s": 1e-9}}'

`DualPathScheduler` is vLLM's own, `DualPathAsyncScheduler` its asynchronous one (for GPUs). A step's
prefills are cut so that their estimated attention time stays within the quota, exactly: by the last thing
that vLLM asks before it allocates blocks. Cutting the step's token budget instead would not be exact,
because time depends on the context. Decoding is never held back."""

from __future__ import annotations

from typing import Any

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from dualpath.base.errors import ConfigError
from dualpath.vllm.step_quota import StepQuota, quota_settings
from dualpath.vllm.versions import check_version

__all__ = ["DualPathAsyncScheduler", "DualPathScheduler"]

_HOOK = "_reserve_prefill_lookahead"


class _WithQuota(Scheduler):
    """What both have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_version(vllm.__version__)
        if not hasattr(Scheduler, _HOOK):
            raise ConfigError(
                f"vLLM {vllm.__version__} has no {_HOOK}, by which the quota is kept: use another "
                f"version, or leave --scheduler-cls out"
            )
        self.quota = StepQuota(quota_settings(self.vllm_config.additional_config))

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.quota.begin()
        return super().schedule(*args, **kwargs)

    def _reserve_prefill_lookahead(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        wanted = int(
            super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        )
        if num_computed_tokens >= request.num_tokens - 1:
            return wanted  # It decodes.
        return self.quota.grant(num_computed_tokens, wanted)


class DualPathScheduler(_WithQuota):
    """vLLM's scheduler, with the quota."""


class DualPathAsyncScheduler(_WithQuota, AsyncScheduler):
    """vLLM's asynchronous scheduler, with the quota."""
