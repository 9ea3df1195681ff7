"""That extensions compiled from the policy's modules (`DUALPATH_COMPILE=1`, see setup.py) are those of the
sources beside them, and what the compiler must be told.

Python prefers an extension to the source beside it, so that who edits the source would go on running what it
was. In a checkout, importing the package fails then. Elsewhere nothing is looked at: the times of installed
files say when they were installed.
"""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

try:
    from mypy_extensions import mypyc_attr
except ImportError:

    def mypyc_attr(*attrs: str, **kwattrs: object) -> Any:  # type: ignore[misc]
        """A declaration for the compiler alone."""
        return lambda declared: declared


__all__ = ["check_extensions", "mypyc_attr"]


def check_extensions(package: Path) -> None:
    """Raises ImportError when an extension that this interpreter would load is older than its source."""
    if not package.parents[2].joinpath("setup.py").exists():
        return
    for source in package.glob("*.py"):
        for suffix in EXTENSION_SUFFIXES:
            extension = source.with_name(source.stem + suffix)
            if extension.exists() and extension.stat().st_mtime_ns < source.stat().st_mtime_ns:
                raise ImportError(
                    f"{source} was edited after {extension.name} was compiled from it: run `make compile`, "
                    f"or `make uncompile` to run the source"
                )


# Imported before any module that may be compiled.
check_extensions(Path(__file__).parent)
