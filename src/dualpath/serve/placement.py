"""Where engines run: read from the file of `--placement`, and looked up for each engine.

Without a placement every engine is a process beside the frontend. With one it is started by a command
of the operator's (`ip netns exec pe0`, `numactl -N 0`, `ssh host`), which must end up executing what
follows it with the standard input it was given, and end when that does. Knows no network.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from dualpath.base.errors import ConfigError
from dualpath.base.ids import GroupId

__all__ = ["EnginePlace", "Placement", "load_placement"]


class EnginePlace(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Where one engine, or each engine of a group, runs.

    `host` is the address on which it listens for other engines, one of its own that they can reach.
    `launch` goes before the engine's command. `threads` replaces `--threads`. `store` is the store's
    address as seen from there, if it is another than the frontend's `--store`.
    """

    host: str = "127.0.0.1"
    launch: tuple[str, ...] = ()
    threads: Annotated[int, msgspec.Meta(ge=1)] | None = None
    store: str | None = None


class Placement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`engines` maps an engine (`pe0`) or a group (`de-node1`) to its place; the engine's own comes first.

    `control_host` is the frontend's address that engines reach; the control plane listens there.
    """

    engines: dict[str, EnginePlace]
    control_host: str = "127.0.0.1"

    def place(self, engine: str, group: GroupId) -> EnginePlace:
        """`engine` is its name without incarnation. Raises ConfigError when it has no place."""
        found = self.engines.get(engine) or self.engines.get(group)
        if found is None:
            raise ConfigError(f"--placement: no place for engine {engine}, nor for group {group}")
        return found

    def check(self, engines: Iterable[tuple[str, GroupId]]) -> None:
        """Raises ConfigError unless every engine has a place and every place an engine."""
        wanted = set[str]()
        for engine, group in engines:
            self.place(engine, group)
            wanted |= {engine, group}
        if unknown := sorted(set(self.engines) - wanted):
            raise ConfigError(
                f"--placement: {', '.join(unknown)}: there is no such engine or group; there are "
                f"{', '.join(sorted(wanted))}"
            )


def load_placement(path: str) -> Placement:
    """Raises ConfigError that names the file and what is wrong in it."""
    try:
        placement = msgspec.json.decode(Path(path).expanduser().read_bytes(), type=Placement)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--placement {path}: {error}") from None
    for host in (placement.control_host, *(each.host for each in placement.engines.values())):
        if _is_wildcard(host):
            raise ConfigError(
                f"--placement {path}: {host!r} is not an address that others can reach; "
                "give the one to listen on"
            )
    return placement


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return not host  # A name otherwise.
