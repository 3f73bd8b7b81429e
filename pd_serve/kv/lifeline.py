"""An engine's processes end with the replica that started them, however that one ends."""

from __future__ import annotations

import os
import signal
import threading
import time

PERIOD_S = 0.5

_watching = threading.Lock()


def end_with_parent(parent_pid: int) -> None:
    """Kill this process soon after its parent `parent_pid` ended, or now when that one has ended already.

    Does nothing when `parent_pid` is 0, or lives and is not the parent (a worker of the engine's, say, which ends with
    the engine). Idempotent. A thread that looks rather than a parent-death signal, because that one is sent when the
    parent's *thread* ends.
    """
    if parent_pid == 0 or (os.getppid() != parent_pid and _alive(parent_pid)):
        return
    if _watching.acquire(blocking=False):
        threading.Thread(target=_watch, args=(parent_pid,), name="pd-lifeline", daemon=True).start()


def _watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(PERIOD_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
