"""A private Ray comes up, says why when it does not, and leaves nothing behind however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pd_serve.ops.failures import OperationFailed
from pd_serve.ops.local_cluster import LocalCluster, free_port

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]


def small(port: int, **args: Any) -> dict[str, Any]:
    application = {"name": "small", "route_prefix": "/", "import_path": "tests.ops.small_app:build", "args": args}
    return {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}


def get(port: int) -> dict[str, Any]:
    deadline = time.monotonic() + 20
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


class Traces:
    """What a cluster could leave behind: processes of its session, its directory, its ports, shared memory."""

    def __init__(self, child: int, temp: Path, port: int, shared: str = "") -> None:
        self.child, self.temp, self.port = child, temp, port
        self.shared = Path("/dev/shm", shared) if shared else None

    def left(self) -> list[str]:
        left = [f"{each.pid} {each.name()}" for each in psutil.process_iter() if self._of_session(each)]
        if self.temp.exists():
            left.append(str(self.temp))
        if self.shared is not None and self.shared.exists():
            left.append(str(self.shared))
        listening = (each.laddr.port for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN)
        return left + [f"port {port}" for port in listening if port == self.port]

    def _of_session(self, process: psutil.Process) -> bool:
        try:
            return os.getsid(process.pid) == self.child and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, ProcessLookupError):
            return False

    def wait_gone(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.left() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert self.left() == []


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[LocalCluster, int]]]:
    """Starts clusters, ends those that a test leaves running. Workers find `tests` through PYTHONPATH."""
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    started: list[LocalCluster] = []

    def begin(timeout_s: float = 60.0, **args: Any) -> tuple[LocalCluster, int]:
        port = free_port()
        cluster = LocalCluster(small(port, **args), num_cpus=2, start_timeout_s=timeout_s, drain_s=5.0)
        started.append(cluster)
        return cluster, port

    yield begin
    for cluster in started:
        cluster.stop()


def traces(cluster: LocalCluster, port: int, shared: str = "") -> Traces:
    return Traces(cluster.pid, cluster.temp_dir, port, shared)


def test_it_serves_through_haproxy_and_stops_without_a_trace(start: Callable[..., tuple[LocalCluster, int]]) -> None:
    cluster, port = start(litter=True)
    address = cluster.wait_running()
    answer = get(port)
    assert answer["address"] == address, "RAY_ADDRESS is handed on to workers"
    names = {process.name() for process in psutil.Process(cluster.pid).children(recursive=True)}
    assert "haproxy" in names
    left = traces(cluster, port, answer["shared"])
    assert any("haproxy" in line for line in left.left())
    cluster.stop()
    assert left.left() == []
    assert not any(psutil.pid_exists(pid) for pid in answer["pids"])
    cluster.stop()


def test_a_replica_that_cannot_start_gives_one_line_and_leaves_nothing(
    start: Callable[..., tuple[LocalCluster, int]],
) -> None:
    cluster, port = start(fail="the engine has no fuel")
    with pytest.raises(OperationFailed) as caught:
        cluster.wait_running()
    assert caught.value.message == "small did not start: Small: ValueError: the engine has no fuel"
    cluster.stop()
    assert traces(cluster, port).left() == []


@pytest.mark.case("B34")
def test_what_cannot_be_placed_is_named_after_a_bound(start: Callable[..., tuple[LocalCluster, int]]) -> None:
    cluster, port = start(timeout_s=35.0, num_cpus=64)
    with pytest.raises(OperationFailed, match=r"did not start within 35 s: Small: .*(64|resources|schedul)"):
        cluster.wait_running()
    cluster.stop()
    assert traces(cluster, port).left() == []


def test_keys_that_serve_would_ignore_stop_it_before_ray_starts(start: Callable[..., tuple[LocalCluster, int]]) -> None:
    port = free_port()
    config = small(port)
    config["applications"][0]["deployments"] = [{"name": "Small", "max_ongoing_request": 1}]
    with (
        LocalCluster(config, num_cpus=1) as cluster,
        pytest.raises(OperationFailed, match="did you mean max_ongoing_requests"),
    ):
        cluster.wait_running()
    assert cluster.address == ""


def test_killing_the_process_that_owns_ray_is_noticed_and_cleaned_up(
    start: Callable[..., tuple[LocalCluster, int]],
) -> None:
    cluster, port = start(litter=True)
    cluster.wait_running()
    shared = get(port)["shared"]
    os.kill(cluster.pid, signal.SIGKILL)
    with pytest.raises(OperationFailed, match="Ray's process ended"):
        while True:
            cluster.next_event(10.0)
    cluster.stop()
    assert traces(cluster, port, shared).left() == []


def test_when_the_starter_itself_is_killed_everything_ends_by_itself() -> None:
    port = free_port()
    code = (
        "from pd_serve.ops.local_cluster import LocalCluster; import sys, time;"
        f"cluster = LocalCluster({small(port, litter=True)!r}, num_cpus=2, drain_s=2.0); cluster.wait_running();"
        "print(cluster.pid, cluster.temp_dir, flush=True); time.sleep(600)"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    assert starter.stdout is not None
    pid, temp = starter.stdout.readline().split()
    left = Traces(int(pid), Path(temp), port, get(port)["shared"])
    starter.kill()
    starter.wait()
    left.wait_gone(30.0)


def test_a_stop_in_the_middle_of_the_start_leaves_nothing(start: Callable[..., tuple[LocalCluster, int]]) -> None:
    cluster, port = start()
    while not cluster.address:
        cluster.next_event(1.0)
    cluster.stop()
    assert traces(cluster, port).left() == []
