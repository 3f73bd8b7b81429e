"""A configuration file, read as strictly as it can be: every mistake at once, each with its line.

One YAML file is both Ray Serve's config and ours (`applications[0].args`). Serve itself ignores keys that it does not
know; here they are mistakes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pd_serve.config import AppConfig
from pd_serve.config_mistakes import explain, places_of, shown, unknown_name
from pd_serve.config_yaml import Document, KeyPath, expand, parse, show_path, type_name
from pd_serve.errors import ConfigError

IMPORT_PATH = "pd_serve.app:build"
INGRESS = "ingress"
ARGS: KeyPath = ("applications", 0, "args")

# Serve's own names (ray.serve.schema); a test holds them against the installed Serve.
ROOT_KEYS = (
    "proxy_location http_options grpc_options controller_options logging_config tracing_config applications "
    "target_capacity"
).split()
HTTP_KEYS = (
    "host port root_path request_timeout_s keep_alive_timeout_s ssl_keyfile ssl_certfile ssl_keyfile_password "
    "ssl_ca_certs"
).split()
APPLICATION_KEYS = (
    "name route_prefix import_path runtime_env deployments autoscaling_policy args logging_config "
    "external_scaler_enabled"
).split()
DEPLOYMENT_KEYS = (
    "name num_replicas max_ongoing_requests max_queued_requests backpressure_config user_config autoscaling_config "
    "graceful_shutdown_wait_loop_s graceful_shutdown_timeout_s health_check_period_s health_check_timeout_s "
    "ray_actor_options placement_group_bundles placement_group_strategy placement_group_bundle_label_selector "
    "max_replicas_per_node logging_config request_router_config gang_scheduling_config deployment_actors "
    "rolling_update_percentage max_surge_percent"
).split()
_SERVE_PLACES = {
    "": ROOT_KEYS,
    "http_options": HTTP_KEYS,
    "applications[0]": APPLICATION_KEYS,
    "applications[0].deployments[]": DEPLOYMENT_KEYS,
}


@dataclass(frozen=True)
class Reading:
    """What a file says. `app` is None exactly when `document.mistakes` is not empty because of its args."""

    file: str
    document: Document
    app: AppConfig | None

    @property
    def serve(self) -> dict[str, Any]:
        """The whole file as Serve gets it: placeholders in `args` are still there, `build` replaces them."""
        value = self.document.value
        return value if isinstance(value, dict) else {}

    def mistakes(self) -> list[str]:
        """One line for each, in the order of the file."""
        return [mistake.show(self.file, hide=ARGS) for mistake in sorted(set(self.document.mistakes))]


def load_config(path: str | os.PathLike[str], env: Mapping[str, str] | None = None) -> AppConfig:
    """The application's config in the Serve YAML file at `path`.

    Raises:
        ConfigError: with one line for every mistake, each `file:line: key path: what is wrong`.
    """
    reading = read_config(path, env)
    if reading.app is None or reading.document.mistakes:
        raise ConfigError("\n".join(reading.mistakes()))
    return reading.app


def app_config(args: Mapping[str, Any], env: Mapping[str, str] | None = None) -> AppConfig:
    """The config in `args` as Serve hands them to `build`, with placeholders replaced.

    Raises:
        ConfigError: with one line for every mistake, each `key path: what is wrong`.
    """
    document = Document()
    app = _read_args(document, dict(args), (), os.environ if env is None else env)
    if app is None:
        raise ConfigError("\n".join(f"{show_path(one.path)}: {one.text}" for one in document.mistakes))
    return app


def read_config(path: str | os.PathLike[str], env: Mapping[str, str] | None = None) -> Reading:
    """Read the file at `path`; mistakes are in the result.

    Raises:
        ConfigError: the file cannot be read at all.
    """
    file = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{file}: cannot be read: {reason}") from error
    document = parse(text)
    if document.value is None:
        if not document.mistakes:
            document.add((), "the file is empty; it needs `applications:` with one application")
        return Reading(file, document, None)
    return Reading(file, document, _read_root(document, os.environ if env is None else env))


def _read_root(document: Document, env: Mapping[str, str]) -> AppConfig | None:
    root = document.value
    if not isinstance(root, dict):
        document.add((), f"the file must be a mapping with `applications:`, got {type_name(root)}")
        return None
    _unknown_keys(document, root, (), ROOT_KEYS)
    if "http_options" in root and _is_mapping(document, root["http_options"], ("http_options",)):
        _read_http(document, root["http_options"])
    for key in root:
        if key != "applications":
            _no_placeholders(document, root[key], (key,))
    return _read_applications(document, root.get("applications"), env)


def _read_http(document: Document, http: dict[str, Any]) -> None:
    _unknown_keys(document, http, ("http_options",), HTTP_KEYS)
    port = http.get("port", 8000)
    placeholder = isinstance(port, str) and "${" in port
    if not placeholder and (isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535):
        document.add(("http_options", "port"), f"must be a whole number from 1 to 65535, got {shown(port)}")
    host = http.get("host", "")
    if not isinstance(host, str):
        document.add(("http_options", "host"), f"must be text, got {shown(host)}")


def _read_applications(document: Document, applications: Any, env: Mapping[str, str]) -> AppConfig | None:
    if applications is None and ("applications",) not in document.lines:
        document.add(("applications",), "is required: a list of one application")
        return None
    if not isinstance(applications, list) or len(applications) != 1:
        got = f"{len(applications)}" if isinstance(applications, list) else type_name(applications)
        document.add(("applications",), f"must be a list of exactly one application, got {got}")
        return None
    here: KeyPath = ("applications", 0)
    application = applications[0]
    if not _is_mapping(document, application, here):
        return None
    _unknown_keys(document, application, here, APPLICATION_KEYS)
    _import_path(document, application.get("import_path"))
    prefix = application.get("route_prefix", "/")
    if prefix is not None and not (isinstance(prefix, str) and prefix.startswith("/")):
        document.add((*here, "route_prefix"), f"must be text that begins with '/', got {shown(prefix)}")
    for key in application:
        if key != "args":
            _no_placeholders(document, application[key], (*here, key))
    args = application.get("args", {})
    app = _read_args(document, args, ARGS, env) if _is_mapping(document, args, ARGS) else None
    if "deployments" in application:
        version = args.get("version", "v1") if isinstance(args, dict) else "v1"
        _read_deployments(document, application["deployments"], str(version))
    return app


def _import_path(document: Document, value: Any) -> None:
    path: KeyPath = ("applications", 0, "import_path")
    if value is None:
        document.add(path, f"is required: import_path: {IMPORT_PATH}")
    elif value != IMPORT_PATH:
        document.add(path, f"must be {IMPORT_PATH}, got {shown(value)}")


def _read_args(document: Document, args: dict[str, Any], at: KeyPath, env: Mapping[str, str]) -> AppConfig | None:
    expanded, problems = expand(args, env)
    for path, text in problems:
        document.add((*at, *path), text)
    before = len(document.mistakes)
    try:
        app = AppConfig.model_validate(expanded)
    except ValidationError as error:
        unset = {path for path, _text in problems}
        for path, text in explain(error, AppConfig):
            if path not in unset:
                document.add(*_pointed_at(document, at, path, _serve_place(path, text)))
        app = None
    return None if problems or len(document.mistakes) > before else app


def _pointed_at(document: Document, at: KeyPath, path: KeyPath, text: str) -> tuple[KeyPath, str]:
    """A message about the whole that begins with the name of a key is shown at that key."""
    if path:
        return (*at, *path), text
    name, _, rest = text.partition(" ")
    named = (*at, *name.split("."))
    return (named, rest) if named in document.lines else (at, text)


def _serve_place(path: KeyPath, text: str) -> str:
    """Say so when a key that is unknown to us is one of Serve's, given in the wrong place."""
    if not text.startswith("unknown key; allowed"):
        return text
    places = [f"{place}.{path[-1]}".lstrip(".") for place, keys in _SERVE_PLACES.items() if path[-1] in keys]
    return f"unknown key here; it is Serve's and belongs at {' or '.join(places)}" if places else text


