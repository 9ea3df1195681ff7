"""The OpenAI-compatible HTTP interface over a `Generator`."""

from dualpath.serve.api.app import build_app
from dualpath.serve.api.server import serve_http
from dualpath.serve.api.settings import ApiSettings

__all__ = ["ApiSettings", "build_app", "serve_http"]
