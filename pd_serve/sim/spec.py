"""Everything that a simulation is made of, but for the workload."""

from __future__ import annotations

from typing import Literal

import msgspec

from pd_serve.sim.collect import Slo
from pd_serve.sim.network import Links
from pd_serve.sim.profile import Profile
from pd_serve.sim.rules import PathRules, PoolRules
from pd_serve.types import Role


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One pool."""

    replicas: int
    profile: Profile
    rules: PoolRules


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where replicas go: nodes are filled one after the other, prefill and decode evenly mixed."""

    gpus_per_node: int = 8
    nodes_per_rack: int = 4


class Control(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How fast the controller is."""

    membership_s: float = 0.1
    """From its knowledge of a replica to the ingresses'."""
    detect_s: float = 1.0
    """From a replica's death until the controller knows and starts another."""
    drain_s: float = 600.0
    """How long a leaving replica may finish its work."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that goes wrong.

    `pick` chooses among the replicas of the pool that are ready then, modulo their number.
    """

    at: float
    kind: Literal["kill", "hang", "slow", "drain"]
    role: Role
    pick: int
    seconds: float = 0.0
    """How long `hang` and `slow` last."""
    factor: float = 1.0
    """How many times as long steps take while `slow`."""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster."""

    prefill: PoolSpec | None
    decode: PoolSpec
    path: PathRules
    ingresses: int
    links: Links
    layout: Layout = Layout()
    control: Control = Control()
    faults: tuple[Fault, ...] = ()
    slo: Slo = Slo()
    window_s: float = 10.0
    seed: int = 0

    def pool(self, role: Role) -> PoolSpec | None:
        return self.prefill if role is Role.PREFILL else self.decode
