"""The smallest Serve application, for tests of what starts and ends one."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing import shared_memory
from typing import Any

from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response


@serve.deployment(graceful_shutdown_wait_loop_s=0.1, graceful_shutdown_timeout_s=5)
class Small:
    """Answers with its pid; may leave a child process and shared memory behind, as an engine does."""

    def __init__(self, args: dict[str, Any]) -> None:
        if args.get("fail"):
            raise ValueError(args["fail"])
        self._pids = [os.getpid()]
        self._shared = ""
        if args.get("litter"):
            stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
            self._pids.append(subprocess.Popen([sys.executable, "-c", stubborn]).pid)
            self._memory = shared_memory.SharedMemory(create=True, size=4096)
            self._shared = self._memory.name

    async def __call__(self, request: Request) -> Response:
        return JSONResponse({"pids": self._pids, "shared": self._shared, "address": os.environ.get("RAY_ADDRESS")})


def build(args: dict[str, Any]) -> serve.Application:
    return Small.options(ray_actor_options={"num_cpus": args.get("num_cpus", 0.1)}).bind(args)
