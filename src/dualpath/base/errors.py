"""The one error tree.

A miss is a value, a failure is an exception; our own bugs are never retried.

    DualPathError
    +-- ConfigError            what the operator gave cannot work; says what to change
    |   +-- UnsupportedModel   a model that would give wrong tokens here; says why
    +-- RequestError           what the client sent cannot be served (HTTP 4xx)
    +-- StoreError             a store failed (not: a block is missing)
    +-- TransferError          KV did not arrive from a peer
    |   +-- PeerLost           the peer's process or connection is gone
    |   +-- LeaseLost          the peer no longer holds the blocks for this request
    |   +-- DeadlineExceeded   no answer in time
    +-- EngineLost             no engine is left that could serve
    +-- InvariantViolation     a bug of ours; the process stops
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "DeadlineExceeded",
    "DualPathError",
    "EngineLost",
    "InvariantViolation",
    "LeaseLost",
    "PeerLost",
    "RequestError",
    "StoreError",
    "TransferError",
    "UnsupportedModel",
]


class DualPathError(Exception):
    """Root of every error this package raises on purpose."""


class ConfigError(DualPathError):
    """A setting, file or environment value that cannot work. The message says what to change."""


class UnsupportedModel(ConfigError):
    """The model needs something this engine cannot do right. The message says what."""


class RequestError(DualPathError):
    """A client's request that cannot be served as sent.

    `status` is the HTTP status (4xx), `param` the field at fault, `code` a stable machine-readable word.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class StoreError(DualPathError):
    """The store failed as a whole. A missing or damaged block is not this, but a value."""


class TransferError(DualPathError):
    """KV did not arrive from a peer; the request is attempted again."""


class PeerLost(TransferError):
    """The peer's process or connection is gone."""


class LeaseLost(TransferError):
    """The peer no longer holds the blocks under the stamp this request was given."""


class DeadlineExceeded(TransferError):
    """No completion before the deadline."""


class EngineLost(DualPathError):
    """An engine that held the request is gone and none is left to redo it."""


class InvariantViolation(DualPathError):
    """A bug of ours. Never caught to go on; the process stops with it."""
