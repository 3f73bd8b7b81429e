"""The connector in an engine's worker: moves the bytes of one rank.

The step loop only gathers (so that blocks are free at once) and collects what has ended. Everything else happens behind
futures of the transport and in a small pool of threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import torch

from pd_serve.errors import TransferFailed
from pd_serve.kv.blocks import Gathered, KvBlocks
from pd_serve.kv.connector_metadata import LoadJob, LoadResult, PdMetadata, PdWorkerMetadata, SaveJob, Settings
from pd_serve.kv.envelope import Envelope, Expected, checksum, mismatch
from pd_serve.kv.ledger import Ledger, Owner
from pd_serve.kv.transport.base import Payload, Transport

logger = logging.getLogger(__name__)

COPY_THREADS = 2
IDLE_WAIT_S = 0.005
"""How long a step that computes nothing waits for a load to end. The engine steps all the time while a request waits
for its KV, and would keep a core busy that prefill may need. A new request waits no longer than this."""
READY_TIMEOUT_S = 120.0
"""How long this rank's transport may take to become reachable at the start of the engine."""


class _Load:
    """One load under way."""

    def __init__(self, job: LoadJob, fence: torch.cuda.Event | None) -> None:
        self.job = job
        self.fence = fence
        self.started = time.monotonic()
        self.arrived = 0.0
        self.cancelled = False


