"""A scheduler for tests, that writes down what each step computes of prompts."""

from __future__ import annotations

from typing import Any

from dualpath.vllm.scheduler import DualPathScheduler

__all__ = ["STEPS", "RecordingScheduler"]

STEPS: list[list[tuple[int, int]]] = []
"""For each step, cached and new tokens of each prefill in it."""


class RecordingScheduler(DualPathScheduler):
    """See the module."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        tokens = output.num_scheduled_tokens
        parts = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        cached = output.scheduled_cached_reqs
        parts += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        STEPS.append(
            [
                (computed, tokens[request])
                for request, computed in parts
                if computed < self.requests[request].num_prompt_tokens - 1
            ]
        )
        return output
