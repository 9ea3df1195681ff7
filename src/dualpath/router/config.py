"""What `dualpath router` can be told. The flags, their help and docs/router-flags.md come from here.

Knows nothing of how the settings are used. Times are in seconds, lengths in tokens, sizes in bytes.
"""

from __future__ import annotations

from typing import Annotated

from dualpath.base.config import Config, Unit, option
from dualpath.base.errors import ConfigError
from dualpath.base.ids import MiB
from dualpath.policy.config import PolicyConfig, ReadPlanKind, SchedulerKind
from dualpath.router.address import EXAMPLE, ServerAddress
from dualpath.serve.config import LogLevel

__all__ = ["RouterConfig"]

_SERVERS = "Servers"
_SCHEDULING = "Scheduling"
_HTTP = "HTTP server"
_OPERATION = "Operation"
_NO_LIMIT = 2**62


class RouterConfig(Config, frozen=True, kw_only=True):
    """Either pairs, `prefill` and `decode`, or servers that do both, `server`."""

    prefill: Annotated[
        tuple[str, ...],
        option(
            "Prefill servers: vLLM with DualPathConnector, by their base URLs without /v1. `#kv=PORT` or "
            "`#kv=HOST:PORT` after one says where its KV endpoint is, if not at --kv-port of its host.",
            group=_SERVERS,
            metavar="URL",
            example=f"--prefill {EXAMPLE}",
        ),
    ] = ()
    decode: Annotated[
        tuple[str, ...],
        option("Decode servers, written alike.", group=_SERVERS, metavar="URL"),
    ] = ()
    server: Annotated[
        tuple[str, ...],
        option(
            "Instead of pairs: servers that do both, such as plain vLLM or `dualpath serve`. Requests are "
            "balanced over them, and no KV goes between them.",
            group=_SERVERS,
            metavar="URL",
        ),
    ] = ()
    kv_port: Annotated[
        int,
        option(
            "Port of the connector's KV endpoint on a server whose URL names none.",
            group=_SERVERS,
            metavar="PORT",
            ge=1,
            le=65535,
        ),
    ] = 9000

    read_path: Annotated[
        ReadPlanKind,
        option(
            "Side that reads stored KV: both, in proportion to their queues (split); both, so that all "
            "nodes of a larger cluster are equally busy (steady); the one with the shorter read queue "
            "(the published design); or always one.",
            group=_SCHEDULING,
        ),
    ] = ReadPlanKind.SPLIT
    scheduler: Annotated[
        SchedulerKind,
        option(
            "Assignment of requests to servers: dualpath, or a baseline to compare with.",
            group=_SCHEDULING,
        ),
    ] = SchedulerKind.DUALPATH
    alpha_tokens: Annotated[
        int,
        option(
            "Longest read queue of a host before the scheduler avoids it: what the host reads in 3 s.",
            group=_SCHEDULING,
            metavar="TOKENS",
            ge=0,
        ),
    ] = PolicyConfig().alpha_tokens
    beta_tokens: Annotated[
        int,
        option(
            "Most unfinished tokens of a prefill server before it gets no more: what it processes, "
            "stored tokens included, in 5 s.",
            group=_SCHEDULING,
            metavar="TOKENS",
            ge=0,
        ),
    ] = PolicyConfig().beta_tokens
    seed: Annotated[int, option("Seed of the scheduler random.", group=_SCHEDULING, ge=0)] = 0

    host: Annotated[
        str,
        option(
            "Address to listen on. Anything but loopback should have an API key, the router's or the "
            "servers' own.",
            group=_HTTP,
            metavar="ADDRESS",
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int, option("Port to listen on; 0 takes any free one.", group=_HTTP, ge=0, le=65535)
    ] = 8080
    api_key: Annotated[
        str | None,
        option(
            "Key that clients must send as `Authorization: Bearer KEY`, and that the drain call needs. "
            "Whatever a client sends is passed on to the servers, so theirs must be the same, or none. "
            "The environment is safer, as arguments can be read by other users of the machine.",
            group=_HTTP,
            metavar="KEY",
            env="DUALPATH_API_KEY",
            secret=True,
        ),
    ] = None
    max_concurrent_requests: Annotated[
        int,
        option(
            "Requests in the router at once; more are answered 429 with Retry-After.",
            group=_HTTP,
            ge=1,
        ),
    ] = 4096
    max_body: Annotated[
        int,
        option("Largest request body.", group=_HTTP, metavar="SIZE", unit=Unit.BYTES, ge=1024),
    ] = 32 * MiB
    request_timeout_s: Annotated[
        float,
        option(
            "A request that has not ended by then is aborted and answered with an error.",
            group=_HTTP,
            metavar="SECONDS",
            gt=0,
        ),
    ] = 1800.0

    max_attempts: Annotated[
        int,
        option(
            "How often a request is tried, on other servers where there are any, as long as none of its "
            "answer has reached the client.",
            group=_OPERATION,
            ge=1,
        ),
    ] = 4
    health_interval_s: Annotated[
        float,
        option(
            "Time between two looks at a server's /health.",
            group=_OPERATION,
            metavar="SECONDS",
            gt=0,
        ),
    ] = 2.0
    health_timeout_s: Annotated[
        float,
        option(
            "A look that takes longer has failed; a server is lost after three of them, or as soon as it "
            "refuses connections.",
            group=_OPERATION,
            metavar="SECONDS",
            gt=0,
        ),
    ] = 5.0
    connect_timeout_s: Annotated[
        float,
        option("Longest time to connect to a server.", group=_OPERATION, metavar="SECONDS", gt=0),
    ] = 5.0
    drain_timeout_s: Annotated[
        float,
        option(
            "On Ctrl-C or SIGTERM, how long requests under way may take to end.",
            group=_OPERATION,
            metavar="SECONDS",
            ge=0,
        ),
    ] = 60.0
    log_level: Annotated[
        LogLevel, option("Least severe messages that are logged.", group=_OPERATION)
    ] = LogLevel.INFO

    def check(self) -> None:
        if self.api_key == "":
            raise ConfigError(
                "--api-key (DUALPATH_API_KEY): expected a non-empty key; leave it away for none"
            )
        if self.server and (self.prefill or self.decode):
            raise ConfigError("--server: give either it, or --prefill and --decode")
        if not self.server and not (self.prefill and self.decode):
            raise ConfigError(
                "expected --prefill URL... and --decode URL..., or --server URL... for servers that do both"
            )
        names = [each.name for each in self.addresses("prefill", "decode", "server")]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"the server {', '.join(twice)} is given twice; give each once")
        self.policy()

    @property
    def paired(self) -> bool:
        """Whether a request is served by a prefill and a decode server."""
        return not self.server

    def addresses(self, *flags: str) -> tuple[ServerAddress, ...]:
        """The servers of these flags, in order. ConfigError names the flag at fault."""
        return tuple(
            ServerAddress.of(text, flag=f"--{flag}", kv_port=self.kv_port)
            for flag in flags
            for text in getattr(self, flag)
        )

    def policy(self) -> PolicyConfig:
        """What the scheduler is told. A server that does both never counts as overloaded by its prompts."""
        return PolicyConfig(
            scheduler=self.scheduler,
            read_plan=self.read_path,
            alpha_tokens=self.alpha_tokens,
            beta_tokens=self.beta_tokens if self.paired else _NO_LIMIT,
            seed=self.seed,
            max_attempts=self.max_attempts,
            reject_without_engines=True,
        )
