"""`dualpath version`: what is installed, without importing any library."""

from __future__ import annotations

import argparse
import platform
from importlib import metadata

import dualpath
from dualpath.policy import is_compiled

__all__ = ["add_arguments", "run"]

_LIBRARIES = ("torch", "transformers", "tokenizers", "msgspec", "pyzmq", "fastapi", "uvicorn")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None."""


def run(args: argparse.Namespace) -> int:
    print(f"dualpath {dualpath.__version__}")
    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    print(f"policy {'compiled' if is_compiled() else 'not compiled'}")
    for name in _LIBRARIES:
        print(f"{name} {_version(name)}")
    return 0


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
