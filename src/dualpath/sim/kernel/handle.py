"""The kernel's arrays as compiled code takes them: one reference instead of all arrays at each call."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from dualpath.sim.kernel.jit import structref, types
from dualpath.sim.kernel.state import State

__all__ = ["Handle", "handle_of"]


@structref.register
class _HandleType(types.StructRef):  # type: ignore[misc]
    def preprocess_fields(self, fields: Any) -> Any:
        return tuple((name, types.unliteral(each)) for name, each in fields)


class Handle(structref.StructRefProxy):  # type: ignore[misc]
    """Fields as those of `State`, for compiled code only."""

    # Looked up at each call. Numba's own property is a call into Python.
    _numba_type_ = property(attrgetter("_type"))

    def __new__(cls, *arrays: object) -> Handle:
        return structref.StructRefProxy.__new__(cls, *arrays)  # type: ignore[no-any-return]


structref.define_proxy(Handle, _HandleType, list(State._fields))


def handle_of(state: State) -> Handle:
    """Shares the arrays."""
    return Handle(*state)
