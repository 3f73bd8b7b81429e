"""`pd-serve up`: a private Ray with the application on it, asked one question, kept until it is told to stop."""

from __future__ import annotations

import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console

from pd_serve.config import api_keys_text
from pd_serve.gateway.keys import load_keys
from pd_serve.model_dir import DEMO, demo_dir
from pd_serve.ops.ask import last_record, stream_chat, wait_ready, where_time_went
from pd_serve.ops.check import Checked, check
from pd_serve.ops.check_host import this_machine
from pd_serve.ops.failures import OperationFailed
from pd_serve.ops.local_cluster import GIB, LocalCluster
from pd_serve.ops.models import fetch_demo, problem_with_demo
from pd_serve.ops.stages import Stages
from pd_serve.serve.cluster import AppState, DeploymentState

QUESTION = "What is the capital of France, and what is it known for?"
ANSWER_TOKENS = 48
MODEL, RAY, PROBE = "model", "Ray", "first probe"


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """What `pd-serve up` can be told beside the config."""

    host: str | None = None
    port: int | None = None
    dashboard: bool = False
    num_cpus: int | None = None
    object_store_gib: float = 2.0
    timeout_s: float = 600.0
    drain_s: float = 10.0
    logs: Path | None = None
    question: str = QUESTION


class _Interrupted(BaseException):
    """SIGINT or SIGTERM."""


def up(config: str, options: UpOptions, console: Console) -> int:
    """Serve `config` until SIGINT or SIGTERM; return the exit code.

    Raises:
        ConfigError: the config is wrong; nothing was started.
        OperationFailed: it could not be started, or died; nothing of it is left.
    """
    _fetch_if_missing(_check(config, options, model=False), console)
    checked = _check(config, options, model=True)
    key = _probe_key(checked)
    with _interruptible():
        ready = False
        try:
            cluster = LocalCluster(
                checked.serve,
                num_cpus=options.num_cpus,
                object_store_bytes=int(options.object_store_gib * GIB),
                dashboard=options.dashboard,
                start_timeout_s=options.timeout_s,
                drain_s=options.drain_s,
                logs=options.logs,
                env={"PD_SERVE_API_KEYS": f"{api_keys_text()}\npd-serve-up:{key}"} if key else {},
            )
            try:
                _start(cluster, checked, options, key, console)
                ready = True
                _stay(cluster)
            finally:
                _take_down(cluster, console)
        except _Interrupted:
            return 0 if ready else 130
    return 0


def _check(config: str, options: UpOptions, *, model: bool) -> Checked:
    nodes = this_machine()
    if options.num_cpus is not None:
        nodes[0]["CPU"] = float(options.num_cpus)
    return check(
        config,
        nodes=nodes,
        host=options.host,
        port=options.port,
        here=True,
        serve_schema=False,  # the child does it before it starts anything: it imports Ray anyway
        model=model,
    )


def _probe_key(checked: Checked) -> str:
    """A key for our own question, where keys are needed at all; it ends with this run."""
    keys = load_keys(checked.app.access.keys_file, api_keys_text())
    return secrets.token_urlsafe(24) if keys else ""


def _fetch_if_missing(checked: Checked, console: Console) -> None:
    if checked.app.engine == "vllm" and checked.app.model.path == DEMO and not demo_dir().is_dir():
        fetch_demo(console.print)


def _start(cluster: LocalCluster, checked: Checked, options: UpOptions, key: str, console: Console) -> None:
    pools = [f"{role} pool" for role in checked.app.pools]
    stages = Stages(console, [MODEL, RAY, *pools, "ingress", PROBE])
    with stages:
        stages.begin(RAY)
        verified = _verify_model(checked, stages)
        while cluster.state.status != "RUNNING":
            cluster.next_event(0.2)
            if cluster.address:
                stages.done(RAY, cluster.address)
                _show(stages, checked, cluster.state)
            verified()
        _show(stages, checked, cluster.state)
        stages.begin(PROBE, "waiting for /readyz")
        url = f"http://{_reachable(checked.host)}:{checked.port}"
        wait_ready(url, options.timeout_s, lambda: _drain_events(cluster))
        stages.begin(PROBE, "asking")
        name = checked.app.model.served_name
        answer = stream_chat(url, name, options.question, ANSWER_TOKENS, options.timeout_s, key)
        first = next(answer)
        stages.done(PROBE, f"first token {stages.total():.1f} s after the start")
    _print_answer(options.question, first, answer, console)
    for line in where_time_went(last_record(url, key)):
        console.print(f"  {line}", highlight=False)
    console.print(f"\nready at [bold]{url}[/] after {stages.total():.1f} s", highlight=False)
    console.print(f"Ray's own tools: {cluster.access} serve status", style="dim", highlight=False)
    console.print("Ctrl-C ends it", style="dim")


def _print_answer(question: str, first: str, rest: Iterator[str], console: Console) -> None:
    console.print(f"\n[bold]> {question}[/]", highlight=False)
    console.print(first, end="", markup=False, highlight=False)
    for piece in rest:
        console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
        console.file.flush()
    console.print("\n")


def _verify_model(checked: Checked, stages: Stages) -> Callable[[], None]:
    """Hash the demo model while Ray starts. The result raises once it is known to be damaged."""
    if checked.app.engine != "vllm" or checked.app.model.path != DEMO:
        stages.done(MODEL, checked.app.model.path)
        return lambda: None
    stages.begin(MODEL, "checking hashes")
    problems: list[str] = []

    def verify() -> None:
        problem = problem_with_demo()
        if problem:
            problems.append(problem)
        else:
            stages.done(MODEL, str(demo_dir()))

    threading.Thread(target=verify, daemon=True).start()

    def result() -> None:
        if problems:
            raise OperationFailed(f"the demo model is damaged ({problems[0]}): run `pd-serve model fetch`")

    return result


def _show(stages: Stages, checked: Checked, app: AppState) -> None:
    version = checked.app.version
    rows = {f"{role}-{version}": f"{role} pool" for role in checked.app.pools} | {"ingress": "ingress"}
    found = {deployment.name: deployment for deployment in app.deployments}
    for name, row in rows.items():
        deployment = found.get(name)
        if deployment is not None and deployment.status == "HEALTHY":
            stages.done(row, f"{deployment.running} running")
        else:
            stages.begin(row, _note(deployment))


def _note(deployment: DeploymentState | None) -> str:
    if deployment is None:
        return "building the application"
    if deployment.message:
        return deployment.message.splitlines()[0][:100]
    return f"{deployment.running} running, {deployment.starting} starting"


def _drain_events(cluster: LocalCluster) -> None:
    while cluster.next_event(0.0) is not None:
        pass


def _stay(cluster: LocalCluster) -> None:
    while True:
        cluster.next_event(0.5)


def _take_down(cluster: LocalCluster, console: Console) -> None:
    """Stop in order; a second signal ends everything at once."""
    console.print("\nstopping", style="dim")
    try:
        cluster.stop()
    except _Interrupted:
        cluster.kill()


def _reachable(host: str) -> str:
    if host in {"0.0.0.0", "::", ""}:
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


@contextmanager
def _interruptible() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into `_Interrupted` inside."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise _Interrupted

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
