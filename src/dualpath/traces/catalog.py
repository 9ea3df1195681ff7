"""From a name to a trace: a file of any format, a directory, a trace of the package, the generator.

The formats are read in modules of their own; here is decided which. Invariant: a trace that is returned has
at least one session.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from types import MappingProxyType

import msgspec

from dualpath.base.errors import ConfigError
from dualpath.traces import azure, coding_agent, full_text, generated, mooncake, trajectories
from dualpath.traces.lines import MAX_LINE_BYTES, Line, read_lines
from dualpath.traces.model import Session, Trace

__all__ = ["BUILT_IN", "FORMATS", "BuiltInTrace", "open_trace"]

_SUFFIXES = tuple(f"{suffix}{packed}" for suffix in (".jsonl", ".json") for packed in ("", ".gz"))


@dataclass(frozen=True, slots=True)
class BuiltInTrace:
    """`path` below the package's data directory, where an ATTRIBUTION lies beside it."""

    path: str
    format: str
    about: str


BUILT_IN: Mapping[str, BuiltInTrace] = MappingProxyType(
    {
        "coding-agent": BuiltInTrace(
            "coding_agent/sessions.jsonl", "coding-agent", "62 recorded sessions of coding agents"
        ),
        "paper-like-64k": BuiltInTrace(
            "coding_agent/rescaled_64k.jsonl",
            "trajectories",
            "211 recorded sessions, rescaled towards the paper's 64K trace",
        ),
        "mooncake-conversation": BuiltInTrace(
            "mooncake/conversation.jsonl", "mooncake", "2,000 requests of a chat service"
        ),
        "mooncake-synthetic": BuiltInTrace(
            "mooncake/synthetic.jsonl", "mooncake", "1,500 requests made from public datasets"
        ),
        "azure-conversation": BuiltInTrace(
            "azure/conversation.csv",
            "azure",
            "5,000 requests of a chat service, for their arrivals",
        ),
        "miniswe": BuiltInTrace(
            "miniswe", "full-text", "3 sessions of a software-engineering agent in full text"
        ),
        "smoke": BuiltInTrace(
            "smoke/trajectories.jsonl", "trajectories", "6 short made-up sessions for a first try"
        ),
    }
)
"""By name."""

FORMATS = ("mooncake", "coding-agent", "trajectories", "full-text", "azure")


def open_trace(
    name: str | Path,
    *,
    trace_format: str | None = None,
    block_tokens: int = mooncake.BLOCK_TOKENS,
    generated_sessions: int = generated.SESSIONS,
    seed: int = 0,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> Trace:
    """The trace of a built-in name, `generated:LENGTH`, or a path; a `Path` is always a path.

    A file holds lines (`.jsonl`, `.csv`) or one session (`.json`), and may be packed (`.gz`); of a directory
    all `.jsonl` and `.json` files are read, by name, as one trace of one format. The format is that of the
    first line unless `trace_format` says which of FORMATS it is. `block_tokens`: of an id in Mooncake's
    format. `generated_sessions` and `seed` are for the generator, LENGTH is such as 64k or 40000. Raises
    ConfigError that names file and line.
    """
    if trace_format is not None and trace_format not in FORMATS:
        raise ConfigError(
            f"trace format: expected one of {', '.join(FORMATS)}, got {trace_format!r}"
        )
    if block_tokens < 1:
        raise ConfigError(f"block tokens: expected a whole number >= 1, got {block_tokens}")
    source: Traversable
    if isinstance(name, str) and name.startswith(generated.PREFIX):
        sessions = generated.generate(
            generated.parse_length(name.removeprefix(generated.PREFIX)), generated_sessions, seed
        )
        return Trace(name, "generated", sessions)
    if isinstance(name, str) and name in BUILT_IN:
        built_in = BUILT_IN[name]
        source = resources.files(__package__) / "data"
        for part in built_in.path.split("/"):
            source = source / part
        trace_format = built_in.format
    else:
        source = _existing(name)
    files = _files(source)
    lines = itertools.chain.from_iterable(
        read_lines(file, max_line_bytes, file.name if len(files) > 1 else "") for file in files
    )
    return Trace(str(name), *_read(source, lines, trace_format, block_tokens))


def _existing(name: str | Path) -> Path:
    path = Path(name).expanduser()
    if not path.exists():
        raise ConfigError(
            f"trace {str(name)!r}: there is no such file or directory, and the traces with a name are"
            f" {', '.join(BUILT_IN)} and {generated.PREFIX}LENGTH"
        )
    return path


def _files(source: Traversable) -> list[Traversable]:
    if not source.is_dir():
        return [source]
    files = [each for each in source.iterdir() if each.name.endswith(_SUFFIXES)]
    if not files:
        raise ConfigError(f"{source} has no .jsonl or .json files with sessions")
    return sorted(files, key=lambda each: each.name)


def _read(
    source: Traversable, lines: Iterator[Line], trace_format: str | None, block_tokens: int
) -> tuple[str, tuple[Session, ...]]:
    """The format, and the sessions."""
    first = next(lines, None)
    if first is None:
        raise ConfigError(f"{source} is empty: expected a trace")
    found = trace_format or _detect(first)
    readers: dict[str, Callable[[Iterator[Line]], tuple[Session, ...]]] = {
        "mooncake": lambda lines: mooncake.read(lines, block_tokens),
        "coding-agent": coding_agent.read,
        "trajectories": trajectories.read,
        "full-text": full_text.read,
        "azure": azure.read,
    }
    sessions = readers[found](itertools.chain([first], lines))
    if not sessions:
        raise ConfigError(f"{source} has no requests")
    return found, sessions


_FORMAT_OF_FIELD = {
    "requests": "coding-agent",
    "turns": "trajectories",
    "input_length": "mooncake",
    "text_input": "mooncake",
    "input": "full-text",
}
_any_decoder = msgspec.json.Decoder(list[msgspec.Raw] | dict[str, msgspec.Raw])


def _detect(first: Line) -> str:
    if azure.TIME_FIELD.encode() in first.data.split(b"\n", 1)[0].split(b","):
        return "azure"
    value = first.decode(_any_decoder)
    if isinstance(value, list):
        return "trajectories"
    for field, trace_format in _FORMAT_OF_FIELD.items():
        if field in value:
            return trace_format
    raise first.wrong(
        f"expected a trace with one of the fields {', '.join(_FORMAT_OF_FIELD)},"
        f" got {', '.join(value) or 'none'}"
    )
