"""Methods that vLLM adds to its workers (`worker_extension_cls`), to be called with `collective_rpc`."""

from __future__ import annotations

from typing import Any

from pd_serve.kv.connector_worker import WorkerSide


class KvExtension:
    """Results are plain data, one per rank."""

    def pd_kv_withdraw(self, handoff_id: str, reason: str) -> None:
        """Nothing will come for this hand-off."""
        worker_side().withdraw(handoff_id, reason)

    def pd_kv_stats(self) -> dict[str, Any]:
        """See `WorkerSide.stats`."""
        return worker_side().stats()

    def pd_kv_describe(self) -> dict[str, Any]:
        """See `WorkerSide.describe`."""
        return worker_side().describe()


def worker_side() -> WorkerSide:
    """The connector of the worker in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    side = connector.worker_side
    assert isinstance(side, WorkerSide)
    return side