class WorkerSide:
    """One rank's hand-offs.

    Args:
        transport: this rank's end; closed with this object.
    """

    def __init__(self, settings: Settings, rank: int, transport: Transport) -> None:
        self._settings = settings
        self._rank = rank
        self.transport = transport
        self._blocks: KvBlocks | None = None
        self._fingerprint = ""
        self._lock = threading.Condition()
        # Neither ledger is expired by a clock: an entry is open just as long as its bytes are held here, and closing
        # it earlier would only hide them. A take is over by its lease because the transport ends it by then, wherever
        # its bytes are; a give when its offer is over. A peer that died shows as `unreachable` or `lost` there.
        self._gives = Ledger()
        self._takes = Ledger()
        self._loads: dict[str, _Load] = {}
        self._ended: list[LoadResult] = []
        self._reported: list[LoadResult] = []
        self._pool = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="pd-kv-copy")

    @property
    def blocks(self) -> KvBlocks:
        if self._blocks is None:
            raise RuntimeError("the KV cache is not registered yet")
        return self._blocks

    def register(self, kv_caches: Mapping[str, torch.Tensor], packing: str) -> None:
        self._blocks = KvBlocks(kv_caches, packing)
        self._fingerprint = f"{self._settings.identity}:{self._blocks.layout()}"

    # ------------------------------------------------------------------------------------ prefill

    def run_saves(self, metadata: PdMetadata) -> None:
        """Gather the prompts that were completed in this step. Only the copy out of the blocks is waited for."""
        for job in metadata.saves:
            handoff, now = job.handoff, time.monotonic()
            with self._lock:
                if not self._gives.open(handoff.id, now, handoff.lease_s):
                    continue
            gathered = self.blocks.gather(job.block_ids)
            with self._lock:
                self._gives.move(handoff.id, Owner.TRANSPORT, gathered.nbytes)
            self._pool.submit(self._offer, job, gathered)

    def _offer(self, job: SaveJob, gathered: Gathered) -> None:
        try:
            pages = gathered.pages()
            envelope = self._envelope(job, pages)
            offered = self.transport.offer(job.handoff.target, envelope, pages, job.handoff.lease_s)
        except Exception as error:
            self._offered(job, _reason(error))
        else:
            offered.add_done_callback(lambda done: self._offered(job, _failure(done)))

    def _envelope(self, job: SaveJob, pages: memoryview) -> Envelope:
        return Envelope(
            handoff_id=job.handoff.id,
            source=self._settings.engine_id,
            fingerprint=self._fingerprint,
            prompt_tokens=job.handoff.prompt_tokens,
            prompt_hash=job.prompt_hash,
            rank=self._rank,
            layers=self.blocks.layers,
            blocks=len(job.block_ids),
            page_bytes=self.blocks.page_bytes,
            checksum=checksum(pages) if self._settings.checksum else None,
        )

    def _offered(self, job: SaveJob, failure: str) -> None:
        now = time.monotonic()
        with self._lock:
            if failure:
                self._gives.fail(job.handoff.id, now, failure)
            else:
                self._gives.done(job.handoff.id, now)
        if failure:
            logger.warning("hand-off %s could not be offered: %s", job.handoff.id, failure)

    # ------------------------------------------------------------------------------------ decode

    def start_loads(self, metadata: PdMetadata) -> None:
        """Begin this step's loads; end those that nobody waits for."""
        for handoff_id, reason in metadata.drops:
            self._drop(handoff_id, reason)
        for handoff_id in metadata.cancels:
            self._cancel(handoff_id)
        if metadata.loads:
            fence = self.blocks.fence()
            for job in metadata.loads:
                self._start(_Load(job, fence))

    def withdraw(self, handoff_id: str, reason: str) -> None:
        """Nothing will come for this hand-off: end its load now, or refuse it when it is asked for."""
        self.transport.withdraw(handoff_id, reason)

    def _drop(self, handoff_id: str, reason: str) -> None:
        now = time.monotonic()
        with self._lock:
            self._takes.open(handoff_id, now, 0.0)
            self._takes.cancel(handoff_id, now, reason)
        self.transport.release(handoff_id)

    def _cancel(self, handoff_id: str) -> None:
        with self._lock:
            load = self._loads.get(handoff_id)
            if load is not None:
                load.cancelled = True
        if load is not None:
            self.transport.withdraw(handoff_id, "cancelled")

    def _start(self, load: _Load) -> None:
        handoff = load.job.handoff
        with self._lock:
            self._loads[handoff.id] = load
            self._takes.open(handoff.id, load.started, handoff.lease_s)
        taken = self.transport.take(handoff.id, handoff.lease_s)
        taken.add_done_callback(lambda done: self._pool.submit(self._finish, load, done))

    def _finish(self, load: _Load, taken: Future[Payload]) -> None:
        load.arrived = time.monotonic()
        try:
            failure = self._copy_in(load, taken)
        except Exception as error:
            if not isinstance(error, TransferFailed):
                logger.exception("hand-off %s could not be loaded", load.job.handoff.id)
            failure = _reason(error)
        # Let go of the pages before the end becomes visible: nothing may be held once the request goes on.
        self.transport.release(load.job.handoff.id)
        self._end(load, failure)

    def _copy_in(self, load: _Load, taken: Future[Payload]) -> str:
        payload, job = taken.result(), load.job
        if load.cancelled:
            return "cancelled"
        with self._lock:
            self._takes.move(job.handoff.id, Owner.TARGET, payload.pages.nbytes)
        blocks = self.blocks
        expected = Expected(
            fingerprint=self._fingerprint,
            rank=self._rank,
            layers=blocks.layers,
            blocks=job.skip + len(job.block_ids),
            page_bytes=blocks.page_bytes,
        )
        reason = mismatch(payload.envelope, payload.pages, job.handoff, expected)
        if not reason:
            blocks.scatter(payload.pages, job.skip, job.block_ids, load.fence)
        return reason

    def _end(self, load: _Load, failure: str) -> None:
        job, now = load.job, time.monotonic()
        result = LoadResult(
            request_id=job.request_id,
            handoff_id=job.handoff.id,
            failure=failure,
            block_ids=job.block_ids,
            bytes=len(job.block_ids) * self.blocks.block_bytes,
            wait_s=load.arrived - load.started,
            copy_s=now - load.arrived,
            cancelled=load.cancelled,
        )
        with self._lock:
            if load.cancelled:
                self._takes.cancel(job.handoff.id, now, "cancelled")
            elif failure:
                self._takes.fail(job.handoff.id, now, failure)
            else:
                self._takes.done(job.handoff.id, now)
            self._loads.pop(job.handoff.id, None)
            self._ended.append(result)
            self._lock.notify()

    # ------------------------------------------------------------------------------------ what has ended

    def collect_finished(self, metadata: PdMetadata) -> set[str]:
        """Requests whose load ended since the last call, well or not; the next two methods are about the same ones."""
        with self._lock:
            if metadata.idle and self._loads and not self._ended:
                self._lock.wait(IDLE_WAIT_S)
            self._reported, self._ended = self._ended, []
        return {result.request_id for result in self._reported}

    def failed_blocks(self) -> set[int]:
        """Blocks that were to be loaded and hold nothing valid."""
        failed = [result for result in self._reported if result.failure and not result.cancelled]
        return {block_id for result in failed for block_id in result.block_ids}

    def worker_metadata(self) -> PdWorkerMetadata | None:
        return PdWorkerMetadata(self._reported) if self._reported else None

    # ------------------------------------------------------------------------------------ what is asked from outside

    def describe(self) -> dict[str, Any]:
        """Plain data: `fingerprint` and `block_bytes` of this rank. Waits until peers can reach it."""
        self.transport.wait_ready(READY_TIMEOUT_S)
        return {"fingerprint": self._fingerprint, "block_bytes": self.blocks.block_bytes}

    def stats(self) -> dict[str, Any]:
        """Plain data: `held` hand-offs, `loading`, and the counts of both ledgers."""
        with self._lock:
            return {
                "held": self._gives.held() + self.transport.held(),
                "loading": len(self._loads),
                "gives": msgspec.to_builtins(self._gives.counts()),
                "takes": msgspec.to_builtins(self._takes.counts()),
            }

    def close(self) -> None:
        self.transport.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _failure(done: Future[None]) -> str:
    error = done.exception()
    return _reason(error) if error is not None else ""


def _reason(error: BaseException) -> str:
    return error.message if isinstance(error, TransferFailed) else "internal"
