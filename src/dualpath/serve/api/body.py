"""Request bodies: read within limits, decoded strictly, refused in words that name the field."""

from __future__ import annotations

import asyncio
import re
from typing import Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from dualpath.base.errors import RequestError

__all__ = ["BodyLimits", "convert_field", "invalid", "read_body"]

T = TypeVar("T")


class BodyLimits(Protocol):
    """How large a body may be, and how long it may take to arrive."""

    @property
    def max_body_bytes(self) -> int: ...

    @property
    def body_timeout_s(self) -> float: ...


_MESSAGE = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)


async def read_body(request: Request, body_type: type[T], limits: BodyLimits) -> T:
    """The decoded body; RequestError (400, 408, 413, 415) says what to change."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise RequestError(
            f"the body must be JSON: send the header Content-Type: application/json, not {content_type!r}",
            status=415,
            code="unsupported_media_type",
        )
    content = await _read(request, limits)
    try:
        return msgspec.json.decode(content, type=body_type)
    except msgspec.ValidationError as error:
        raise invalid(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply", code="invalid_json") from None


def convert_field(value: object, field_type: type[T], name: str) -> T:
    """Check a field that was decoded untyped, as its content must also be kept as it came."""
    try:
        return msgspec.convert(value, field_type)
    except msgspec.ValidationError as error:
        raise invalid(error, name) from None


def invalid(error: msgspec.ValidationError, prefix: str = "") -> RequestError:
    """From msgspec's message, such as "Expected `int`, got `str` - at `$.max_tokens`"."""
    match = _MESSAGE.fullmatch(str(error))
    assert match is not None
    param = (prefix + (match["path"] or "")).removeprefix(".")
    what = match["what"]
    message = f"{param}: {what[0].lower()}{what[1:]}" if param else f"the body: {what}"
    return RequestError(message, param=param or None, code="invalid_value")


async def _read(request: Request, limits: BodyLimits) -> bytes:
    limit = limits.max_body_bytes
    too_large = RequestError(
        f"the body is larger than {limit} bytes (--max-body); send less at once",
        status=413,
        code="body_too_large",
    )
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise too_large
    content = bytearray()
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for chunk in request.stream():
                content += chunk
                if len(content) > limit:
                    raise too_large
    except TimeoutError:
        raise RequestError(
            f"the body did not arrive within {limits.body_timeout_s:g} s",
            status=408,
            code="timeout",
        ) from None
    except ClientDisconnect:
        raise RequestError("the client went away", status=499, code="disconnected") from None
    return bytes(content)
