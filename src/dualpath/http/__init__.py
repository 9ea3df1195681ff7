"""HTTP/1.1 as a client: many exchanges at once from one core. Knows no JSON, no events and no API."""

from dualpath.http.answer import Flow, Head, HttpFailed, PulledAnswer, Receiver
from dualpath.http.connections import ConnectionPool, raise_descriptor_limit

__all__ = [
    "ConnectionPool",
    "Flow",
    "Head",
    "HttpFailed",
    "PulledAnswer",
    "Receiver",
    "raise_descriptor_limit",
]
