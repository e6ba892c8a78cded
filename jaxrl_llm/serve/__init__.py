"""Layer 5: an HTTP server for an engine, tokens in and tokens out; needs the extra ``serve``."""

from jaxrl_llm.core.runtime.lazy import lazy

_HOMES = {
    "make_app": "app",
    "Reply": "server",
    "RequestError": "requests",
    "SampleRequest": "requests",
    "TokenServer": "server",
}

__all__ = sorted(_HOMES)

# Heavy modules load on first use.
__getattr__, __dir__ = lazy(__name__, _HOMES)
