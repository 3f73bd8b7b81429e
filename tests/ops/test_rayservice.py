"""The KubeRay manifest carries a config as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pd_serve.errors import ConfigError
from pd_serve.ops.rayservice import SECRET, manifest

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_applications_are_carried_as_they_are(config: Path) -> None:
    resource: dict[str, Any] = yaml.safe_load(manifest(str(config), "chat", "registry/pd-serve:1"))
    assert (resource["apiVersion"], resource["kind"]) == ("ray.io/v1", "RayService")
    served = yaml.safe_load(resource["spec"]["serveConfigV2"])
    assert served["applications"] == yaml.safe_load(config.read_text())["applications"]
    assert served["http_options"]["host"] == "0.0.0.0"


def test_pods_ask_for_what_their_pool_needs_and_keys_come_from_a_secret(tmp_path: Path) -> None:
    config = tmp_path / "gpu.yaml"
    config.write_text(
        """
applications:
  - name: pd
    route_prefix: /
    import_path: pd_serve.app:build
    args:
      model: {path: demo}
      prefill: {replicas: 3, num_gpus: 1, num_cpus: 4}
      decode: {num_gpus: 2, tensor_parallel_size: 2}
"""
    )
    spec = yaml.safe_load(manifest(str(config), "chat", "i"))["spec"]["rayClusterConfig"]
    groups = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    assert groups["prefill"]["replicas"] == 3
    container = groups["decode"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert "nvidia.com/gpu" not in groups["ingress"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert container["env"][0]["valueFrom"]["secretKeyRef"]["name"] == SECRET
    grace = groups["decode"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > 600


@pytest.mark.parametrize("name", ["", "Chat", "a_b", "-a", "x" * 60])
def test_names_that_kubernetes_refuses(name: str) -> None:
    with pytest.raises(ConfigError, match="not a name for Kubernetes"):
        manifest(str(CONFIGS[0]), name, "i")
