"""From a `Config` class: argparse flags with help, the parsed configuration, and its reference page.

Precedence: flag, then environment variable (where the option names one), then default. Knows no setting.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any, TypeVar

from dualpath.base.config import Config, Option, Unit, format_bytes, options, parse_bytes
from dualpath.base.errors import ConfigError

__all__ = ["add_config_arguments", "config_from_args", "config_reference"]

ConfigT = TypeVar("ConfigT", bound=Config)


def add_config_arguments(parser: argparse.ArgumentParser, config_type: type[Config]) -> None:
    """Add one flag for each field, in the field's group. Absent flags leave no attribute."""
    for name, group_options in groupby(options(config_type), key=lambda each: each.group):
        group = parser.add_argument_group(name)
        for each in group_options:
            _add_argument(group, each)


def config_from_args(
    config_type: type[ConfigT], args: argparse.Namespace, env: Mapping[str, str] = os.environ
) -> ConfigT:
    """The validated configuration; ConfigError names the flag or variable at fault."""
    values: dict[str, object] = {}
    for each in options(config_type):
        if hasattr(args, each.field):
            value = getattr(args, each.field)
            if each.many:
                value = tuple(_parse(each, text, each.flag) for group in value for text in group)
            values[each.field] = _parse(each, value, each.flag) if isinstance(value, str) else value
        elif each.env is not None and each.env in env:
            texts = env[each.env].split() if each.many else [env[each.env]]
            parsed = tuple(_parse(each, text, each.env) for text in texts)
            value = parsed if each.many else parsed[0]
            try:
                values[each.field] = each.checked(value)
            except ConfigError:
                raise each.error(env[each.env], each.env) from None
    return config_type(**values)


def config_reference(config_type: type[Config]) -> str:
    """Markdown tables, one a group: flag, default, what it does."""
    parts: list[str] = []
    for name, group_options in groupby(options(config_type), key=lambda each: each.group):
        parts += [f"## {name}", "", "| flag | default | what it does |", "|---|---|---|"]
        parts += [_reference_row(each) for each in group_options]
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _add_argument(group: argparse._ArgumentGroup, each: Option) -> None:
    if each.positional:
        # Without a type: every value is checked in one place, config_from_args.
        group.add_argument(each.field, metavar=each.flag, help=_help(each))
        return
    if each.type is bool:
        group.add_argument(
            each.flag,
            dest=each.field,
            action=argparse.BooleanOptionalAction,
            default=argparse.SUPPRESS,
            help=_help(each),
        )
        return
    group.add_argument(
        each.flag,
        dest=each.field,
        metavar=_metavar(each),
        default=argparse.SUPPRESS,
        required=each.required,
        help=_help(each),
        **(_MANY if each.many else {}),
    )
    if each.negatable:
        group.add_argument(
            f"--no-{each.flag[2:]}",
            dest=each.field,
            action="store_const",
            const=None,
            default=argparse.SUPPRESS,
            help=f"Turn {each.flag} off.",
        )


# A flag that takes several values may also be repeated.
_MANY: dict[str, Any] = {"nargs": "+", "action": "append"}


def _metavar(each: Option) -> str:
    if each.choices:
        return "{" + ",".join(each.choices) + "}"
    if each.metavar is not None:
        return each.metavar
    return {int: "N", float: "X"}.get(each.type, "TEXT")


def _help(each: Option) -> str:
    text = each.description
    if each.env is not None:
        text += f" Also from the environment: {each.env}."
    if each.example is not None:
        text += f" Example: {each.example}"
    if not each.required and each.default not in (None, (), ""):
        text += f" (default: {_default(each)})"
    # argparse expands % in help texts.
    return text.replace("%", "%%")


def _default(each: Option) -> str:
    if each.secret or each.default in (None, (), ""):
        return "none"
    if isinstance(each.default, tuple):
        return " ".join(map(str, each.default))
    if isinstance(each.default, bool):
        return "on" if each.default else "off"
    if each.unit is Unit.BYTES and isinstance(each.default, int):
        return format_bytes(each.default)
    return str(each.default)


def _parse(each: Option, text: str, origin: str) -> object:
    parsers: dict[type, Callable[[str], object]] = {int: int, float: float, bool: _parse_bool}
    parser = parse_bytes if each.unit is Unit.BYTES else parsers.get(each.type)
    if parser is None:
        return text
    try:
        return parser(text)
    except ValueError:
        raise each.error(text, origin) from None


def _parse_bool(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in words:
        raise ValueError(text)
    return words[text.lower()]


def _reference_row(each: Option) -> str:
    values = f"{_metavar(each)}..." if each.many else _metavar(each)
    flag = f"`{each.flag}`" if each.positional else f"`{each.flag} {values}`"
    if each.type is bool:
        flag = f"`{each.flag}`, `--no-{each.flag[2:]}`"
    if each.negatable:
        flag += f", `--no-{each.flag[2:]}`"
    default = "required" if each.required else f"`{_default(each)}`"
    text = each.description
    if not each.choices and each.bounds:
        text += f" Must be {each.expected}."
    if each.env is not None:
        text += f" Environment: `{each.env}`."
    if each.example is not None:
        text += f" Example: `{each.example}`."
    return "| " + " | ".join(part.replace("|", "\\|") for part in (flag, default, text)) + " |"
