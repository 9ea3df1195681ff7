"""Errors in the shape of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging

import msgspec
from starlette.responses import Response

from dualpath.base.errors import DualPathError, EngineLost, RequestError

__all__ = ["describe_failure", "error_body", "error_response"]

log = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_RETRY_AFTER_S = 1


class _Error(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class _ErrorBody(msgspec.Struct):
    error: _Error


def error_body(error: RequestError) -> bytes:
    """JSON of the error."""
    default = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = _TYPES.get(error.status, default)
    return msgspec.json.encode(_ErrorBody(_Error(str(error), kind, error.param, error.code)))


def error_response(error: RequestError) -> Response:
    """With `Retry-After` where another try may succeed."""
    headers = {}
    if error.status in (429, 503):
        headers["Retry-After"] = str(_RETRY_AFTER_S)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(
        error_body(error), status_code=error.status, headers=headers, media_type="application/json"
    )


def describe_failure(error: Exception, request_id: str) -> RequestError:
    """What the client is told of any exception; what is not the client's doing is logged."""
    if isinstance(error, RequestError):
        if error.status >= 500:
            log.warning("request %s: %s", request_id, error)
        return error
    if isinstance(error, EngineLost):
        log.error("request %s: %s", request_id, error)
        return RequestError(str(error), status=503, code="no_engine")
    log.error("request %s failed", request_id, exc_info=error)
    detail = f": {error}" if isinstance(error, DualPathError) else ""
    return RequestError(
        f"the server failed on this request{detail}; its log has the details under request id {request_id}",
        status=500,
        code="internal_error",
    )
