"""Everything that a process started is found and ended, however it was orphaned."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

# A parent that starts a middle process, which starts a stubborn one with shared memory and is then killed.
SCRIPT = """
import os, signal, subprocess, sys, time
from pd_serve.serve import processes

processes.adopt_orphans()
stubborn = '''
import signal, time, os
from multiprocessing import resource_tracker, shared_memory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
memory = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(memory._name, "shared_memory")
print(os.getpid(), memory.name, flush=True)
time.sleep(600)
'''
middle = f'''
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {stubborn!r}], start_new_session=True)
time.sleep(600)
'''
child = subprocess.Popen([sys.executable, "-c", middle], stdout=subprocess.PIPE, text=True, start_new_session=True)
print(child.stdout.readline().strip(), flush=True)
other = subprocess.Popen(["sleep", "600"])
print(other.pid, flush=True)
os.kill(child.pid, signal.SIGKILL)
child.wait()
"""


def run(ending: str) -> list[str]:
    script = SCRIPT + textwrap.dedent(ending)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_an_orphan_that_ignores_sigterm_is_killed_and_its_shared_memory_removed() -> None:
    pid, shared, other, killed, left = run("""
        print(processes.end_descendants(grace_s=3.0), len(processes.descendants()))
    """)
    assert not psutil.pid_exists(int(pid))
    assert not psutil.pid_exists(int(other))
    assert not Path("/dev/shm", shared).exists()
    assert int(killed) >= 1  # Python's own tracker of shared memory may have to be, too
    assert left == "0"


def test_with_a_session_only_that_session_is_ended() -> None:
    pid, _, other, alive = run("""
        orphan = next(each for each in processes.descendants() if each.pid != other.pid)
        processes.end_descendants(session=orphan.pid, grace_s=0.0)
        print(psutil.pid_exists(other.pid)) if (psutil := processes.psutil) else None
        other.kill()
        other.wait()
    """)
    assert not psutil.pid_exists(int(pid))
    assert (alive, psutil.pid_exists(int(other))) == ("True", False)


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_what_ends_when_asked_is_not_killed(seconds: float) -> None:
    code = (
        "import subprocess, sys; from pd_serve.serve import processes; processes.adopt_orphans();"
        f"subprocess.Popen(['sh', '-c', 'trap \"sleep {seconds}; exit\" TERM; echo; while :; do sleep 0.05; done'],"
        "stdout=subprocess.PIPE).stdout.readline(); print(processes.end_descendants(grace_s=10.0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "0"
