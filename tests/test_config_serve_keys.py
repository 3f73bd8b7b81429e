"""Our lists of Serve's keys, and our look at its values, against the installed Serve."""

from __future__ import annotations

from typing import Any

import pytest

from pd_serve import config_file
from pd_serve.serve.schema import serve_mistakes


def test_the_lists_of_keys_are_those_of_the_installed_serve() -> None:
    from ray.serve import schema

    assert set(config_file.ROOT_KEYS) == set(schema.ServeDeploySchema.model_fields)
    assert set(config_file.HTTP_KEYS) == set(schema.HTTPOptionsSchema.model_fields)
    assert set(config_file.DEPLOYMENT_KEYS) == set(schema.DeploymentSchema.model_fields)
    # Serve refuses host and port in an application of a file that may hold several.
    assert set(config_file.APPLICATION_KEYS) == set(schema.ServeApplicationSchema.model_fields) - {"host", "port"}


def deployment(**keys: Any) -> dict[str, Any]:
    application = {"name": "pd", "import_path": "a:b", "deployments": [{"name": "decode-v1", **keys}]}
    return {"applications": [application]}


@pytest.mark.case("B33")
@pytest.mark.parametrize(
    ("keys", "path", "text"),
    [
        ({"max_ongoing_request": 4}, ("max_ongoing_request",), "did you mean max_ongoing_requests?"),
        (
            {"autoscaling_config": {"max_ongoing_requests": 4}},
            ("autoscaling_config", "max_ongoing_requests"),
            "unknown key",
        ),
        ({"autoscaling_config": {"min_replicas": 3, "max_replicas": 1}}, ("autoscaling_config",), "max_replicas"),
        (
            {"autoscaling_config": {"initial_replicas": 9, "min_replicas": 1, "max_replicas": 2}},
            ("autoscaling_config",),
            "initial_replicas",
        ),
        ({"ray_actor_options": {"num_cpu": 1}}, ("ray_actor_options", "num_cpu"), "did you mean num_cpus?"),
        ({"num_replicas": 0}, ("num_replicas",), "more than 0"),
    ],
)
def test_what_serve_would_ignore_or_find_too_late(keys: dict[str, Any], path: tuple[str, ...], text: str) -> None:
    found = serve_mistakes(deployment(**keys))
    at = ("applications", 0, "deployments", 0, *path)
    assert any(where[: len(at)] == at and text in what for where, what in found), found


def test_a_right_config_has_no_mistakes() -> None:
    assert serve_mistakes(deployment(num_replicas=2, autoscaling_config=None)) == []
