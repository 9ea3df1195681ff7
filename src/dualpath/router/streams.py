"""Cuts a stream of server-sent events only between events, so that what follows a broken one can be read.

Pure. Invariant: all that is fed comes out, in order, as soon as its event is complete.
"""

from __future__ import annotations

__all__ = ["WholeEvents"]

_HELD_LIMIT_BYTES = 1024 * 1024
"""What is no event stream, whatever it says it is, is not held back for ever."""


class WholeEvents:
    """Bytes in, whole events out. Line ends are LF or CR LF."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """The events that are complete now; b"" when none is."""
        if self._held:
            data = self._held + data
        end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\r\n\r\n") + 4)
        if end < 2 or (end < 4 and data[:2] != b"\n\n"):
            end = 0
        if len(data) - end > _HELD_LIMIT_BYTES:
            end = len(data)
        self._held = data[end:]
        return data[:end] if self._held else data

    def rest(self) -> bytes:
        """What is left when the stream ends well: an event without its empty line."""
        rest, self._held = self._held, b""
        return rest
