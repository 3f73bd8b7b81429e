"""What the two sides of the connector tell each other, and how they are set up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from pd_serve.types import Handoff, KvReport, Role

REPORTS = "reports"
"""Key of the connector's stats under which reports travel: hand-off id to `KvReport` as plain data."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The connector's own settings, out of `kv_connector_extra_config`."""

    role: Role
    transport: str
    ray_address: str
    engine_id: str
    """Made anew for each life of the engine."""
    identity: str
    """Hash of everything but the page layout that both sides must agree on."""
    checksum: bool = True
    parent_pid: int = 0
    """The process that the engine must not outlive; 0 for none."""


def settings_of(vllm_config: Any) -> Settings:
    """Raises msgspec.ValidationError when the extra config is not ours."""
    return msgspec.convert(dict(vllm_config.kv_transfer_config.kv_connector_extra_config), Settings)


class SaveJob(msgspec.Struct, frozen=True, kw_only=True):
    """Gather these blocks in this very step, and offer them."""

    handoff: Handoff
    block_ids: list[int]
    prompt_hash: bytes
    """Of the prompt that was really computed."""


class LoadJob(msgspec.Struct, frozen=True, kw_only=True):
    """Take a hand-off and put all its blocks but the first `skip` into these."""

    request_id: str
    handoff: Handoff
    block_ids: list[int]
    skip: int


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank's load ended. Every load ends exactly once."""

    request_id: str
    handoff_id: str
    failure: str
    """One word, or empty when every byte is in place."""
    block_ids: list[int]
    bytes: int
    wait_s: float
    copy_s: float
    cancelled: bool = False


@dataclass
class PdMetadata(KVConnectorMetadata):
    """From the scheduler side to every worker, each step."""

    saves: list[SaveJob] = field(default_factory=list)
    loads: list[LoadJob] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    """Hand-offs whose load nobody waits for any more."""
    drops: list[tuple[str, str]] = field(default_factory=list)
    """(hand-off id, reason): will not be loaded at all."""
    idle: bool = False
    """The step computes nothing."""


@dataclass
class PdWorkerMetadata(KVConnectorWorkerMetadata):
    """From the workers to the scheduler side, in the steps in which a load ended."""

    results: list[LoadResult]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> PdWorkerMetadata:
        if not isinstance(other, PdWorkerMetadata):
            raise TypeError(f"cannot add {type(other).__name__}")
        return PdWorkerMetadata(self.results + other.results)


@dataclass
class PdStats(KVConnectorStats):
    """Carries reports from the scheduler side to the engine's front end, whichever way a request ends there."""

    @classmethod
    def of(cls, reports: Mapping[str, KvReport]) -> PdStats:
        return cls(data={REPORTS: {handoff_id: msgspec.to_builtins(r) for handoff_id, r in reports.items()}})

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> PdStats:
        return PdStats(data={REPORTS: {**self.data.get(REPORTS, {}), **other.data.get(REPORTS, {})}})

    def reduce(self) -> dict[str, int | float]:
        return {"handoffs": len(self.data.get(REPORTS, {}))}

    def is_empty(self) -> bool:
        return not self.data.get(REPORTS)


def reports_in(stats: Mapping[str, Any] | None) -> dict[str, KvReport]:
    """The reports in the stats of one step, by hand-off id."""
    reports = (stats or {}).get(REPORTS, {})
    return {handoff_id: msgspec.convert(report, KvReport) for handoff_id, report in reports.items()}
