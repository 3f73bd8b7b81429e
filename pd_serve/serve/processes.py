"""Owning processes: everything that a process started, however it was orphaned, can be found and ended.

Ray's raylet, Serve's HAProxy and vLLM's engine processes outlive a parent that is killed. A process that called
`adopt_orphans` becomes their parent then, so its descendants are always all that it started (Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_SHM = Path("/dev/shm")


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends. Does nothing where the system cannot."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(session: int | None = None) -> list[psutil.Process]:
    """Every living process below this one; with `session`, those of that session (see `os.setsid`) only."""
    return [process for process in _below(session) if _status(process) not in {None, psutil.STATUS_ZOMBIE}]


def end_descendants(
    session: int | None = None, grace_s: float = 5.0, kill_s: float = 10.0, shared: Iterable[Path] = ()
) -> int:
    """End everything below this process: SIGTERM, then SIGKILL after `grace_s`, until nothing is left.

    Shared memory files that they had open or mapped and left behind are removed.

    Args:
        session: end only what is in this session.
        shared: further shared memory files to remove.

    Returns:
        How many had to be killed.
    """
    leftover = set(shared)
    asked: set[int] = set()
    killed: set[int] = set()
    started = time.monotonic()
    while True:
        reap(session)
        alive = descendants(session)
        late = time.monotonic() - started
        if not alive or late > grace_s + kill_s:
            break
        for process in alive:
            leftover |= shared_memory_of(process.pid)
            if late > grace_s:
                killed.add(process.pid)
                _signal(process, signal.SIGKILL)
            elif process.pid not in asked:
                asked.add(process.pid)
                _signal(process, signal.SIGTERM)
        time.sleep(0.05)
    reap(session)
    for path in leftover:
        with contextlib.suppress(OSError):
            path.unlink()
    return len(killed)


def reap(session: int | None = None) -> None:
    """Collect the exit of ended children, so that none stays as a zombie."""
    for process in _below(session):
        if _status(process) == psutil.STATUS_ZOMBIE:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def shared_memory_of_descendants() -> set[Path]:
    """Files under /dev/shm that any process below this one has mapped or open."""
    return {path for process in descendants() for path in shared_memory_of(process.pid)}


def shared_memory_of(pid: int) -> set[Path]:
    """Files under /dev/shm that the process has mapped or open."""
    found = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            _, _, name = line.partition(str(_SHM) + "/")
            if name and not name.endswith(" (deleted)"):
                found.add(_SHM / name)
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(descriptor)
                if target.startswith(f"{_SHM}/") and not target.endswith(" (deleted)"):
                    found.add(Path(target))
    return found


def _below(session: int | None) -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [process for process in found if session is None or _session(process.pid) == session]


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _status(process: psutil.Process) -> str | None:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return None


def _signal(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
