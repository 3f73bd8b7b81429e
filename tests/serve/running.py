"""A running application, as its clients and its operator see it."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

from pd_serve.ops.local_cluster import LocalCluster, free_port
from pd_serve.serve.haproxy import write_wrapper

MODEL = "smollm2"


def fake_args(**sections: Any) -> dict[str, Any]:
    """Arguments of an application with fake engines that asks for little of the machine."""
    small = {"num_cpus": 0.1}
    args: dict[str, Any] = {"engine": "fake", "ingress": small, "prefill": small, "decode": small}
    for name, section in sections.items():
        args[name] = {**args.get(name, {}), **section} if isinstance(section, dict) else section
    return args


class Running:
    """Starts at once; use `with`."""

    def __init__(self, args: Mapping[str, Any], *, haproxy: bool = True, drain_s: float = 30.0) -> None:
        port = free_port()
        self._bin = tempfile.TemporaryDirectory()
        config = {
            "http_options": {"host": "127.0.0.1", "port": port},
            "applications": [
                {"name": "pd", "route_prefix": "/", "import_path": "pd_serve.app:build", "args": dict(args)}
            ],
        }
        env = {
            "RAY_SERVE_ENABLE_HA_PROXY": "1" if haproxy else "0",
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
            "RAY_SERVE_HAPROXY_BINARY_PATH": str(write_wrapper(Path(self._bin.name))),
            "RAY_AUTH_MODE": "disabled",
        }
        self._cluster = LocalCluster(
            config, num_cpus=4, object_store_bytes=200 * 2**20, drain_s=drain_s, env=env, start_timeout_s=240
        )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)

    def wait_ready(self, timeout_s: float) -> None:
        self._cluster.wait_running()
        self.until(lambda: self.http.get("/readyz").status_code == 200, timeout_s)

    def stop(self) -> None:
        """Take it down; what runs may finish first."""
        self._cluster.stop()

    @property
    def address(self) -> str:
        return self._cluster.address

    def __enter__(self) -> Running:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.http.close()
        self.stop()
        self._bin.cleanup()

    # ------------------------------------------------------------------------------------ clients

    def complete(self, prompt: Any = "a b c d e f g h i j k l m n o p q r s t", **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
        return self.http.post("/v1/completions", json=body)

    def chat(self, words: str = "Tell me all about prefill and decode, please.", **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": words}]
        return self.http.post(
            "/v1/chat/completions", json={"model": MODEL, "messages": messages, "max_tokens": 8, **fields}
        )

    @contextmanager
    def streaming(self, **fields: Any) -> Iterator[tuple[httpx.Response, Iterator[str]]]:
        """A streamed completion: the response, and its events as they come."""
        body = {"model": MODEL, "prompt": "a b c d e f g h i j k l m n o p q r s t", "stream": True, **fields}
        with (
            httpx.Client(base_url=self.http.base_url, timeout=60) as client,
            client.stream("POST", "/v1/completions", json={"max_tokens": 8, "temperature": 0, **body}) as response,
        ):
            yield response, events(response)

    # ------------------------------------------------------------------------------------ operator

    def records(self, limit: int = 1) -> list[dict[str, Any]]:
        """The last finished requests, newest first."""
        found: list[dict[str, Any]] = self.http.get("/pd/records", params={"limit": limit}).json()
        return found

    def replicas(self, role: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.http.get("/pd/replicas").json()[role]
        return found

    def count_ready(self, role: str) -> int:
        return sum(replica["state"] == "ready" for replica in self.replicas(role))

    def busy(self) -> int:
        """What engines run, hold or have reserved."""
        names = ("waiting", "running", "reserved_tokens", "handoffs_held")
        everyone = [*self.replicas("prefill"), *self.replicas("decode")]
        return sum(replica["stats"].get(name, 0) for replica in everyone for name in names)

    def replica_logs(self, deployment: str) -> list[str]:
        """Lines of Serve's own log files of the replicas of a deployment."""
        files = self._cluster.temp_dir.glob(f"session_2*/logs/serve/replica_pd_{deployment}_*.log")
        return [line for file in files for line in file.read_text(errors="replace").splitlines()]

    def pids(self, deployment: str) -> list[int]:
        """Processes of the replicas of a deployment of this application."""
        below = psutil.Process(self._cluster._child.pid).children(recursive=True)
        return [each.pid for each in below if _title(each).startswith(f"ray::ServeReplica:pd:{deployment}")]

    def kill(self, deployment: str) -> int:
        """End one replica of the deployment as a crash does; returns its process id."""
        pid = self.pids(deployment)[0]
        os.kill(pid, signal.SIGKILL)
        return pid

    @staticmethod
    def until(condition: Callable[[], Any], timeout_s: float) -> None:
        """Wait for what must come true."""
        give_up = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < give_up, "it did not come true in time"
            time.sleep(0.1)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def events(response: httpx.Response) -> Iterator[str]:
    """The data of each server-sent event."""
    for line in response.iter_lines():
        if line:
            assert line.startswith("data: "), line
            yield line.removeprefix("data: ")


def text_of(stream: Iterator[str]) -> str:
    """All text of a completion's stream, which must end well."""
    found = list(stream)
    assert found[-1] == "[DONE]"
    assert found.count("[DONE]") == 1
    chunks = [json.loads(event) for event in found[:-1]]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]][-1] == "length"
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])
