"""The Ray Serve application: `import_path: pd_serve.app:build`."""

from __future__ import annotations

from pd_serve.serve.graph import build

__all__ = ["build"]
