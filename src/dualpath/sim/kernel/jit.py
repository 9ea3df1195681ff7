"""How the kernel's functions are compiled, and the types that they are written with.

The kernel is plain Python over numpy arrays that numba compiles. Only entry points are kept on disk. Numba
by itself looks at no file but an entry point's own, so their key holds a digest of all that is compiled
into them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dualpath.base.errors import ConfigError
from dualpath.policy import quota

try:
    from numba import njit, types
    from numba.experimental import structref
except ImportError as error:  # pragma: no cover - depends on the installation
    raise ConfigError(
        "the simulator needs numba, which compiles its kernel: pip install 'dualpath[sim]'"
    ) from error

__all__ = [
    "Floats",
    "Ints",
    "Record",
    "Records",
    "compiled",
    "entry_point",
    "sources_digest",
    "structref",
    "types",
]

F = TypeVar("F", bound=Callable[..., Any])

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Record = Any
"""Fields are attributes."""
Records = Any
"""An array of them."""


def compiled(function: F) -> F:
    """For functions that compiled code calls."""
    result: F = njit(function)
    return result


def entry_point(function: F) -> F:
    """For functions that Python calls; kept on disk. It must use `sources_digest()` from its closure."""
    result: F = njit(cache=True)(function)
    return result


def sources_digest() -> str:
    """Of all modules of this package, in order of their names, and of the policy's that the kernel
    compiles."""
    digest = hashlib.sha256()
    for path in [*sorted(Path(__file__).parent.glob("*.py")), Path(quota.__file__)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
