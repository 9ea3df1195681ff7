"""Lines of trace files, one JSON value each, and the errors that say where one is wrong.

Knows no format. Invariants: a line is never longer than the limit, in memory as well; every error is a
ConfigError that begins with the file and the line's number (counted from 1, blank lines included).
"""

from __future__ import annotations

import gzip
import itertools
import math
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import PurePath
from typing import IO, TypeVar, cast

import msgspec

from dualpath.base.errors import ConfigError
from dualpath.base.ids import MiB

__all__ = ["MAX_LINE_BYTES", "MAX_TOKENS", "Line", "opened", "read_lines"]

MAX_LINE_BYTES = 64 * MiB
MAX_TOKENS = 2**27
"""More than any model's window: a greater length is a broken line, not a request."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_WHOLE_FILE = ".json"
_AT = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<field>[^`]*)`$", re.DOTALL)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Line:
    """`file`: the name of its file, `number` from 1 on; 0: the line is the whole file. `group`: what tells
    its file from others that are read as one trace; "": it is the only one."""

    file: str
    number: int
    data: bytes
    group: str = ""

    @property
    def where(self) -> str:
        return f"{self.file} line {self.number}" if self.number else self.file

    @property
    def stem(self) -> str:
        """The file's name without directory and suffixes."""
        return PurePath(PurePath(self.file).name.removesuffix(".gz")).stem

    @property
    def label(self) -> str:
        """A name for a session of this line that has none."""
        return f"{self.group} line {self.number}".strip() if self.number else self.stem

    def wrong(self, reason: str) -> ConfigError:
        """To be raised. `reason` names the field, what was expected and what it is."""
        return ConfigError(f"{self.where}: {reason}")

    def decode(self, decoder: msgspec.json.Decoder[_T]) -> _T:
        try:
            return decoder.decode(self.data)
        except msgspec.MsgspecError as error:
            at = _AT.match(str(error))
            reason = f"{at['field'] or 'value'}: {at['what']}" if at else str(error)
            raise self.wrong(reason.replace("`", "")) from error
        except RecursionError as error:
            raise self.wrong("nested too deep") from error

    def tokens(self, field: str, value: int | None, at_least: int = 1) -> int:
        """`value`, if it can be a number of tokens."""
        if value is None or not at_least <= value <= MAX_TOKENS:
            got = "nothing" if value is None else value
            raise self.wrong(
                f"{field}: expected a whole number of {at_least} to {MAX_TOKENS}, got {got}"
            )
        return value

    def seconds(self, field: str, value: float, unit_s: float = 1.0) -> float:
        """`value` times `unit_s`, if it can be a duration."""
        if not (value >= 0 and math.isfinite(value)):
            raise self.wrong(f"{field}: expected a number >= 0, got {value:g}")
        return value * unit_s


def read_lines(
    file: Traversable, max_line_bytes: int = MAX_LINE_BYTES, group: str = ""
) -> Iterator[Line]:
    """The lines that are not blank. Of a `.json` file all is one line; `.gz` is unpacked.

    Raises ConfigError, also while it is iterated.
    """
    name = str(file)
    with opened(file) as stream:
        if file.name.removesuffix(".gz").endswith(_WHOLE_FILE):
            data = stream.read(max_line_bytes + 1)
            yield Line(name, 0, _limited(name, data, max_line_bytes), group)
            return
        for number in itertools.count(1):
            data = stream.readline(max_line_bytes + 1)
            if not data:
                return
            data = _limited(f"{name} line {number}", data, max_line_bytes)
            line = Line(name, number, data, group)
            if line.data.strip():
                yield line


@contextmanager
def opened(file: Traversable) -> Iterator[IO[bytes]]:
    """For reading, unpacked. What is wrong with the file, then or later, is a ConfigError that names it."""
    try:
        with file.open("rb") as raw:
            if file.name.endswith(".gz"):
                with gzip.GzipFile(fileobj=raw) as unpacked:
                    yield cast(IO[bytes], unpacked)
            else:
                yield raw
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{file} cannot be read: {reason}") from error


def _limited(where: str, data: bytes, limit_bytes: int) -> bytes:
    if len(data) > limit_bytes:
        raise ConfigError(f"{where}: expected at most {limit_bytes} bytes, got more")
    return data.removeprefix(_BYTE_ORDER_MARK)
