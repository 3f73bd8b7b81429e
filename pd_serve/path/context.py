"""What the gateway knows of a request and the path needs: carried beside vLLM's application, which knows neither."""

from __future__ import annotations

from contextvars import ContextVar

tenant: ContextVar[str] = ContextVar("pd_serve_tenant", default="")
"""Who asks: the name of the API key, or empty without keys."""
