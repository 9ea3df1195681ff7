"""`dualpath testbed`: builds, uses, shows and removes clusters of network namespaces on this machine."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from dualpath.base.config_cli import add_config_arguments, config_from_args
from dualpath.base.errors import ConfigError
from dualpath.cli.server_log import log_to_stderr
from dualpath.qos.rates import format_rate
from dualpath.serve.config import ServeConfig, TransferKind
from dualpath.testbed.bed import Testbed, existing_testbeds, take_down
from dualpath.testbed.config import TestbedConfig
from dualpath.testbed.placement import write_placement
from dualpath.testbed.unprivileged import become_root_of_a_user_namespace

__all__ = ["ACTIONS", "add_arguments", "run"]

_EPILOG = """\
examples:
  dualpath testbed serve --topology 1P2D --snic 400mbit smollm2
      Builds it, serves on it as `dualpath serve` does, removes it.
  dualpath testbed run --topology 1P1D --node pe0 -- ip addr
      Builds it, runs a command on a node (or beside the frontend), removes it.
  dualpath testbed up --topology 2P1D && dualpath testbed status && dualpath testbed down
      Leaves it there in between; prints what `dualpath serve` needs to use it.

`serve` and `run` need no root where user namespaces are allowed. More in docs/testbed.md.
"""

_ENDING_S = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)
    for each in ACTIONS:
        action = actions.add_parser(
            each.name,
            help=each.help,
            description=each.help[0].upper() + each.help[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        each.add_arguments(action)


def run(args: argparse.Namespace) -> int:
    chosen = next(each for each in ACTIONS if each.name == args.action)
    return chosen.run(args)


def _add_testbed(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, TestbedConfig)


def _up(args: argparse.Namespace) -> int:
    bed = Testbed(config_from_args(TestbedConfig, args))
    _require_root("up")
    bed.leave_running()
    serve = [
        "dualpath", "serve", "MODEL",
        "--prefill", str(bed.topology.prefill),
        "--decode", str(bed.topology.decode),
        "--placement", str(write_placement(bed)),
        "--store", bed.store_address,
        "--transfer", TransferKind.TCP.value,
    ]  # fmt: skip
    print(f"testbed {bed.name} is up: {', '.join(bed.nodes)}")
    print(f"serve on it:   {shlex.join(serve)}")
    print(f"enter a node:  {shlex.join(next(iter(bed.nodes.values())).command())}")
    print(f"remove it:     dualpath testbed down {bed.name}")
    return 0


def _add_down(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="Which one; not needed if there is only one."
    )
    parser.add_argument("--all", action="store_true", help="Every testbed of this machine.")


def _down(args: argparse.Namespace) -> int:
    _require_root("down")
    names = [state.name for state, _ in existing_testbeds()]
    if args.name is not None:
        if args.name not in names:
            raise ConfigError(f"no testbed {args.name}; there are: {', '.join(names) or 'none'}")
        names = [args.name]
    elif len(names) > 1 and not args.all:
        raise ConfigError(f"which one? there are {', '.join(names)}; --all removes them all")
    for name in names:
        take_down(name)
        print(f"testbed {name} is removed")
    if not names:
        print("there is no testbed")
    return 0


def _status(args: argparse.Namespace) -> int:
    _require_root("status")
    for state, complete in existing_testbeds():
        if state.owner is None:
            life = "until it is taken down"
        elif state.orphaned:
            life = f"left behind by process {state.owner.pid}, which died"
        else:
            life = f"of process {state.owner.pid}"
        rates = f"snic {format_rate(state.snic_bits_s)}, cnic {format_rate(state.cnic_bits_s)}"
        broken = "" if complete else ", INCOMPLETE: namespaces are missing"
        print(f"{state.name}  {state.topology}  {rates}  {life}{broken}")
    return 0


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.usage = "dualpath testbed run [flags] -- COMMAND ..."
    _add_testbed(parser)
    parser.add_argument(
        "--node", metavar="NAME", help="Run COMMAND on this node; beside the frontend if absent."
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="Finds DUALPATH_TESTBED (its name), DUALPATH_TESTBED_PLACEMENT and DUALPATH_TESTBED_STORE "
        "in its environment.",
    )


def _run(args: argparse.Namespace) -> int:
    config = config_from_args(TestbedConfig, args)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ConfigError("testbed run: give the command after --")
    _enter_privileges()
    with Testbed(config) as bed:
        if args.node is not None:
            if args.node not in bed.nodes:
                raise ConfigError(f"--node {args.node}: there are {', '.join(bed.nodes)}")
            command = bed.nodes[args.node].command(command)
        environment = {
            **os.environ,
            "DUALPATH_TESTBED": bed.name,
            "DUALPATH_TESTBED_PLACEMENT": str(write_placement(bed)),
            "DUALPATH_TESTBED_STORE": bed.store_address,
        }
        try:
            process = subprocess.Popen(command, env=environment)
        except OSError as error:
            raise ConfigError(f"cannot run {command[0]}: {error}") from None
        try:
            code = process.wait()
        finally:
            _end(process)
    return 128 - code if code < 0 else code


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.usage = "dualpath testbed serve [flags of the testbed and of `dualpath serve`] MODEL"
    _add_testbed(parser)
    add_config_arguments(parser, ServeConfig)


def _serve(args: argparse.Namespace) -> int:
    bed_config = config_from_args(TestbedConfig, args)
    for field in ("prefill", "decode", "placement", "store"):
        if hasattr(args, field):
            raise ConfigError(
                f"--{field}: the testbed decides it (--topology, --engines-per-group)"
            )
    if not hasattr(args, "transfer"):
        args.transfer = TransferKind.TCP.value
    elif args.transfer == TransferKind.SHM.value:
        raise ConfigError("--transfer shm: nodes of a testbed share no memory; use tcp")
    bed = Testbed(bed_config)
    engines = int(getattr(args, "engines_per_group", 1))
    args.prefill = bed.topology.prefill * engines
    args.decode = bed.topology.decode * engines
    config_from_args(ServeConfig, args)  # What is wrong is said before anything is built.
    _enter_privileges()
    with bed:
        args.placement = str(write_placement(bed))
        args.store = bed.store_address
        config = config_from_args(ServeConfig, args)
        log_to_stderr(config.log_level)
        # Imported here so that the other actions need no server library.
        from dualpath.serve.app import run as run_server

        return run_server(config)


def _require_root(action: str) -> None:
    if os.geteuid() != 0:
        raise ConfigError(
            f"testbed {action} needs root: what an unprivileged user makes dies with the command that "
            "made it; use `dualpath testbed run` or `dualpath testbed serve`"
        )


def _enter_privileges() -> None:
    """From here on this process may make namespaces, and a SIGTERM removes what it made."""
    if os.geteuid() != 0:
        print(
            f"not root: all is in a user namespace; from outside it is reached by\n"
            f"  nsenter --user --net --preserve-credentials --target {os.getpid()} COMMAND",
            file=sys.stderr,
            flush=True,
        )
        become_root_of_a_user_namespace()
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """As Ctrl-C: the testbed is removed on the way out."""
    raise KeyboardInterrupt


def _end(process: subprocess.Popen[bytes]) -> None:
    """Nothing when it has ended; after Ctrl-C, which it got too, it has time to."""
    for end in (process.terminate, process.kill):
        if process.poll() is not None:
            return
        end()
        try:
            process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            continue


@dataclass(frozen=True, slots=True)
class _Action:
    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


ACTIONS = (
    _Action("serve", "build a testbed and serve a model on it", _add_serve, _serve),
    _Action("run", "build a testbed, run a command, remove the testbed", _add_run, _run),
    _Action("up", "build a testbed that stays until it is taken down", _add_testbed, _up),
    _Action("down", "end all processes of a testbed and remove it", _add_down, _down),
    _Action("status", "list the testbeds of this machine", lambda parser: None, _status),
)
