"""`dualpath sim`: simulates clusters; finds the command and imports only its module."""

from __future__ import annotations

import argparse
import importlib
from typing import cast

from dualpath.base.errors import ConfigError
from dualpath.cli.main import Command, CommandModule, ExitCode

__all__ = ["COMMANDS", "add_arguments", "run"]

COMMANDS = (
    Command("run", "dualpath.cli.sim_run", "simulate one run and say what it gave"),
    Command(
        "reproduce",
        "dualpath.cli.sim_reproduce",
        "simulate the published evaluation and say how far each number is off",
    ),
    Command(
        "policies",
        "dualpath.cli.sim_policies",
        "try policies on the same cases and say which does better",
    ),
    Command(
        "testbed",
        "dualpath.cli.sim_testbed",
        "predict what `dualpath bench pooling` measures, from measured compute rates",
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    width = max(len(each.name) for each in COMMANDS)
    lines = "\n".join(f"  {each.name:<{width}}  {each.help}" for each in COMMANDS)
    parser.epilog = f"commands:\n{lines}\n\n`dualpath sim COMMAND --help` has the flags of each."
    parser.add_argument("name", nargs="?", metavar="COMMAND", help="What to simulate.")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="Its flags.")


def run(args: argparse.Namespace) -> int:
    names = ", ".join(each.name for each in COMMANDS)
    if args.name is None:
        print(f"dualpath sim COMMAND; there are: {names}")
        return ExitCode.USAGE
    chosen = next((each for each in COMMANDS if each.name == args.name), None)
    if chosen is None:
        raise ConfigError(f"sim: unknown command {args.name!r}; there are: {names}")
    module = cast(CommandModule, importlib.import_module(chosen.module))
    parser = argparse.ArgumentParser(
        prog=f"dualpath sim {chosen.name}",
        description=chosen.help[0].upper() + chosen.help[1:] + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    return module.run(parser.parse_args(args.rest))
