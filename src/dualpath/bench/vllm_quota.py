"""Steps of a vLLM engine with `DualPathScheduler` that compute more attention than the quota allows.

    python -m dualpath.bench.vllm_quota MODEL_DIRECTORY

plays nine requests at once, in a Python that has vLLM, and prints one line of JSON. What a step computes is
read from what the scheduler gives vLLM to execute, not from the quota's own account. The quota is a number
of pairs of query and key.

A prompt's token that alone exceeds the quota is computed alone, in a step that counts as none.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from dualpath.base.errors import EngineLost
from dualpath.policy.quota import pairs

__all__ = ["QuotaSteps", "Step", "main", "measure_quota", "over_quota", "recording"]

_QUOTA_PAIRS = 400_000
_PROMPTS_TOKENS = (3000, 100, 2000, 50, 700, 1500, 6000, 10, 900)
_ANSWER_TOKENS = 12
_VOCABULARY = 250
_DEADLINE_S = 300.0

Step: TypeAlias = Sequence[tuple[int, int]]
"""Cached and new tokens of each prefill in a step."""


class QuotaSteps(msgspec.Struct, frozen=True):
    """`violations`: steps over the quota. `largest_share`: of the quota, by the fullest step."""

    violations: int
    steps: int
    largest_share: float


def over_quota(steps: Iterable[Step], quota_pairs: int) -> QuotaSteps:
    """Judge the steps that prefill anything."""
    filled = [step for step in steps if step]
    spent = [sum(pairs(*entry) for entry in step) for step in filled]
    alone = [len(step) == 1 and step[0][1] == 1 for step in filled]
    violations = sum(n > quota_pairs and not one for n, one in zip(spent, alone, strict=True))
    return QuotaSteps(violations, len(filled), round(max(spent, default=0) / quota_pairs, 4))


def recording(scheduler: type[Any], steps: list[Step]) -> type[Any]:
    """A class like `scheduler`, one of vLLM's, that writes down what each step computes of prompts."""

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = scheduler.schedule(self, *args, **kwargs)
        tokens = output.num_scheduled_tokens
        parts = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        cached = output.scheduled_cached_reqs
        parts += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        steps.append(
            [
                (computed, tokens[request])
                for request, computed in parts
                if computed < self.requests[request].num_prompt_tokens - 1
            ]
        )
        return output

    return type("Recording", (scheduler,), {"schedule": schedule})


def measure_quota(python: str, model: Path) -> QuotaSteps:
    """Play it in a process of `python`. Raises EngineLost when that fails."""
    environ = dict(os.environ, VLLM_TARGET_DEVICE="cpu", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    try:
        ended = subprocess.run(
            [python, "-m", "dualpath.bench.vllm_quota", str(model)],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        raise EngineLost(f"vLLM with the quota: {str(error.stderr)[-3000:]}") from error
    except subprocess.TimeoutExpired as error:
        raise EngineLost(f"vLLM with the quota did not end in {_DEADLINE_S:g} s") from error
    return msgspec.json.decode(ended.stdout.splitlines()[-1], type=QuotaSteps)


def main(model: str) -> None:
    """In a Python with vLLM."""
    from vllm import LLM, SamplingParams

    from dualpath.vllm.scheduler import DualPathScheduler

    dice, steps = random.Random(3), list[Step]()
    prompts = [[dice.randrange(_VOCABULARY) for _ in range(n)] for n in _PROMPTS_TOKENS]
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_num_batched_tokens=2048,
        max_model_len=8192,
        kv_cache_memory_bytes=256 << 20,
        enable_prefix_caching=False,
        scheduler_cls=recording(DualPathScheduler, steps),
        additional_config={"dualpath": {"quota_s": _QUOTA_PAIRS, "per_pair_s": 1}},
    )
    params = SamplingParams(
        temperature=0, max_tokens=_ANSWER_TOKENS, ignore_eos=True, detokenize=False
    )
    llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    print(msgspec.json.encode(over_quota(steps, _QUOTA_PAIRS)).decode(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
