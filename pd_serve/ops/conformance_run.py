"""`pd-serve conformance`: brings up what is compared, compares, takes it down."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pd_serve.config import AppConfig, api_keys_text
from pd_serve.engine.vllm_args import engine_args, environment
from pd_serve.gateway.keys import load_keys
from pd_serve.model_dir import is_hub_name, resolve_model
from pd_serve.ops.ask import wait_ready
from pd_serve.ops.check import check
from pd_serve.ops.check_host import spare_gpus, visible_gpus
from pd_serve.ops.conformance import Report, compare
from pd_serve.ops.conformance_cases import Case, block_edge_cases
from pd_serve.ops.local_cluster import LocalCluster, free_port
from pd_serve.ops.reference import reference_server
from pd_serve.types import Role

QUICK_PROMPTS = 20
FULL_PROMPTS = 60
"""Each is asked 16 times: four lengths of answer, streamed or not, alone or among others."""
SHOWN = 20
EXACT_FLOAT32 = {"TRITON_F32_DEFAULT": "ieee"}
"""On GPUs, kernels in Triton compute products of float32 in TF32 unless they are told otherwise."""


@contextmanager
def reference_of(app: AppConfig, port: int, log: Path, env: Mapping[str, str] = MappingProxyType({})) -> Iterator[str]:
    """vLLM's own server with the engine arguments of the application's decode pool, without any hand-off.

    Args:
        env: what its environment has beside the pool's.
    """
    model = resolve_model(app.model.path)
    arguments = {**engine_args(app, Role.DECODE, model=model, kv=None), **app.model.frontend_args}
    pool_env = environment(app, Role.DECODE, offline=not is_hub_name(app.model.path))
    with reference_server(arguments, app.model.served_name, port, {**pool_env, **env}, log) as base_url:
        yield base_url


def run_managed(config: str, seed: int | None, console: Console, *, quick: bool) -> Report:
    """Serve `config` in float32 and vLLM beside it, and compare them.

    Where keys are needed, one of an operator is added to the configured ones for as long as this takes.

    Args:
        quick: QUICK_PROMPTS prompts instead of FULL_PROMPTS.

    Raises:
        ConfigError: the config is wrong.
        PdServeError: one of them did not start.
    """
    port = free_port()
    checked = check(config, host="127.0.0.1", port=port, serve_schema=False)
    serve = in_float32(checked.serve)
    app = AppConfig.model_validate(serve["applications"][0]["args"])
    key, env = _own_key(app)
    if seed is None:
        seed = secrets.randbelow(1 << 31)
    console.print(f"seed {seed} (--seed repeats it), float32, blocks of {app.model.block_size} tokens", highlight=False)
    with ExitStack() as running:
        directory = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="pd-conf-")))
        with console.status("starting pd_serve and vLLM's own server"):
            num_gpus, beside = spare_gpus(app, visible_gpus())
            cluster = LocalCluster(serve, num_gpus=num_gpus, env=env)
            running.callback(cluster.stop)
            reference = running.enter_context(reference_of(app, free_port(), directory / "vllm.log", beside))
            cluster.wait_running()
            base_url = f"http://127.0.0.1:{port}"
            wait_ready(base_url, 300.0, lambda: None)
        cases = block_edge_cases(app.model.block_size, QUICK_PROMPTS if quick else FULL_PROMPTS, seed)
        return run_compare(base_url, reference, app.model.served_name, cases, app.min_handoff_tokens, console, key)


def _own_key(app: AppConfig) -> tuple[str, dict[str, str]]:
    """A key for our own requests and the environment that makes it known; empty where no keys are configured."""
    if not load_keys(app.access.keys_file, api_keys_text()):
        return "", {}
    key = secrets.token_urlsafe(24)
    return key, {"PD_SERVE_API_KEYS": f"{api_keys_text()}\noperator:{key}"}


def in_float32(serve: dict[str, Any]) -> dict[str, Any]:
    """The same Serve config with the model in float32, in which batches do not change greedy answers."""
    application = serve["applications"][0]
    args = {**application["args"], "model": {**application["args"].get("model", {}), "dtype": "float32"}}
    for role in ("prefill", "decode"):
        pool = args.get(role, {})
        if pool is not None:
            args[role] = {**pool, "env": {**EXACT_FLOAT32, **pool.get("env", {})}}
    return {**serve, "applications": [{**application, "args": args}]}


def run_compare(
    base_url: str,
    reference: str,
    model: str,
    cases: list[Case],
    block_size: int | None,
    console: Console,
    api_key: str = "",
) -> Report:
    """Compare with a progress bar, then print what was found."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("comparing", total=len(cases))
        report = asyncio.run(
            compare(
                base_url,
                reference,
                model,
                cases,
                block_size,
                progress=lambda done: progress.update(task, completed=done),
                api_key=api_key,
            )
        )
    show(report, console)
    return report


def show(report: Report, console: Console) -> None:
    """Print the verdict and the first differences."""
    for difference in report.differences[:SHOWN]:
        console.print(f"[red]differs[/] {difference.case}: {difference.what}", highlight=False)
    if len(report.differences) > SHOWN:
        console.print(f"... and {len(report.differences) - SHOWN} more", highlight=False)
    for line in report.held:
        console.print(f"[red]still held[/] {line}", highlight=False)
    verdict = "[green]passed[/]" if report.passed else "[red]failed[/]"
    console.print(
        f"{verdict}: {report.compared} answers compared, {len(report.differences)} differences; "
        f"KV moved for {report.moved} of them, {report.moved_bytes / 1e6:.1f} MB",
        highlight=False,
    )
