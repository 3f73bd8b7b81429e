"""`pd-serve check`: everything that can be known to be wrong before anything starts, all of it at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pd_serve.config import AppConfig, api_keys_text
from pd_serve.config_file import ARGS, Reading, read_config
from pd_serve.config_yaml import KeyPath
from pd_serve.errors import ConfigError
from pd_serve.gateway.keys import load_keys
from pd_serve.model_dir import DEMO, demo_dir
from pd_serve.ops.check_args import argument_mistakes
from pd_serve.ops.check_host import Node, port_problem, resource_mistakes
from pd_serve.ops.check_model import model_mistakes
from pd_serve.serve.http_address import is_loopback

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000


@dataclass(frozen=True)
class Checked:
    """A config in which nothing wrong was found."""

    app: AppConfig
    serve: dict[str, Any]
    """The file as Serve gets it, with host and port set."""
    host: str
    port: int
    skipped: tuple[str, ...] = field(default=())
    """What could not be checked, and why."""

    def summary(self) -> list[str]:
        """What would run where, in a few lines."""
        app = self.app
        model = "fake engine" if app.engine == "fake" else f"{_model(app)} as {app.model.served_name}"
        lines = [f"{model}, up to {app.model.max_model_len} tokens, {app.model.dtype}"]
        for role, pool in app.pools.items():
            each = f"{pool.num_cpus:g} CPU" + (f", {pool.num_gpus:g} GPU" if pool.num_gpus else "")
            lines.append(f"{role}-{app.version}: {pool.replicas} x ({each}), {pool.max_num_seqs} sequences at once")
        if app.prefill is None:
            lines.append("no prefill pool: every prompt is computed where it decodes")
        lines.append(
            f"ingress: {app.ingress.replicas} x ({app.ingress.num_cpus:g} CPU), http://{self.host}:{self.port}"
        )
        return lines + [f"not checked: {text}" for text in self.skipped]


def check(
    path: str | os.PathLike[str],
    *,
    nodes: Sequence[Node] | None = None,
    host: str | None = None,
    port: int | None = None,
    here: bool = False,
    serve_schema: bool = True,
    model: bool = True,
    env: Mapping[str, str] | None = None,
) -> Checked:
    """Check the config file at `path`.

    Args:
        nodes: resources of the cluster that it is for; None: not checked.
        host: takes the place of the file's; so does `port`.
        here: it is to run on this machine now: its port must be free, its API keys readable.
        serve_schema: let the installed Serve look at its part too (imports Ray, about a second).
        model: look at the model's directory.

    Raises:
        ConfigError: with one line for every mistake, each `file:line: key path: what is wrong`.
    """
    reading = read_config(path, env)
    if port is not None and not 1 <= port <= 65535:
        raise ConfigError(f"--port must be from 1 to 65535, got {port}")
    skipped: list[str] = []
    known = {mistake.path for mistake in reading.document.mistakes}
    if serve_schema:
        for at, text in _serve_mistakes(reading):
            if at not in known:
                reading.document.add(at, text)
    if reading.app is not None:
        for at, text in _app_mistakes(reading.app, nodes, model, skipped):
            reading.document.add((*ARGS, *at), text)
    serve = _with_address(reading.serve, host, port)
    address = _address(serve)
    if here and reading.app is not None and not reading.document.mistakes:
        for at, text in _mistakes_here(reading.app, *address):
            reading.document.add(at, text)
    if reading.app is None or reading.document.mistakes:
        raise ConfigError("\n".join(reading.mistakes()))
    return Checked(reading.app, serve, *address, skipped=tuple(skipped))


def _app_mistakes(
    app: AppConfig, nodes: Sequence[Node] | None, model: bool, skipped: list[str]
) -> Iterator[tuple[KeyPath, str]]:
    if model:
        yield from model_mistakes(app, skipped)
    yield from argument_mistakes(app, skipped)
    if nodes is None:
        skipped.append("resources and port: no cluster was named (--address, --local)")
    else:
        yield from resource_mistakes(app, nodes)


def _mistakes_here(app: AppConfig, host: str, port: int) -> Iterator[tuple[KeyPath, str]]:
    problem = port_problem(host, port)
    if problem:
        yield ("http_options", "port"), problem
    try:
        keys = load_keys(app.access.keys_file, api_keys_text())
    except ConfigError as error:
        yield (*ARGS, "access", "keys_file"), error.message.removeprefix("access.keys_file: ")
        return
    if not keys and not is_loopback(host):
        text = f"{host} can be reached from other machines, and there are no API keys (access.keys_file)"
        yield ("http_options", "host"), text


def _serve_mistakes(reading: Reading) -> Iterator[tuple[KeyPath, str]]:
    from pd_serve.serve.schema import serve_mistakes

    if isinstance(reading.document.value, dict):
        yield from serve_mistakes(reading.serve)


def _with_address(serve: dict[str, Any], host: str | None, port: int | None) -> dict[str, Any]:
    http = serve.get("http_options")
    http = dict(http) if isinstance(http, dict) else {}
    http["host"] = host or http.get("host", DEFAULT_HOST)
    http["port"] = port or http.get("port", DEFAULT_PORT)
    return {**serve, "http_options": http}


def _address(serve: dict[str, Any]) -> tuple[str, int]:
    return serve["http_options"]["host"], serve["http_options"]["port"]


def _model(app: AppConfig) -> str:
    return f"demo model ({demo_dir().name})" if app.model.path == DEMO else app.model.path
