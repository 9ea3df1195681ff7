"""DualPath: KV-cache loading through both sides of a prefill/decode cluster.

Importing this package imports neither torch nor any server library.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
