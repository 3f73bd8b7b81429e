"""vLLM's HTTP application straight over the fake engine: one process, uvicorn, no Ray, no path of ours in between.

`bare_fake(app, port)` runs it as a child: `python -m benchmarks.bare_fake APP_CONFIG_JSON PORT`.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

import httpx

from pd_serve.config import AppConfig
from pd_serve.engine.base import Engine
from pd_serve.types import Delta, Request

START_TIMEOUT_S = 120.0


class DirectPath:
    """In place of RequestPath: every request goes to one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def generate(self, request: Request) -> AsyncGenerator[Delta]:
        async for delta in self._engine.decode(request):
            yield delta


@contextmanager
def bare_fake(app: AppConfig, port: int) -> Iterator[str]:
    """Inside the block it answers at the yielded base URL."""
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.bare_fake", app.model_dump_json(), str(port)])
    base_url = f"http://127.0.0.1:{port}"
    try:
        give_up = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < give_up:
            if process.poll() is not None:
                raise RuntimeError(f"the bare server ended with code {process.returncode}")
            try:
                if httpx.get(f"{base_url}/v1/models", timeout=2.0).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.3)
        yield base_url
    finally:
        process.terminate()
        process.wait(20)


async def serve(config: AppConfig, port: int) -> None:
    """Answer until the process is ended."""
    import uvicorn

    from pd_serve.compat_http import application, config_without_engine, server_args
    from pd_serve.engine.fake import FakeEngine
    from pd_serve.kv.transport.in_process import InProcessEnd, Registry
    from pd_serve.path.client import PdEngineClient
    from pd_serve.serve.engines import fake_settings
    from pd_serve.types import Role

    engine = FakeEngine(fake_settings(config, Role.DECODE), InProcessEnd(Registry(), "bare"))
    await engine.start()
    args = server_args(config)
    client = PdEngineClient(config_without_engine(args), DirectPath(engine), lambda: True)  # type: ignore[arg-type]
    app = await application(client, args)
    await uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", loop="uvloop")).serve()


if __name__ == "__main__":
    asyncio.run(serve(AppConfig.model_validate_json(sys.argv[1]), int(sys.argv[2])))
