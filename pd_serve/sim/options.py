"""What a simulation needs beside the application's config, and the spec made from both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pd_serve.config import AppConfig, Pool
from pd_serve.errors import ConfigError
from pd_serve.policy.admission import AdmissionRules
from pd_serve.policy.routing import RoutingRules
from pd_serve.sim.collect import Slo
from pd_serve.sim.network import Link, Links
from pd_serve.sim.profile import Profile, load_profile
from pd_serve.sim.rules import PathRules, PoolRules
from pd_serve.sim.spec import Control, Fault, Layout, PoolSpec, Spec

NVLINK = Link(bytes_per_s=290e9, latency_s=0.0001)
"""Packed KV over NCCL between two H200 of a node: 576 MB in 2.1 ms."""
NIC = Link(bytes_per_s=45e9, latency_s=0.0002)
"""One 400 Gb/s port a node at nine tenths; assumed."""
ACROSS = Link(bytes_per_s=45e9, latency_s=0.0005)
DEFAULT_LINKS = Links(node=NVLINK, rack=NIC, across=ACROSS, rack_uplink_bytes_per_s=90e9)


class Replicas(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many replicas, in place of the config's."""

    prefill: int | None = None
    decode: int | None = None


class SimOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The simulator's own options."""

    profile: str = "h200-qwen3-8b"
    """Of both pools: a file, or the name of one that ships."""
    prefill_profile: str = ""
    """Of the prefill pool, when it differs."""
    seed: int = 0
    ingresses: int | None = None
    """In place of the config's."""
    replicas: Replicas = Replicas()
    max_tokens: int = 1024
    """What clients that do not say ask for."""
    slo: Slo = Slo()
    links: Links = DEFAULT_LINKS
    layout: Layout = Layout()
    control: Control = Control()
    faults: tuple[Fault, ...] = ()
    window_s: float = 10.0


def read_options(text: str, overrides: Mapping[str, Any], source: str = "options") -> SimOptions:
    """Options in YAML, with `overrides` by name (dots for what lies inside) on top.

    Raises:
        ConfigError: an option is unknown or wrong.
    """
    try:
        tree = msgspec.yaml.decode(text) or {}
        if not isinstance(tree, dict):
            raise ConfigError(f"{source}: must be a mapping")
        for name, value in overrides.items():
            _put(tree, name.split("."), value)
        return msgspec.convert(tree, SimOptions)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{source}: {error}") from error


def _put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        inner = tree.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{name} has no parts")
        tree = inner
    tree[path[-1]] = value


def make_spec(config: AppConfig, options: SimOptions) -> Spec:
    """The cluster that the config describes.

    Raises:
        ConfigError: there is no such profile, or the model's context does not fit into its KV.
    """
    decode = load_profile(options.profile)
    prefill = load_profile(options.prefill_profile or options.profile)
    for profile in (prefill, decode):
        if profile.kv_tokens < config.model.max_model_len:
            raise ConfigError(
                f"max_model_len is {config.model.max_model_len}, profile {profile.name} has KV for {profile.kv_tokens}"
            )
    pool = None
    if config.prefill is not None:
        pool = _pool(config.prefill, prefill, options.replicas.prefill)
    return Spec(
        prefill=pool,
        decode=_pool(config.decode, decode, options.replicas.decode),
        path=path_rules(config, options.max_tokens),
        ingresses=options.ingresses or config.ingress.replicas,
        links=options.links,
        layout=options.layout,
        control=options.control,
        faults=options.faults,
        slo=options.slo,
        window_s=options.window_s,
        seed=options.seed,
    )


def path_rules(config: AppConfig, max_tokens: int) -> PathRules:
    """What the request path reads of the config."""
    limits = config.limits
    return PathRules(
        admission=AdmissionRules(max_running=limits.max_running, max_queue=limits.max_queue),
        routing=RoutingRules(
            min_handoff_tokens=config.min_handoff_tokens,
            prefill_on_decode=config.routing.force == "prefill_on_decode",
        ),
        router=config.routing.policy,
        first_token_timeout_s=limits.first_token_timeout_s,
        total_timeout_s=limits.total_timeout_s,
        no_replica_timeout_s=limits.no_replica_timeout_s,
        lease_s=config.kv.lease_s,
        settle_at_blocks=config.engine == "fake",
        recompute=config.kv.load_failure_policy == "recompute",
        max_model_len=config.model.max_model_len,
        max_tokens=max_tokens,
    )


def _pool(pool: Pool, profile: Profile, replicas: int | None) -> PoolSpec:
    return PoolSpec(
        replicas=replicas or pool.replicas,
        profile=profile,
        rules=PoolRules(
            max_num_seqs=pool.max_num_seqs,
            max_num_batched_tokens=pool.max_num_batched_tokens,
            enable_prefix_caching=pool.enable_prefix_caching,
            gpus=pool.num_gpus,
        ),
    )
