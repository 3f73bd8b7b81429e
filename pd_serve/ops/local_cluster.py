"""A private Ray cluster with one application, run by a child process that is started, heard and ended here."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import msgspec

from pd_serve.ops.failures import OperationFailed
from pd_serve.serve import processes
from pd_serve.serve.cluster import AppState
from pd_serve.serve.local_process import Event, Failed, RayUp, Seen, Spec, Stopped
from pd_serve.serve.local_ray import LocalRay, local_environment

_LONGEST_TEMP = 30
_STOP_S = 25.0
GIB = 1 << 30


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class LocalCluster:
    """Starts at once; ends with `stop` (or `with`). Nothing of it stays: no process, shared memory, port or file.

    Args:
        config: a Serve config, the content of a YAML file.
        num_cpus: CPUs that Ray thinks it has; None: what the machine has.
        drain_s: how long running requests may go on after `stop`.
        logs: directory that the logs are copied to when it stops.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        num_cpus: int | None = None,
        num_gpus: int | None = None,
        object_store_bytes: int | None = 2 * GIB,
        dashboard: bool = False,
        start_timeout_s: float = 600.0,
        drain_s: float = 10.0,
        env: Mapping[str, str] | None = None,
        logs: Path | None = None,
    ) -> None:
        processes.adopt_orphans()
        self.address = ""
        self.state = AppState()
        self._drain_s = drain_s
        self._logs = logs
        self.temp_dir = _short_temp_dir()
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        local = LocalRay(
            temp_dir=str(self.temp_dir),
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            object_store_bytes=object_store_bytes,
            dashboard=dashboard,
            metrics_port=free_port(),
            stats_port=free_port(),
            gcs_port=free_port(),
        )
        reading, writing = os.pipe()
        spec = Spec(
            events_fd=writing, local=local, config=dict(config), start_timeout_s=start_timeout_s, drain_s=drain_s
        )
        try:
            self._child = self._spawn(spec, {**os.environ, **local_environment(local), **(env or {})})
        finally:
            os.close(writing)
        threading.Thread(target=self._listen, args=(os.fdopen(reading, "rb"),), daemon=True).start()

    @property
    def access(self) -> str:
        """Environment, as a shell writes it, with which Ray's own tools reach this cluster."""
        return f"RAY_ADDRESS={self.address} RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={self.temp_dir}/auth_token"

    @property
    def pid(self) -> int:
        """The process that owns Ray; it leads the session that everything below it is in."""
        return self._child.pid

    def _spawn(self, spec: Spec, env: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self.temp_dir / "driver.log").open("wb") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "pd_serve.serve.local_process"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(spec.events_fd,),
                env=env,
                start_new_session=True,
            )
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(msgspec.json.encode(spec) + b"\n")
            child.stdin.flush()
        return child

    def _listen(self, pipe: IO[bytes]) -> None:
        decoder = msgspec.json.Decoder(Event)
        with pipe:
            for line in pipe:
                self._events.put(decoder.decode(line))
        self._events.put(None)

    def next_event(self, timeout_s: float) -> Event | None:
        """The next event, or None when there was none for `timeout_s`.

        Raises:
            OperationFailed: it could not be started, or its process died.
        """
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        match event:
            case RayUp(address):
                self.address = address
            case Seen(app):
                self.state = app
            case Failed(message):
                raise OperationFailed(message)
            case None | Stopped():
                raise OperationFailed(f"Ray's process ended: {self._last_words()}")
        return event

    def wait_running(self) -> str:
        """Wait until the application runs; return Ray's address.

        Raises:
            OperationFailed: it did not come up; the message says why.
        """
        while self.state.status != "RUNNING":
            self.next_event(1.0)
        return self.address

    def stop(self, patience_s: float | None = None) -> None:
        """Take everything down: drain, end the processes, remove the files. Idempotent.

        Args:
            patience_s: how long it may take before everything is killed; None: time to drain and 25 s.
        """
        patience = self._drain_s + _STOP_S if patience_s is None else patience_s
        if self._child.stdin is not None:
            with contextlib.suppress(OSError):
                self._child.stdin.close()
        try:
            self._child.wait(patience)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        processes.end_descendants(session=self._child.pid, grace_s=0.0)
        if self._logs is not None:
            self._keep_logs(self._logs)
        shutil.rmtree(self.temp_dir, ignore_errors=True)

    def kill(self) -> None:
        """End everything at once, without draining."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child.pid, signal.SIGKILL)
        self.stop(0.0)

    def _keep_logs(self, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        for number, found in enumerate([self.temp_dir / "driver.log", *self.temp_dir.glob("session_2*/logs")]):
            name = target / f"{stamp}-{number}-{found.name}"
            with contextlib.suppress(OSError, shutil.Error):
                shutil.copytree(found, name) if found.is_dir() else shutil.copy(found, name)

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = (self.temp_dir / "driver.log").read_text(errors="replace").strip().splitlines()
            if lines:
                return lines[-1].strip()
        return f"exit code {self._child.poll()}"

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _short_temp_dir() -> Path:
    """A new directory with a short name: Ray puts Unix sockets deep below it, and their paths are bounded."""
    where = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="pd-", dir=where if len(where) <= _LONGEST_TEMP else "/tmp"))
