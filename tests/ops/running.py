"""`pd-serve up` as a user runs it: a process, what it printed, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil


class Up:
    """A running `pd-serve up CONFIG --port PORT`."""

    def __init__(self, config: Path, port: int, log: Path, *options: str, **env: str) -> None:
        self.port, self._log = port, log
        command = [sys.executable, "-m", "pd_serve.cli", "up", str(config), "--port", str(port), *options]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=os.environ | env
            )

    @property
    def text(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, pattern: str, seconds: float) -> re.Match[str]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = re.search(pattern, self.text)
            if found:
                return found
            assert self.process.poll() is None, self.text
            time.sleep(0.2)
        raise AssertionError(f"{pattern!r} did not come within {seconds} s:\n{self.text}")

    def below(self) -> list[psutil.Process]:
        """Everything that it has started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, number: int, seconds: float = 60.0) -> int:
        self.process.send_signal(number)
        return self.process.wait(seconds)


@contextlib.contextmanager
def running(config: Path, port: int, log: Path, *options: str, **env: str) -> Iterator[Up]:
    up = Up(config, port, log, *options, **env)
    try:
        yield up
    finally:
        if up.process.poll() is None:
            up.end(signal.SIGTERM)


def living(processes: list[psutil.Process]) -> list[str]:
    """Those that still run."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {process.name()}")
    return found


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))
