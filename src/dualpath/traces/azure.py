"""Azure's LLM inference traces: CSV of TIMESTAMP, ContextTokens, GeneratedTokens, one request a line.

They are a real arrival process. As a trace, each request is a session of one turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from importlib.resources.abc import Traversable

from dualpath.base.errors import ConfigError
from dualpath.traces.arrivals import rebased
from dualpath.traces.lines import Line, read_lines
from dualpath.traces.model import AppendPrompt, Session, Turn

__all__ = ["TIME_FIELD", "read", "read_arrivals"]

TIME_FIELD = "TIMESTAMP"
_PROMPT_FIELD = "ContextTokens"
_OUTPUT_FIELD = "GeneratedTokens"


def read(lines: Iterable[Line]) -> tuple[Session, ...]:
    """Raises ConfigError."""
    rows = _rows(lines, (TIME_FIELD, _PROMPT_FIELD, _OUTPUT_FIELD))
    return rebased(_session(line, row) for line, row in rows)


def read_arrivals(file: Traversable) -> tuple[float, ...]:
    """The TIMESTAMP column alone, in seconds from the earliest, in order. Raises ConfigError."""
    times_s = sorted(_seconds(line, row) for line, row in _rows(read_lines(file), (TIME_FIELD,)))
    if not times_s:
        raise ConfigError(f"{file} has no arrivals: expected lines below the header")
    return tuple(each - times_s[0] for each in times_s)


def _rows(lines: Iterable[Line], needed: tuple[str, ...]) -> Iterator[tuple[Line, dict[str, str]]]:
    """Each line below the header, by field."""
    header: list[str] | None = None
    for line in lines:
        cells = [cell.strip() for cell in line.data.decode("utf-8", "replace").split(",")]
        if header is None:
            header = cells
            for name in needed:
                if name not in header:
                    raise line.wrong(
                        f"{name}: expected a column of this name, got {', '.join(header)}"
                    )
        elif len(cells) != len(header):
            raise line.wrong(f"expected {len(header)} cells, got {len(cells)}")
        else:
            yield line, dict(zip(header, cells, strict=True))


def _session(line: Line, row: dict[str, str]) -> Session:
    prompt = AppendPrompt(line.tokens(_PROMPT_FIELD, _whole(line, row, _PROMPT_FIELD)))
    output_tokens = line.tokens(_OUTPUT_FIELD, _whole(line, row, _OUTPUT_FIELD), at_least=0)
    turn = Turn(prompt, max(output_tokens, 1))
    return Session(line.label, (turn,), _seconds(line, row))


def _whole(line: Line, row: dict[str, str], name: str) -> int:
    try:
        return int(row[name])
    except ValueError as error:
        raise line.wrong(f"{name}: expected a whole number, got {row[name]!r}") from error


def _seconds(line: Line, row: dict[str, str]) -> float:
    try:
        at = datetime.fromisoformat(row[TIME_FIELD])
    except ValueError as error:
        raise line.wrong(
            f"{TIME_FIELD}: expected a time such as 2023-11-16 18:15:46.68, got {row[TIME_FIELD]!r}"
        ) from error
    # Without a zone all lines are of one; a fixed one is as good as any, for only differences count.
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
