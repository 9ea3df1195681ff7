"""The `dualpath` command: finds the subcommand, imports only its module, maps errors to exit codes.

Exit codes: 0 done; 1 it failed; 2 the command line or the configuration is wrong; 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import dualpath
from dualpath.base.errors import ConfigError, DualPathError

__all__ = ["COMMANDS", "Command", "CommandModule", "ExitCode", "main"]

_EPILOG = """\
examples:
  dualpath serve tiny                                  a server that needs no download, on port 8000
  dualpath serve smollm2 --prefill 2 --decode 2        a real 135M model on four engine processes
  dualpath serve DIR --store /mnt/nvme/kv --read-path split
  dualpath bench --list                                what can be measured
  dualpath plan --model deepseek-v3.2 --gpu h800 --nodes 6 --trace paper:64k
  dualpath COMMAND --help                              all flags of a command
"""


class ExitCode:
    """What the process ends with."""

    OK = 0
    FAILED = 1
    USAGE = 2
    INTERRUPTED = 130


class CommandModule(Protocol):
    """What the module of a subcommand provides."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand; `module` is imported only when the command is used."""

    name: str
    module: str
    help: str


COMMANDS = (
    Command(
        "serve",
        "dualpath.cli.serve",
        "serve a model to OpenAI clients on prefill and decode engines",
    ),
    Command(
        "router", "dualpath.cli.router", "route OpenAI clients to pairs of vLLM servers, or to any"
    ),
    Command("demo", "dualpath.cli.demo", "start a server, talk to it and replay agent sessions"),
    Command("bench", "dualpath.cli.bench", "measure one part of the system"),
    Command("plan", "dualpath.cli.plan", "how to divide a cluster, and what that gives"),
    Command("sim", "dualpath.cli.sim", "simulate a cluster, and check the simulator"),
    Command(
        "testbed",
        "dualpath.cli.testbed",
        "a cluster with bandwidth limits on this machine",
    ),
    Command("qos", "dualpath.cli.qos", "print or check the traffic classes of a network"),
    Command("model", "dualpath.cli.model", "print the directory of a model's files"),
    Command("version", "dualpath.cli.version", "versions of dualpath and of what it runs on"),
    Command(
        "docs", "dualpath.cli.docs", "write the reference pages that are generated from the code"
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((each for each in COMMANDS if arguments and each.name == arguments[0]), None)
    try:
        parser = _parser(chosen)
        args = parser.parse_args(arguments)
        if chosen is None:
            parser.print_help()
            return ExitCode.USAGE
        return _module(chosen).run(args)
    except SystemExit as error:
        # argparse ends so, after it printed what it had to say.
        return error.code if isinstance(error.code, int) else ExitCode.FAILED
    except ConfigError as error:
        print(f"dualpath: error: {error}", file=sys.stderr)
        return ExitCode.USAGE
    except DualPathError as error:
        print(f"dualpath: {type(error).__name__}: {error}", file=sys.stderr)
        return ExitCode.FAILED
    except ModuleNotFoundError as error:
        package = (error.name or "dualpath").partition(".")[0]
        if package == "dualpath":
            raise
        print(
            f"dualpath: error: this needs the package {package}, which is not installed; "
            "pip install 'dualpath[demo]' brings all that the commands use",
            file=sys.stderr,
        )
        return ExitCode.USAGE
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`dualpath bench --list | head -1`).
        sys.stdout = None
        return ExitCode.FAILED


def _parser(chosen: Command | None) -> argparse.ArgumentParser:
    """All commands with one line of help each; only the chosen one with its arguments."""
    parser = argparse.ArgumentParser(
        prog="dualpath",
        description="KV-cache loading through both sides of a prefill/decode cluster.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"dualpath {dualpath.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    for each in COMMANDS:
        subparser = commands.add_parser(
            each.name,
            help=each.help,
            description=each.help[0].upper() + each.help[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if each is chosen:
            _module(each).add_arguments(subparser)
    return parser


def _module(command: Command) -> CommandModule:
    return cast(CommandModule, importlib.import_module(command.module))


if __name__ == "__main__":
    sys.exit(main())
