"""vLLM's own OpenAI server in a process of its own: what conformance and benchmarks compare with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from pd_serve.errors import EngineFailed

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0


def server_argv(engine_args: Mapping[str, Any], served_name: str, port: int) -> list[str]:
    """Command of vLLM's server with these engine arguments (vLLM's names with underscores), on 127.0.0.1.

    Truth values become `--name` or `--no-name`; mappings and lists of mappings become JSON.
    """
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", served_name]
    for name, value in engine_args.items():
        if name != "served_model_name":
            argv += _option(name.replace("_", "-"), value)
    return argv


def _option(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, Mapping | list | tuple):
        return [f"--{name}", json.dumps(value)]
    return [f"--{name}", str(value)]


@contextmanager
def reference_server(
    engine_args: Mapping[str, Any], served_name: str, port: int, env: Mapping[str, str], log: Path
) -> Iterator[str]:
    """Inside the block the server answers at the yielded base URL; afterwards it and its children are gone.

    Args:
        env: what the server's environment has beside this process's own.
        log: file for its output.

    Raises:
        EngineFailed: it ended, or did not answer within START_TIMEOUT_S.
    """
    with log.open("w") as output:
        process = subprocess.Popen(
            server_argv(engine_args, served_name, port),
            env={**os.environ, **env},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield _wait_ready(process, port, log)
    finally:
        _end(process)


def _wait_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> str:
    base_url = f"http://127.0.0.1:{port}"
    give_up = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up:
        if process.poll() is not None:
            raise EngineFailed(f"vLLM's server ended with code {process.returncode}; its output is in {log}")
        try:
            if httpx.get(f"{base_url}/health", timeout=2.0).status_code == 200:
                return base_url
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise EngineFailed(f"vLLM's server did not answer within {START_TIMEOUT_S:.0f} s; its output is in {log}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server's whole session: its engine processes are children of its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
