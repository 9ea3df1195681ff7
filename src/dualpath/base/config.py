"""Frozen, validated configuration: one declaration gives the flag, its help, its check and its docs.

A configuration is a `Config` subclass whose fields are annotated with `option(...)`:

    class ServeConfig(Config, frozen=True, kw_only=True):
        port: Annotated[int, option("TCP port of the HTTP server.", group="Server", ge=1)] = 8000

Invariant: an instance that exists is valid, whether it came from flags or from code. This module knows no
command line (`config_cli.py`) and none of the settings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

import msgspec

from dualpath.base.errors import ConfigError
from dualpath.base.ids import GiB, KiB, MiB

__all__ = ["Config", "Option", "Unit", "format_bytes", "option", "options", "parse_bytes"]

_BYTE_UNITS = {
    "": 1,
    "B": 1,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "K": KiB,
    "KIB": KiB,
    "M": MiB,
    "MIB": MiB,
    "G": GiB,
    "GIB": GiB,
    "T": 1024 * GiB,
    "TIB": 1024 * GiB,
}


class Unit(StrEnum):
    """What a number counts, where the flag accepts more than a bare number."""

    BYTES = "bytes"


def option(
    description: str,
    *,
    group: str,
    metavar: str | None = None,
    unit: Unit | None = None,
    env: str | None = None,
    positional: bool = False,
    negatable: bool = False,
    secret: bool = False,
    example: str | None = None,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> msgspec.Meta:
    """Describe one setting.

    `negatable` adds `--no-<flag>` to an optional setting, which sets it to None. `env` names the variable
    that is used when the flag is absent. A `secret` is never shown.
    """
    details = {
        "group": group,
        "metavar": metavar,
        "unit": unit,
        "env": env,
        "positional": positional,
        "negatable": negatable,
        "secret": secret,
        "example": example,
        "bounds": {"ge": ge, "gt": gt, "le": le, "lt": lt},
    }
    return msgspec.Meta(description=description, extra=details)


@dataclass(frozen=True, slots=True)
class Option:
    """One field of a `Config`, as the command line and the documentation see it.

    `type` is the bare type without None, that of one value where there are `many` (a tuple); `required` tells
    that there is no default.
    """

    field: str
    type: type
    choices: tuple[str, ...]
    optional: bool
    required: bool
    default: object
    description: str
    group: str
    metavar: str | None
    unit: Unit | None
    env: str | None
    positional: bool
    negatable: bool
    secret: bool
    example: str | None
    bounds: dict[str, float]
    many: bool = False

    @property
    def flag(self) -> str:
        """As the user writes it: `--max-model-len`, or `MODEL` for a positional."""
        return self.field.upper() if self.positional else "--" + self.field.replace("_", "-")

    @property
    def expected(self) -> str:
        """What a valid value is, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.unit is Unit.BYTES:
            words = "a size such as 512MiB"
        else:
            words = _TYPE_WORDS.get(self.type, self.type.__name__)
        signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
        limits = [f"{signs[name]} {self._shown(limit)}" for name, limit in self.bounds.items()]
        return " ".join([words, " and ".join(limits)]) if limits else words

    def checked(self, value: object) -> object:
        """The value in the field's own type; ConfigError names the flag, what was expected and what came."""
        if value is None and self.optional:
            return None
        if self.many:
            if not isinstance(value, list | tuple):
                raise self.error(value)
            values = tuple(self._checked_one(each) for each in value)
            return value if value == values else values
        return self._checked_one(value)

    def _checked_one(self, value: object) -> object:
        try:
            converted: object = msgspec.convert(value, self.type)
        except msgspec.ValidationError:
            raise self.error(value) from None
        if self.choices and str(converted) not in self.choices:
            raise self.error(value)
        if isinstance(converted, float) and not math.isfinite(converted):
            raise self.error(value)
        if isinstance(converted, int | float) and not isinstance(converted, bool):
            for name, limit in self.bounds.items():
                if not _COMPARE[name](converted, limit):
                    raise self.error(value)
        return converted

    def _shown(self, limit: float) -> str:
        return format_bytes(int(limit)) if self.unit is Unit.BYTES else str(limit)

    def error(self, value: object, origin: str | None = None) -> ConfigError:
        got = "a value that is not shown" if self.secret else repr(value)
        return ConfigError(f"{origin or self.flag}: expected {self.expected}, got {got}")


_TYPE_WORDS: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
}
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "ge": lambda value, limit: value >= limit,
    "gt": lambda value, limit: value > limit,
    "le": lambda value, limit: value <= limit,
    "lt": lambda value, limit: value < limit,
}


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Base of configurations. Construction checks every field and then `check()`."""

    def __post_init__(self) -> None:
        for each in options(type(self)):
            value = getattr(self, each.field)
            checked = each.checked(value)
            if checked is not value:
                msgspec.structs.force_setattr(self, each.field, checked)
        self.check()

    def check(self) -> None:
        """Rules over several fields; raises ConfigError that names the flags. None by default."""

    def __repr__(self) -> str:
        shown = (
            f"{each.field}={'***' if each.secret else repr(getattr(self, each.field))}"
            for each in options(type(self))
        )
        return f"{type(self).__name__}({', '.join(shown)})"


@cache
def options(config_type: type[Config]) -> tuple[Option, ...]:
    """The fields of a configuration in the order of their declaration."""
    return tuple(_option_of(info) for info in msgspec.structs.fields(config_type))


def _option_of(info: msgspec.structs.FieldInfo) -> Option:
    annotation = info.type
    if get_origin(annotation) is not Annotated:
        raise TypeError(f"field {info.name} has no option(...) annotation")
    bare, *metas = get_args(annotation)
    meta = next(each for each in metas if isinstance(each, msgspec.Meta))
    optional = get_origin(bare) in (Union, UnionType)
    if optional:
        (bare,) = (each for each in get_args(bare) if each is not NoneType)
    many = get_origin(bare) is tuple
    if many:
        bare, _ = get_args(bare)
    choices: tuple[str, ...] = ()
    if get_origin(bare) is Literal:
        choices, bare = get_args(bare), str
    elif issubclass(bare, StrEnum):
        choices = tuple(member.value for member in bare)
    details = dict(meta.extra or {})
    bounds = {name: limit for name, limit in details.pop("bounds").items() if limit is not None}
    required = info.default is msgspec.NODEFAULT
    return Option(
        field=info.name,
        type=bare,
        choices=choices,
        optional=optional,
        required=required,
        default=None if required else info.default,
        description=meta.description or "",
        bounds=bounds,
        many=many,
        **details,
    )


def parse_bytes(text: str) -> int:
    """`512MiB`, `4GiB`, `1.5GB` or a bare number of bytes; K, M, G and T alone are powers of 1024.

    Raises ValueError for anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _BYTE_UNITS:
        raise ValueError(f"{text!r} is not a size")
    return int(float(match[1]) * _BYTE_UNITS[match[2].upper()])


def format_bytes(count: int) -> str:
    """In the largest binary unit that divides it: 4294967296 -> 4GiB."""
    for name, factor in (("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if count and count % factor == 0:
            return f"{count // factor}{name}"
    return f"{count}B"
