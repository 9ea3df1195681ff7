"""The router: an OpenAI endpoint in front of vLLM servers, which the policy pairs for each request."""

from dualpath.router.app import RouterContext, build_router_app
from dualpath.router.config import RouterConfig

__all__ = ["RouterConfig", "RouterContext", "build_router_app"]