def _read_deployments(document: Document, deployments: Any, version: str) -> None:
    here: KeyPath = ("applications", 0, "deployments")
    if not isinstance(deployments, list):
        document.add(here, f"must be a list, got {shown(deployments)}")
        return
    names = [INGRESS, f"prefill-{version}", f"decode-{version}"]
    for number, deployment in enumerate(deployments):
        at = (*here, number)
        if not _is_mapping(document, deployment, at):
            continue
        _unknown_keys(document, deployment, at, DEPLOYMENT_KEYS)
        name = deployment.get("name")
        if name not in names:
            document.add((*at, "name"), unknown_name(str(name), names, what=f"there is no deployment {shown(name)}"))


def _unknown_keys(document: Document, mapping: dict[str, Any], at: KeyPath, allowed: list[str]) -> None:
    for key in mapping:
        if key in allowed:
            continue
        ours = [show_path((*ARGS, *place)) for place in places_of(AppConfig, key)]
        serves = [f"{place}.{key}".lstrip(".") for place, keys in _SERVE_PLACES.items() if key in keys]
        document.add((*at, key), unknown_name(key, allowed, serves or ours))


def _is_mapping(document: Document, value: Any, at: KeyPath) -> bool:
    if isinstance(value, dict):
        return True
    document.add(at, f"must be a mapping of keys, got {shown(value)}")
    return False


def _no_placeholders(document: Document, value: Any, at: KeyPath) -> None:
    if isinstance(value, dict):
        for key, child in value.items():
            _no_placeholders(document, child, (*at, key))
    elif isinstance(value, list):
        for number, child in enumerate(value):
            _no_placeholders(document, child, (*at, number))
    elif isinstance(value, str) and "${" in value:
        document.add(at, f"{shown(value)}: placeholders work under args only; this part is read by Serve itself")
