"""Which backend a store's address means. A new backend is a new entry in the table here."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dualpath.base.errors import ConfigError
from dualpath.kv.chain import Fingerprint
from dualpath.kv.layout import KVLayout
from dualpath.store.contract import Store
from dualpath.store.directory import DirectoryStore
from dualpath.store.redis_address import RedisAddress
from dualpath.store.redis_store import RedisStore

__all__ = ["open_store", "printable_address"]

_Opener = Callable[[str, Fingerprint, KVLayout, str], Store]
_SCHEME = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]*):")


def open_store(
    address: str, fingerprint: Fingerprint, layout: KVLayout, *, model: str = ""
) -> Store:
    """Open the store at `address`: a path, or `scheme:rest`. `model` is a name for people.

    Raises ConfigError when the scheme is unknown or the place cannot be used.
    """
    if not address:
        raise ConfigError("the store's address is empty: give a path, or leave the store out")
    match = _SCHEME.match(address)
    if match is None:
        return _open_directory(Path(address).expanduser(), fingerprint, layout, model)
    opener = _OPENERS.get(match.group(1).lower())
    if opener is None:
        known = ", ".join(f"{scheme}:" for scheme in sorted(_OPENERS))
        raise ConfigError(
            f"store {printable_address(address)!r}: no backend for {match.group(1)}:; "
            f"give a path or one of {known}"
        )
    return opener(address, fingerprint, layout, model)


def printable_address(address: str) -> str:
    """The address for a log: without user, password and options."""
    scheme, colon, rest = address.partition("://")
    return scheme + colon + rest.rpartition("@")[2].partition("?")[0] if colon else address


def _open_file_url(address: str, fp: Fingerprint, layout: KVLayout, model: str) -> Store:
    url = urlsplit(address)
    if url.netloc not in ("", "localhost") or url.query or url.fragment or not url.path:
        raise ConfigError(f"store {address!r}: write file:///absolute/path, or a plain path")
    return _open_directory(Path(unquote(url.path)), fp, layout, model)


def _open_directory(path: Path, fp: Fingerprint, layout: KVLayout, model: str) -> Store:
    return DirectoryStore(path.absolute(), fp, layout, model=model)


def _open_redis(address: str, fp: Fingerprint, layout: KVLayout, _: str) -> Store:
    return RedisStore(RedisAddress.parse(address), fp, layout)


_OPENERS: dict[str, _Opener] = {
    "file": _open_file_url,
    "redis": _open_redis,
    "rediss": _open_redis,
}
