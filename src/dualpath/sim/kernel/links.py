"""Fluid links: flows on a link share its rate fairly; a flow is complete when all its links have served it.

Two classes. The high class, collectives of model execution, takes `high_share` of the rate; flows are the
low class, KV, and share the rest, each at most `flow_cap_bytes_s`. All flows of a link have the same rate,
so a flow that starts when each was given v bytes ends when each was given v + n: one heap of such ends a
link. A tournament over all links has the time of each link's first end, exact at every change.

A flow on several links is served by each as if it were alone there, and waits for the slowest. Max-min
fairness would give the other links what such a flow does not use; it is left out for speed, and errs on the
slow side.
"""

from __future__ import annotations

from dualpath.sim.kernel.heaps import NONE, pairing_add, pairing_pop, tournament_replay
from dualpath.sim.kernel.jit import compiled
from dualpath.sim.kernel.state import PARTS, State

__all__ = [
    "add_part",
    "flow_rate",
    "next_link",
    "schedule",
    "set_high_share",
    "start_flow",
    "take_ended",
    "unserved_bytes",
    "update",
]

_CLOSE_BYTES = 1.0
"""Ends this near are the same: rounding must not make an event of its own."""


@compiled
def next_link(s: State) -> int:
    """With the first end of all; its time is in `link_end_s`, and infinite when no link has a flow."""
    return int(s.link_winners[1])


@compiled
def flow_rate(s: State, link: int) -> float:
    """Of one flow, bytes a second."""
    each = s.links[link]
    share = each.capacity_bytes_s * (1.0 - each.high_share) / each.active
    return float(min(share, each.flow_cap_bytes_s))


@compiled
def update(s: State, link: int, now_s: float) -> None:
    """Account for the time since the last change."""
    each = s.links[link]
    since_s = each.updated_s
    each.updated_s = now_s
    if each.active == 0 or now_s <= since_s:
        return
    rate = flow_rate(s, link)
    total = rate * each.active
    each.virtual_bytes += rate * (now_s - since_s)
    each.served_bytes += total * (now_s - since_s)
    if each.series != NONE:
        window_s = s.parameters[0].window_s
        windows = s.series_bytes.shape[1]
        window = int(since_s / window_s)
        while since_s < now_s and window < windows:
            until_s = min(now_s, (window + 1) * window_s)
            s.series_bytes[each.series, window] += total * (until_s - since_s)
            since_s = until_s
            window += 1


@compiled
def schedule(s: State, link: int, now_s: float) -> None:
    """The link, which is updated, has its first end at another time."""
    each = s.links[link]
    end_s = float("inf")
    if each.active:
        end_s = now_s
        left = s.parts[each.first_part].key - each.virtual_bytes
        if left > _CLOSE_BYTES:
            end_s += left / flow_rate(s, link)
    if end_s != s.link_end_s[link]:
        s.link_end_s[link] = end_s
        tournament_replay(s.link_end_s, s.link_winners, link)


@compiled
def set_high_share(s: State, link: int, share: float, now_s: float) -> None:
    """What the high class takes of the rate from now on; below 1."""
    each = s.links[link]
    if each.active:
        update(s, link, now_s)
    each.high_share = share
    if each.active:
        schedule(s, link, now_s)


@compiled
def add_part(s: State, link: int, part: int, size_bytes: float, now_s: float) -> None:
    update(s, link, now_s)
    each = s.links[link]
    if each.active == 0:
        each.virtual_bytes = 0.0
        each.finish_sum_bytes = 0.0
    finish = each.virtual_bytes + size_bytes
    each.first_part = pairing_add(s.parts, each.first_part, part, finish)
    each.active += 1
    each.finish_sum_bytes += finish
    schedule(s, link, now_s)


@compiled
def start_flow(
    s: State, flow: int, size_bytes: float, a: int, b: int, c: int, now_s: float
) -> None:
    """On up to three links, NONE for fewer; the flow must have none under way."""
    part = flow * PARTS
    count = 0
    for link in (a, b, c):
        if link != NONE:
            count += 1
    s.flow_left[flow] = count
    for link in (a, b, c):
        if link != NONE:
            add_part(s, link, part, size_bytes, now_s)
            part += 1


@compiled
def take_ended(s: State, link: int, now_s: float) -> int:
    """A flow that has ended on the link, off the link; as long as the link's end is not after `now_s`.

    The flow that has now ended on all its links, NONE while it is on another.
    """
    update(s, link, now_s)
    each = s.links[link]
    part = each.first_part
    each.first_part = pairing_pop(s.parts, part)
    each.active -= 1
    each.finish_sum_bytes -= s.parts[part].key
    schedule(s, link, now_s)
    flow = part // PARTS
    s.flow_left[flow] -= 1
    return int(flow) if s.flow_left[flow] == 0 else NONE


@compiled
def unserved_bytes(s: State, link: int, now_s: float) -> float:
    """Of all flows that are on the link."""
    update(s, link, now_s)
    each = s.links[link]
    return float(max(0.0, each.finish_sum_bytes - each.active * each.virtual_bytes))
