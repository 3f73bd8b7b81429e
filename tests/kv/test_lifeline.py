from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

CHILD = "import os, time; from pd_serve.kv.lifeline import end_with_parent; end_with_parent({pid}); time.sleep(60)"
PARENT = (
    "import os, subprocess, sys, time\n"
    "code = sys.argv[1].replace('{pid}', str(os.getpid()))\n"
    "child = subprocess.Popen([sys.executable, '-c', code])\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(60)\n"
)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_ends_with_its_parent(how: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    time.sleep(1)
    assert child.is_running()
    os.kill(parent.pid, how)
    parent.wait()
    gone, _ = psutil.wait_procs([child], timeout=10)
    assert gone


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    child = subprocess.Popen([sys.executable, "-c", CHILD.replace("{pid}", str(dead.pid))])
    assert child.wait(timeout=20) == -signal.SIGKILL


@pytest.mark.parametrize("pid", [0, 1])
def test_a_process_that_is_not_the_child_of_that_parent_lives_on(pid: int) -> None:
    code = CHILD.replace("{pid}", str(pid)).replace("time.sleep(60)", "time.sleep(2)")
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
