"""The class that vLLM loads (`kv_connector: PdConnector`, `kv_connector_module_path: pd_serve.kv.connector`).

vLLM makes one in the scheduler's process and one in each worker. It only passes calls on to the side that it plays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from pd_serve import compat
from pd_serve.kv.connector_metadata import PdMetadata, PdStats, PdWorkerMetadata, Settings, settings_of
from pd_serve.kv.connector_scheduler import SchedulerSide
from pd_serve.kv.connector_worker import WorkerSide
from pd_serve.kv.lifeline import end_with_parent
from pd_serve.kv.transport.base import Transport
from pd_serve.types import Role

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class PdConnector(KVConnectorBase_V1):
    """Hands over whole prompts between a prefill and a decode engine of equal fingerprint."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise NotImplementedError("models with more than one kind of KV cache cannot be handed over yet")
        settings = settings_of(vllm_config)
        end_with_parent(settings.parent_pid)
        ranks = vllm_config.parallel_config.tensor_parallel_size
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(vllm_config.cache_config.block_size, ranks)
        else:
            rank = compat.tensor_parallel_rank()
            self._worker = WorkerSide(settings, rank, _make_transport(settings, rank, ranks))

    # ------------------------------------------------------------------------------------ scheduler side

    @property
    def scheduler_side(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler_side.new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.scheduler_side.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PdMetadata:
        return self.scheduler_side.build_metadata(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler_side.connector_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler_side.finished(request)
        return False, None

    # ------------------------------------------------------------------------------------ worker side

    @property
    def worker_side(self) -> WorkerSide:
        assert self._worker is not None
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker_side.register(kv_caches, compat.kv_packing(self._vllm_config, kv_caches))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker_side.start_loads(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        return  # loads are asynchronous, between steps

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return  # whole prompts are gathered once, after the step that completes them

    def wait_for_save(self) -> None:
        self.worker_side.run_saves(self._step())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self.worker_side.collect_finished(self._step())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker_side.failed_blocks()

    def build_connector_worker_meta(self) -> PdWorkerMetadata | None:
        return self.worker_side.worker_metadata()

    def _step(self) -> PdMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PdMetadata)
        return metadata

    # ------------------------------------------------------------------------------------ both

    def get_kv_connector_stats(self) -> PdStats | None:
        if self._scheduler is None:
            return None
        reports = self._scheduler.take_reports()
        return PdStats.of(reports) if reports else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PdStats:
        return PdStats(data=data or {})

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()


def _make_transport(settings: Settings, rank: int, ranks: int) -> Transport:
    if settings.transport != "object_store":
        raise ValueError(f"there is no KV transport {settings.transport!r}")
    from pd_serve.kv.transport.object_store import ObjectStoreEnd

    receives = settings.role is Role.DECODE
    return ObjectStoreEnd(settings.ray_address, settings.engine_id, rank, ranks, receives=receives)
