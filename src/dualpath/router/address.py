"""Where one server is: its HTTP base URL and its KV endpoint, as the operator writes them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dualpath.base.errors import ConfigError
from dualpath.base.origin import Origin
from dualpath.vllm.params import KvPeer

__all__ = ["EXAMPLE", "ServerAddress"]

EXAMPLE = "http://10.0.0.1:8000#kv=9000"


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """`kv` is what other servers are told to reach its connector at."""

    origin: Origin
    kv: KvPeer

    @classmethod
    def of(cls, text: str, *, flag: str, kv_port: int) -> ServerAddress:
        """From `URL`, `URL#kv=PORT` or `URL#kv=HOST:PORT`; `/v1` at the URL's end is left away. ConfigError
        names the flag."""
        url, _, fragment = text.partition("#")
        origin = Origin.of(url.removesuffix("/").removesuffix("/v1"), flag=flag, example=EXAMPLE)
        host, port = origin.host, str(kv_port)
        if fragment:
            key, _, value = fragment.partition("=")
            if key != "kv":
                raise ConfigError(f"{flag}: expected {EXAMPLE}, got {text!r}")
            named, colon, port = value.rpartition(":")
            if colon:
                host = named.removeprefix("[").removesuffix("]")
        try:
            return cls(origin, KvPeer(host, int(port)))
        except ValueError:
            raise ConfigError(
                f"{flag}: expected a KV endpoint such as #kv=9000 or #kv=10.0.0.1:9000, got {text!r}"
            ) from None

    @property
    def name(self) -> str:
        """How logs, metrics and the drain call name the server: host, port and path of its URL."""
        host = f"[{self.origin.host}]" if ":" in self.origin.host else self.origin.host
        return f"{host}:{self.origin.port}{self.origin.path}"
