"""What a plan needs of a run beside its `Summary`: the most that engines held, and means for objectives.

Pure; times are seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dualpath.sim.plan.result import Held

if TYPE_CHECKING:  # It brings numba.
    from dualpath.sim.outcome import Outcome

__all__ = ["held_in", "mean_latencies_s", "most_at_once"]

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


def held_in(outcome: Outcome, block_tokens: int) -> Held:
    """The most that one engine held.

    Staging counts from the assignment, so with what waits for room; on the prefill side until the first
    token, on the decode side until the second, by when the KV has been handed over.
    """
    records = outcome.records[outcome.records.assigned_s > 0]
    assigned_s, first_s, second_s, finished_s = (
        _ends(records[name].astype(np.float64), outcome.end_s)
        for name in ("assigned_s", "first_token_s", "second_token_s", "finished_s")
    )
    handed_over_s = np.where(records.output_tokens > 1, second_s, first_s)
    blocks = -(-records.prompt_tokens.astype(np.int64) // block_tokens)
    prefill, decode = records.prefill.astype(np.int64), records.decode.astype(np.int64)
    return Held(
        pe_staging_tokens=most_at_once(
            prefill, assigned_s, first_s, records.pe_tokens.astype(np.int64)
        ),
        de_staging_tokens=most_at_once(decode, assigned_s, handed_over_s, blocks * block_tokens),
        decoding=most_at_once(decode, first_s, finished_s, np.ones_like(decode)),
    )


def mean_latencies_s(outcome: Outcome, from_s: float, until_s: float) -> dict[str, float]:
    """Means by metric, of the requests that arrived in [from_s, until_s) of a run that is at `until_s`.

    What has not ended counts with the time so far, so that a cluster that gets nowhere does not look quick.
    Without any such request there are none.
    """
    arrived_s = outcome.records.arrived_s
    records = outcome.records[(arrived_s >= from_s) & (arrived_s < until_s)]
    if not len(records):
        return {}
    arrived_s, first_s, second_s, finished_s = (
        records[name].astype(np.float64)
        for name in ("arrived_s", "first_token_s", "second_token_s", "finished_s")
    )
    two = (first_s > 0) & (records.output_tokens > 1)
    three = (second_s > 0) & (records.output_tokens > 2)
    per_token_s = (_ends(finished_s, until_s) - second_s)[three] / (
        records.output_tokens[three] - 2
    )
    return {
        "ttft": _mean(_ends(first_s, until_s) - arrived_s),
        "ttst": _mean((_ends(second_s, until_s) - first_s)[two]),
        "tpot": _mean(per_token_s),
        "e2e": _mean(_ends(finished_s, until_s) - arrived_s),
    }


def most_at_once(engine: Int64, start_s: Float64, end_s: Float64, size: Int64) -> int:
    """The most of `size` that any engine holds at a time, of what it holds in [start_s, end_s)."""
    if not len(engine):
        return 0
    engines = np.concatenate((engine, engine))
    times_s = np.concatenate((start_s, end_s))
    changes = np.concatenate((size, -size))
    # What ends makes room for what starts at the same time.
    order = np.lexsort((changes, times_s, engines))
    # Each engine's changes add up to 0, so one running sum serves for all.
    return int(np.cumsum(changes[order]).max())


def _ends(times_s: Float64, until_s: float) -> Float64:
    return np.where(times_s > 0, times_s, until_s)


def _mean(values: Float64) -> float:
    return float(values.mean()) if len(values) else 0.0
