"""Where a server is: what a URL given by the operator says, checked. Knows no connection."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from dualpath.base.errors import ConfigError

__all__ = ["Origin"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a server is. `path` has no slash at its end."""

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def of(
        cls, url: str, *, flag: str = "--base-url", example: str = "http://HOST:PORT/v1"
    ) -> Origin:
        """Raises ConfigError, which names the flag, for what is no http or https URL, and for one that
        holds a user or a key: it would stand in every result."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{flag}: {url!r} is no URL: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{flag}: expected {example}, got {url!r}")
        if "@" in parts.netloc or parts.query:
            shown = example.replace("HOST:PORT", parts.hostname)
            raise ConfigError(
                f"{flag}: expected {shown} alone: no user, password or query; a key goes to --api-key"
            )
        if not (parts.path.isascii() and parts.path.isprintable()) or " " in parts.path:
            raise ConfigError(f"{flag}: {parts.path!r} has characters that no URL may have")
        default = 443 if parts.scheme == "https" else 80
        return cls(parts.scheme, parts.hostname, port or default, parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        """For the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = 443 if self.scheme == "https" else 80
        return host if self.port == default else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """As the operator would write it."""
        return f"{self.scheme}://{self.authority}{self.path}"
