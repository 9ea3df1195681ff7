"""What a simulated cluster is asked for: turns as lengths in flat arrays, and the agents that play them.

Made from a trace of any format. How long a prompt is, and how much of it earlier prompts began with, is what
`dualpath.traces.lengths` says: exact for appended prompts and for blocks, for recorded text an estimate (a
token for four characters). What sessions share is counted as if they were played one after the other, in
order, whenever they start in the simulation. Knows no cluster, no block size and no clock.

Invariants: a trajectory has at least one turn; 0 <= reused <= prompt, 1 <= prompt, 1 <= output; the first
turn of a trajectory has no delay; agents are in the order of their starts, none below 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dualpath.base.errors import ConfigError
from dualpath.traces import (
    AppendPrompt,
    Session,
    Trace,
    Turn,
    context_tokens,
    limit_context,
    reused_tokens,
    take_sessions,
)

__all__ = ["Workload", "offline", "online", "scaled"]

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """T turns of S trajectories, played by A agents. The arrays are contiguous, and nobody writes to them.

    Turns of trajectory s are `[first_turn[s], first_turn[s + 1])`. `reused_tokens` of a prompt are known from
    before, not yet rounded to blocks; they can be all of it. `delay_s` goes by between the end of the turn
    before and this one.

    An agent with `first_round_tokens` > 0 plays a synthetic first round before its trajectory (paper,
    section 7): a prompt of so many tokens, none of them known, and one token to generate. All its other
    prompts, and what is reused of them, are longer by that many tokens. (Where turns append to the
    conversation, the generated one is part of it, too; the trajectories of such agents have it in.)
    """

    prompt_tokens: Int32
    """[T], as the next three."""
    reused_tokens: Int32
    output_tokens: Int32
    delay_s: Float64
    first_turn: Int64
    """[S + 1]; the last one is T."""
    trajectory: Int32
    """[A], as the next two."""
    first_round_tokens: Int32
    start_s: Float64

    @property
    def agents(self) -> int:
        return len(self.trajectory)

    @property
    def requests(self) -> int:
        """Turns of all agents, their first rounds included."""
        played = np.diff(self.first_turn)[self.trajectory]
        return int(played.sum() + np.count_nonzero(self.first_round_tokens))


def offline(trace: Trace, agents: int) -> Workload:
    """All agents start at 0; each plays one session, in order.

    When the trace has fewer, its sessions are played again and again as copies with a synthetic first round,
    as in `take_sessions`. Raises ConfigError.
    """
    return _workload(trace, np.zeros(_some(agents)))


def online(
    trace: Trace,
    arrivals_s: Iterable[float],
    *,
    agents: int | None = None,
    horizon_s: float | None = None,
) -> Workload:
    """Agents start at `arrivals_s`, times in order as of `traces.poisson` or `traces.recorded`, and play what
    those of `offline` do.

    At most `agents` arrive, none of them at `horizon_s` or later; one of the two has to be given, since
    arrivals may have no end. Raises ConfigError, also when none arrives.
    """
    if agents is None and horizon_s is None:
        raise ConfigError("arrivals: expected a number of agents or a horizon, got neither")
    if agents is not None:
        arrivals_s = itertools.islice(arrivals_s, _some(agents))
    if horizon_s is not None:
        arrivals_s = itertools.takewhile(lambda at_s: at_s < horizon_s, arrivals_s)
    start_s = np.fromiter(arrivals_s, np.float64)
    if not len(start_s):
        raise ConfigError("arrivals: no agent arrives; raise the rate or the horizon")
    return _workload(trace, start_s)


def scaled(trace: Trace, *, max_tokens: int, append: float = 1.0, output: float = 1.0) -> Trace:
    """Each append and each output times a factor, rounded, at least one token.

    For the paper's experiment with longer appends and generations. The first prompt is an append, too. As
    contexts then grow faster, a trajectory ends earlier: before the turn whose prompt and output are more
    than `max_tokens` together. Raises ConfigError for prompts that are not appended.
    """
    if not (0 < append < math.inf and 0 < output < math.inf):
        raise ConfigError(f"scale: expected numbers > 0, got {append:g} and {output:g}")
    sessions = (
        replace(each, turns=tuple(_scaled(each, turn, append, output) for turn in each.turns))
        for each in trace.sessions
    )
    return limit_context(replace(trace, sessions=tuple(sessions)), max_tokens).trace


def _some(agents: int) -> int:
    if agents < 1:
        raise ConfigError(f"agents: expected a whole number >= 1, got {agents}")
    return agents


def _scaled(session: Session, turn: Turn, append: float, output: float) -> Turn:
    if not isinstance(turn.prompt, AppendPrompt):
        raise ConfigError(
            f"session {session.id!r}: only appended prompts can be scaled, this one has whole prompts"
        )
    return replace(
        turn,
        prompt=AppendPrompt(max(1, round(turn.prompt.tokens * append))),
        output_tokens=max(1, round(turn.output_tokens * output)),
    )


def _workload(trace: Trace, start_s: Float64) -> Workload:
    count, agents = len(trace.sessions), len(start_s)
    if not count:
        raise ConfigError(f"{trace.name} has no sessions")
    # Copies share nothing with any other session, so the first copy's lengths are those of all; they differ
    # from the original's, which may share blocks with others.
    taken = take_sessions(trace, min(agents, 2 * count))
    lap, place = np.divmod(np.arange(agents), count)
    trajectory = np.where(lap > 0, count + place, place)
    added = np.array([each.first_round_tokens for each in taken.sessions])
    prompts = [np.array(context_tokens(each)) for each in taken.sessions]
    reused = [np.array(each) for each in reused_tokens(taken)]
    turns = [turn for each in taken.sessions for turn in each.turns]
    lengths = np.array([len(each) for each in prompts])
    first_turn = np.concatenate(([0], np.cumsum(lengths)))
    beyond = np.repeat(added, lengths)
    output_tokens = np.array([turn.output_tokens for turn in turns])
    delay_s = np.array([turn.delay_s for turn in turns])
    delay_s[first_turn[:-1]] = 0.0
    prompt_tokens = np.concatenate(prompts)
    longest = int((prompt_tokens + output_tokens).max())
    if longest > np.iinfo(np.int32).max:
        raise ConfigError(f"{trace.name}: a context of {longest} tokens is too long to simulate")
    return Workload(
        prompt_tokens=(prompt_tokens - beyond).astype(np.int32),
        reused_tokens=(np.concatenate(reused) - beyond).astype(np.int32),
        output_tokens=output_tokens.astype(np.int32),
        delay_s=delay_s,
        first_turn=first_turn,
        trajectory=trajectory.astype(np.int32),
        first_round_tokens=added[trajectory].astype(np.int32),
        start_s=start_s,
    )
