"""The planner: which division of nodes, which constants, and what they give, found by simulation.

`settings` is what it can be told, `ask` makes a question of that, `search` answers it with a `Plan`
(`result`), which `table` shows on a terminal and `report` on a page. The modules that simulate need numba;
the others do not.
"""

__all__: list[str] = []
