"""`engine_args` and `frontend_args` against vLLM's own argument lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pd_serve import compat_args
from pd_serve.config import AppConfig, Model, Pool
from pd_serve.config_mistakes import shown, unknown_name
from pd_serve.config_yaml import KeyPath

# Arguments of vLLM's that have a typed place of their own here, where that differs in name or place.
_TYPED_ELSEWHERE = {"model": "model.path", "served_model_name": "model.served_name"}
_OURS = {
    "kv_transfer_config": "pd_serve sets it; see kv.transport",
    "kv_events_config": "pd_serve sets it",
    "data_parallel_size": "every replica is one data-parallel rank; see replicas",
}
_SERVES = {"host", "port", "uds", "root_path", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs"}


def argument_mistakes(app: AppConfig, skipped: list[str]) -> Iterator[tuple[KeyPath, str]]:
    """(path under args, what is wrong) of every argument that vLLM does not have, or that belongs elsewhere."""
    engine = {("model", "engine_args"): app.model.engine_args}
    engine |= {(role, "engine_args"): pool.engine_args for role, pool in app.pools.items()}
    if not any(engine.values()) and not app.model.frontend_args:
        return
    known_engine, known_frontend = compat_args.engine_arguments(), compat_args.frontend_arguments()
    if known_engine is None or known_frontend is None:
        skipped.append("engine_args and frontend_args: vLLM is not installed here")
        return
    for path, given in engine.items():
        yield from _engine(path, given, known_engine, known_frontend)
    yield from _frontend(app.model.frontend_args, known_engine, known_frontend)


def _engine(
    path: KeyPath, given: Mapping[str, Any], engine: compat_args.Arguments, frontend: compat_args.Arguments
) -> Iterator[tuple[KeyPath, str]]:
    for name, value in given.items():
        at = (*path, name)
        typed = _typed_place(name, str(path[0]))
        if typed:
            yield at, f"is set as {typed}"
        elif name in _OURS:
            yield at, f"must not be set: {_OURS[name]}"
        elif name in frontend and name not in engine:
            yield at, f"is an argument of vLLM's server; it belongs at model.frontend_args.{name}"
        else:
            yield from _known(at, name, value, engine, "vLLM's engine has no such argument")


def _frontend(
    given: Mapping[str, Any], engine: compat_args.Arguments, frontend: compat_args.Arguments
) -> Iterator[tuple[KeyPath, str]]:
    for name, value in given.items():
        at = ("model", "frontend_args", name)
        if name in _SERVES:
            yield at, "has no effect here: Serve owns the HTTP server; see http_options"
        elif name in engine and name not in frontend:
            yield (
                at,
                f"is an engine argument; it belongs at {_typed_place(name, 'model') or f'model.engine_args.{name}'}",
            )
        else:
            yield from _known(at, name, value, frontend, "vLLM's server has no such argument")


def _known(
    at: KeyPath, name: str, value: Any, known: compat_args.Arguments, complaint: str
) -> Iterator[tuple[KeyPath, str]]:
    underscored = name.lstrip("-").replace("-", "_")
    if name not in known and underscored in known:
        yield at, f"{complaint}; did you mean {underscored}?"
    elif name not in known:
        near = unknown_name(underscored, list(known), what=complaint)
        yield at, near if "did you mean" in near else complaint
    elif not compat_args.accepts(known[name], value):
        yield at, f"must be {known[name]}, got {shown(value)}"


def _typed_place(name: str, section: str) -> str:
    """Where an argument of vLLM's has a typed key of its own, or empty."""
    if name in _TYPED_ELSEWHERE:
        return _TYPED_ELSEWHERE[name]
    if name in Model.model_fields:
        return f"model.{name}"
    if name in Pool.model_fields:
        return f"{section}.{name}" if section != "model" else f"prefill.{name} and decode.{name}"
    return ""
