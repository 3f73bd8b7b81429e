"""A process that owns a private Ray cluster and one application on it: `python -m pd_serve.serve.local_process`.

It is started by `ops/local_cluster.py`, in a session of its own. Standard input brings one line, a `Spec`; its end
means stop. Events go, a line each, to the file descriptor named in the spec. Whatever ends it, nothing that it
started outlives it: it adopts what its children orphan and ends that last.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import msgspec

from pd_serve.config_yaml import show_path
from pd_serve.serve import cluster, local_ray, processes
from pd_serve.serve.schema import serve_mistakes

_WATCH_S = 1.0
_STOP_SIGNAL = signal.SIGUSR1
"""How the thread that waits for the end of input interrupts the main thread (Ray takes SIGTERM for itself)."""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What to start."""

    events_fd: int
    local: local_ray.LocalRay
    config: dict[str, Any]
    """A Serve config, as in the YAML file."""
    start_timeout_s: float
    drain_s: float
    """How long requests may go on after a stop."""


class RayUp(msgspec.Struct, frozen=True, tag="ray"):
    address: str


class Seen(msgspec.Struct, frozen=True, tag="state"):
    app: cluster.AppState


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """It could not be started, or died; the process ends."""

    message: str


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """The last event: everything has been taken down."""


Event = RayUp | Seen | Failed | Stopped


class _Stop(BaseException):
    """Raised in the main thread by the signal that asks for a stop."""


def main() -> int:
    processes.adopt_orphans()
    parent = os.getppid()
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=Spec)
    signal.signal(_STOP_SIGNAL, _stop)
    threading.Thread(target=_stop_at_end_of_input, daemon=True).start()
    threading.Thread(target=_reap_orphans, daemon=True).start()
    failed = False
    application = ""
    try:
        application = _start(spec)
        _watch(spec, application)
    except (_Stop, SystemExit):  # the latter is what Ray's own handler makes of SIGTERM
        pass
    except cluster.ClusterError as error:
        failed = True
        _send(spec, Failed(error.message))
    finally:
        for number in (_STOP_SIGNAL, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        _take_down(application, 0.0 if failed else spec.drain_s)
    _send(spec, Stopped())
    if os.getppid() != parent:  # who would have removed it is gone
        shutil.rmtree(spec.local.temp_dir, ignore_errors=True)
    return int(failed)


def _start(spec: Spec) -> str:
    mistakes = serve_mistakes(spec.config)
    if mistakes:
        raise cluster.ClusterError("\n".join(f"{show_path(path)}: {text}" for path, text in mistakes))
    _send(spec, RayUp(local_ray.start_local(spec.local)))
    application = cluster.deploy(spec.config)

    def seen(app: cluster.AppState) -> None:
        _send(spec, Seen(app))

    cluster.wait_running(application, spec.start_timeout_s, seen, first_failure_ends=True)
    return application


def _watch(spec: Spec, application: str) -> None:
    last = cluster.AppState()
    while True:
        now = cluster.state(application)
        if now != last:
            _send(spec, Seen(now))
            last = now
        time.sleep(_WATCH_S)


def _take_down(application: str, drain_s: float) -> None:
    # A process that Ray kills takes with it what would have removed its shared memory.
    shared = processes.shared_memory_of_descendants()
    if application:
        with contextlib.suppress(Exception):
            cluster.delete(application, drain_s)
    shared |= processes.shared_memory_of_descendants()
    with contextlib.suppress(Exception):
        cluster.disconnect()
    processes.end_descendants(grace_s=2.0, shared=shared)


def _send(spec: Spec, event: Event) -> None:
    with contextlib.suppress(OSError):  # the parent may be gone
        os.write(spec.events_fd, msgspec.json.encode(event) + b"\n")


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise _Stop


def _stop_at_end_of_input() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), _STOP_SIGNAL)


def _reap_orphans() -> None:
    while True:
        processes.reap()
        time.sleep(_WATCH_S)


if __name__ == "__main__":
    # Ended here and now: what is left of Ray in the interpreter has nothing more to do.
    os._exit(main())
