"""The compiled cluster: events in a total order, fluid links, prefill and decode steps.

`make_state` makes the arrays, `advance` lets time pass, `assign_all` carries out what the policy decided.
The kernel decides nothing that the policy decides; it tells what happened through `State.log`.
"""

from dualpath.sim.kernel.handle import Handle, handle_of
from dualpath.sim.kernel.make import make_state
from dualpath.sim.kernel.run import advance, assign_all, read_queue_tokens
from dualpath.sim.kernel.state import State, reports_of

__all__ = [
    "Handle",
    "State",
    "advance",
    "assign_all",
    "handle_of",
    "make_state",
    "read_queue_tokens",
    "reports_of",
]
