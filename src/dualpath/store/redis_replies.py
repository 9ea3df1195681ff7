"""What a Redis server's replies mean, in words for people and values for us. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dualpath.base.errors import StoreError
from dualpath.store.resp import ErrorReply, Reply

__all__ = ["count_of", "info_of", "reason_of", "refusal", "unexpected", "why_not_written"]

_ADVICE = {
    "WRONGPASS": "check DUALPATH_REDIS_USERNAME and DUALPATH_REDIS_PASSWORD",
    "NOAUTH": "set DUALPATH_REDIS_PASSWORD",
    "NOPERM": "allow this user the commands and keys that docs/store.md names",
    "OOM": "the server has reached its maxmemory: raise it, or lower --store-capacity below it",
    "MOVED": "this is a node of a cluster: give a server that holds all keys",
    "READONLY": "this is a replica: give the address of its primary",
    "LOADING": "the server still loads its data: try again when it has",
    "MISCONF": "the server cannot save to its disk: look at its log",
    "DENIED": "the server's protected mode admits only its own machine: set a password there",
}


def refusal(error: ErrorReply) -> str:
    """The server's words, and what to do."""
    advice = _ADVICE.get(error.code)
    return f"{error.text} ({advice})" if advice else error.text


def why_not_written(replies: Sequence[Reply]) -> str | None:
    """Why the transaction of a write has not stored the block; None when it has."""
    # What was refused when it was queued says more than EXECABORT.
    for reply in replies:
        if isinstance(reply, ErrorReply):
            return refusal(reply)
    match replies[4]:
        case [_, 1, _]:
            return None
        case [_, 0, _]:
            return "the server took it only after the deadline"
    return unexpected("a transaction", replies[4])


def count_of(reply: Reply) -> int:
    """Raises StoreError for what is no number."""
    if isinstance(reply, int):
        return reply
    raise StoreError(unexpected("a number", reply))


def unexpected(expected: str, got: Reply) -> str:
    """The server's refusal, or what came instead of what was expected."""
    return refusal(got) if isinstance(got, ErrorReply) else f"expected {expected}, got {got!r:.80}"


def info_of(reply: Reply) -> dict[str, str]:
    """INFO as a dictionary; empty where the server does not tell."""
    lines = reply.decode().splitlines() if isinstance(reply, bytes) else []
    return {name: value for name, _, value in (line.partition(":") for line in lines)}


def reason_of(error: Exception) -> str:
    """In the system's words, without an error number."""
    return str(getattr(error, "strerror", None) or error)
