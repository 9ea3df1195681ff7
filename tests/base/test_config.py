"""One declaration gives the flag, its help, its check and its documentation."""

from __future__ import annotations

import argparse
from enum import StrEnum
from typing import Annotated, Literal

import msgspec
import pytest

from dualpath.base.config import Config, Unit, format_bytes, option, options, parse_bytes
from dualpath.base.config_cli import add_config_arguments, config_from_args, config_reference
from dualpath.base.errors import ConfigError


class Colour(StrEnum):
    RED = "red"
    LIGHT_BLUE = "light-blue"


class Example(Config, frozen=True, kw_only=True):
    name: Annotated[str, option("The name.", group="First", positional=True)]
    port: Annotated[int, option("A port.", group="First", ge=0, le=65535)] = 80
    share: Annotated[float, option("100% is 1.", group="First", gt=0, lt=2)] = 0.5
    colour: Annotated[Colour, option("A colour.", group="First")] = Colour.RED
    mode: Annotated[Literal["a", "b"], option("A mode.", group="Second")] = "a"
    size: Annotated[int, option("A size.", group="Second", unit=Unit.BYTES, ge=1024)] = 4096
    limit: Annotated[int | None, option("A limit.", group="Second", ge=1)] = None
    quick: Annotated[bool, option("Be quick.", group="Second")] = True
    store: Annotated[str | None, option("A | place.", group="Second", negatable=True)] = "here"
    key: Annotated[str | None, option("A key.", group="Second", env="EXAMPLE_KEY", secret=True)] = (
        None
    )
    retries: Annotated[int, option("Retries.", group="Second", env="EXAMPLE_RETRIES", ge=0)] = 3
    peers: Annotated[
        tuple[int, ...], option("Peers.", group="Second", env="EXAMPLE_PEERS", metavar="PEER", ge=1)
    ] = ()

    def check(self) -> None:
        if self.limit == self.port:
            raise ConfigError("--limit must not be --port")


def parse(*arguments: str, env: dict[str, str] | None = None) -> Example:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_config_arguments(parser, Example)
    return config_from_args(Example, parser.parse_args(arguments), env or {})


def test_defaults():
    assert parse("x") == Example(name="x")


EVERY_FLAG = (
    "x --port 0 --share 1.5 --colour light-blue --mode b --size 2MiB --limit 7 "
    "--no-quick --no-store --key k --retries 0"
)


def test_every_flag_arrives_in_its_type():
    config = parse(*EVERY_FLAG.split())
    assert config == Example(
        name="x",
        port=0,
        share=1.5,
        colour=Colour.LIGHT_BLUE,
        mode="b",
        size=2 * 1024 * 1024,
        limit=7,
        quick=False,
        store=None,
        key="k",
        retries=0,
    )
    assert config.colour is Colour.LIGHT_BLUE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--port 70000", r"--port: expected a whole number >= 0 and <= 65535, got 70000"),
        ("--port -1", "--port: expected a whole number .* got -1"),
        ("--port 1.5", "--port: expected a whole number .* got '1.5'"),
        ("--share 2", "--share: expected a number > 0 and < 2, got 2.0"),
        ("--share nan", "--share: expected a number"),
        ("--share inf", "--share: expected a number"),
        ("--colour green", "--colour: expected one of red, light-blue, got 'green'"),
        ("--mode c", "--mode: expected one of a, b, got 'c'"),
        ("--size 1", "--size: expected a size such as .* got 1"),
        ("--size 5parsecs", "--size: expected a size such as .* got '5parsecs'"),
        ("--limit 0", "--limit: expected a whole number >= 1, got 0"),
        ("--limit 80", "--limit must not be --port"),
        ("--peers 1 0", "--peers: expected a whole number >= 1, got 0"),
        ("--peers 1 x", "--peers: expected a whole number .* got 'x'"),
    ],
)
def test_wrong_flags_say_what_was_expected_and_what_came(arguments, message):
    with pytest.raises(ConfigError, match=message):
        parse("x", *arguments.split())


def test_a_flag_of_many_values_takes_them_together_and_apart():
    assert parse("x", "--peers", "1", "2", "--peers", "3").peers == (1, 2, 3)
    assert parse("x", env={"EXAMPLE_PEERS": "4  5"}).peers == (4, 5)
    assert parse("x").peers == ()
    assert Example(name="x", peers=[6]).peers == (6,)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="EXAMPLE_PEERS: expected a whole number >= 1, got '4 0'"):
        parse("x", env={"EXAMPLE_PEERS": "4 0"})
    with pytest.raises(ConfigError, match="--peers"):
        Example(name="x", peers=7)  # type: ignore[arg-type]


def test_construction_in_code_is_checked_too():
    with pytest.raises(ConfigError, match="--port"):
        Example(name="x", port=-1)
    with pytest.raises(ConfigError, match="--port"):
        Example(name="x", port="80")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--quick"):
        Example(name="x", quick=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="NAME"):
        Example(name=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--limit must not"):
        msgspec.structs.replace(Example(name="x"), limit=80)
    assert Example(name="x", colour="red").colour is Colour.RED  # type: ignore[arg-type]
    assert Example(name="x", share=1).share == 1.0


def test_environment_comes_after_the_flag():
    env = {"EXAMPLE_RETRIES": "5", "EXAMPLE_KEY": "k"}
    assert parse("x", env=env).retries == 5
    assert parse("x", env=env).key == "k"
    assert parse("x", "--retries", "1", env=env).retries == 1


@pytest.mark.parametrize("value", ["", "many", "-1"])
def test_wrong_environment_is_an_error_that_names_the_variable(value):
    with pytest.raises(ConfigError, match=r"EXAMPLE_RETRIES: expected a whole number >= 0, got '"):
        parse("x", env={"EXAMPLE_RETRIES": value})


def test_secrets_are_not_shown():
    config = Example(name="x", key="hunter2")
    assert "hunter2" not in repr(config)
    with pytest.raises(ConfigError) as caught:
        Example(name="x", key=b"hunter2")  # type: ignore[arg-type]
    assert "hunter2" not in str(caught.value)


def test_help_has_groups_defaults_and_choices():
    parser = argparse.ArgumentParser(prog="example")
    add_config_arguments(parser, Example)
    text = parser.format_help()
    for words in ("First:", "Second:", "{red,light-blue}", "(default: 4KiB)", "100% is 1."):
        assert words in text
    assert "(default: none)" not in text


def test_reference_has_every_flag():
    text = config_reference(Example)
    for each in options(Example):
        assert each.flag in text
    assert "| `--store TEXT`, `--no-store` | `here` | A \\| place. |" in text
    assert "Environment: `EXAMPLE_KEY`" in text
    assert "| `--peers PEER...` | `none` | Peers." in text
    assert "Must be a whole number >= 0 and <= 65535." in text
    assert text.count("\n## ") + text.startswith("## ") == 2


def test_a_field_without_option_is_refused():
    class Bare(Config, frozen=True, kw_only=True):
        x: int = 1

    with pytest.raises(TypeError, match="x has no option"):
        Bare()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("512", 512),
        ("1K", 1024),
        ("1kb", 1000),
        ("1.5GiB", 3 * 2**29),
        ("2 TB", 2 * 10**12),
    ],
)
def test_sizes(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "-1", "1X", "GiB", "1e3", "0x10"])
def test_wrong_sizes(text):
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 2**20, 3 * 2**30, 2**30 + 1])
def test_formatted_sizes_are_read_back(count):
    assert parse_bytes(format_bytes(count)) == count
