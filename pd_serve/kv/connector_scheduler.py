"""The connector in the engine's scheduler: decides what is saved and loaded, and when. Touches no bytes and no network.

A hand-off is used once. With `n > 1` every child carries the same hand-off: the first one that is asked leads and
loads it, the others wait until its blocks are in the prefix cache and follow by prefix hit.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from enum import Enum, auto
from typing import TYPE_CHECKING

import msgspec

from pd_serve.kv.connector_metadata import LoadJob, LoadResult, PdMetadata, PdWorkerMetadata, SaveJob
from pd_serve.kv.params import HandoffParams, blocks_to_move, from_transfer_params
from pd_serve.types import Handoff, KvOutcome, KvReport, Role, hash_tokens

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

REMEMBERED = 4096
"""Used hand-off ids that are remembered."""


class _Stage(Enum):
    NEW = auto()
    LOADING = auto()
    ARRIVED = auto()  # the load is over, its request has not been scheduled again yet
    SETTLED = auto()  # nothing more will come of it: requests go on with what the prefix cache has


class _Give:
    """A prompt that is being computed here for another engine."""

    def __init__(self, request: Request, handoff: Handoff) -> None:
        self.request = request
        self.handoff = handoff
        self.block_ids: list[int] = []


class _Take:
    """A hand-off that is to be loaded here, for one request or for the children of one."""

    def __init__(self, handoff: Handoff, stage: _Stage) -> None:
        self.handoff = handoff
        self.stage = stage
        self.members: set[str] = set()
        self.leader = ""
        self.asked_tokens = 0


class SchedulerSide:
    """One engine's hand-offs, as its scheduler sees them.

    Args:
        ranks: workers that each load their own part.
    """

    def __init__(self, block_size: int, ranks: int) -> None:
        self._block_size = block_size
        self._ranks = ranks
        self._gives: dict[str, _Give] = {}
        self._takes: dict[str, _Take] = {}
        self._take_of: dict[str, _Take] = {}
        self._used: OrderedDict[str, None] = OrderedDict()
        self._results: dict[str, list[LoadResult]] = {}
        self._reports: dict[str, KvReport] = {}
        self._metadata = PdMetadata()

    # ------------------------------------------------------------------------------------ decode

    def new_matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond `local_tokens` that will be loaded; None to be asked again later."""
        take = self._take(request)
        if take is None or take.stage is _Stage.SETTLED:
            return 0, False
        take.leader = take.leader or request.request_id
        if take.leader != request.request_id:
            return None, False
        if take.stage is not _Stage.NEW:  # the load failed, and the request starts over
            return 0, False
        # The whole prompt: the scheduler steps back by one token, whose logits it needs. Only that one missing
        # means that there is nothing worth moving.
        missing = request.num_prompt_tokens - local_tokens
        take.asked_tokens = missing if missing > 1 else 0
        if request.skip_reading_prefix_cache:  # vLLM 0.32 would not take them anyway; 0.26 would
            return 0, False
        return take.asked_tokens, take.asked_tokens > 0

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """The request has blocks: start to load into them, or settle without."""
        self._note_give(request)
        take = self._take(request)
        if take is None or take.leader != request.request_id:
            return
        if take.stage is _Stage.ARRIVED:
            take.stage = _Stage.SETTLED
        elif take.stage is _Stage.NEW and external_tokens == 0:
            self._settle_without_load(take)
        elif take.stage is _Stage.NEW:
            self._load(take, request, blocks, external_tokens)

    def connector_output(self, output: KVConnectorOutput) -> None:
        """Results of loads that ended in this step."""
        metadata = output.kv_connector_worker_meta
        if not isinstance(metadata, PdWorkerMetadata):
            return
        for result in metadata.results:
            results = self._results.get(result.handoff_id)
            if results is not None:
                results.append(result)
                if len(results) == self._ranks:
                    self._load_ended(self._results.pop(result.handoff_id))

    def take_reports(self) -> dict[str, KvReport]:
        """What became of hand-offs since the last call, by hand-off id."""
        reports, self._reports = self._reports, {}
        return reports

    def _take(self, request: Request) -> _Take | None:
        take = self._take_of.get(request.request_id)
        if take is None and (params := _params(request)) and params.role is Role.DECODE:
            handoff = params.handoff
            take = self._takes.get(handoff.id)
            if take is None:
                stage = _Stage.SETTLED if handoff.id in self._used else _Stage.NEW
                take = self._takes[handoff.id] = _Take(handoff, stage)
            take.members.add(request.request_id)
            self._take_of[request.request_id] = take
        return take

    def _load(self, take: _Take, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        take.stage = _Stage.LOADING
        skip = (request.num_prompt_tokens - external_tokens) // self._block_size
        end = blocks_to_move(request.num_prompt_tokens, self._block_size)
        block_ids = list(blocks.get_block_ids()[0][skip:end])
        self._results[take.handoff.id] = []
        self._metadata.loads.append(
            LoadJob(request_id=request.request_id, handoff=take.handoff, block_ids=block_ids, skip=skip)
        )

    def _settle_without_load(self, take: _Take) -> None:
        if take.asked_tokens:  # there was something to take: prompt_logprobs may not read cached KV
            report = KvReport(outcome=KvOutcome.RECOMPUTED, reason="not_allowed")
        else:
            report = KvReport(outcome=KvOutcome.LOCAL, reason="prefix_hit")
        take.stage = _Stage.SETTLED
        self._reports[take.handoff.id] = report
        self._metadata.drops.append((take.handoff.id, report.reason))

    def _load_ended(self, results: list[LoadResult]) -> None:
        handoff_id = results[0].handoff_id
        failure = next((result.failure for result in results if result.failure), "")
        self._reports[handoff_id] = KvReport(
            outcome=KvOutcome.RECOMPUTED if failure else KvOutcome.MOVED,
            reason=failure,
            bytes=0 if failure else sum(result.bytes for result in results),
            blocks=0 if failure else len(results[0].block_ids),
            wait_s=max(result.wait_s for result in results),
            copy_s=max(result.copy_s for result in results),
        )
        take = self._takes.get(handoff_id)
        if take is not None and take.stage is _Stage.LOADING:
            take.stage = _Stage.ARRIVED

    # ------------------------------------------------------------------------------------ prefill

    def _note_give(self, request: Request) -> None:
        if request.request_id in self._gives:
            return
        params = _params(request)
        if params is not None and params.role is Role.PREFILL and params.handoff.id not in self._used:
            self._gives[request.request_id] = _Give(request, params.handoff)

    def build_metadata(self, output: SchedulerOutput) -> PdMetadata:
        """The step's jobs. A prompt that completes in this step is saved in this step, before its blocks are freed."""
        if self._gives:
            self._follow_blocks(output)
        metadata, self._metadata = self._metadata, PdMetadata()
        metadata.idle = output.total_num_scheduled_tokens == 0
        return metadata

    def _follow_blocks(self, output: SchedulerOutput) -> None:
        for new in output.scheduled_new_reqs:
            if give := self._gives.get(new.req_id):
                give.block_ids = list(new.block_ids[0])
                self._save_if_complete(give, new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            if give := self._gives.get(request_id):
                added = cached.new_block_ids[index]
                new_ids = list(added[0]) if added is not None else []
                give.block_ids = new_ids if request_id in cached.resumed_req_ids else give.block_ids + new_ids
                self._save_if_complete(give, cached.num_computed_tokens[index], output)

    def _save_if_complete(self, give: _Give, computed_tokens: int, output: SchedulerOutput) -> None:
        request = give.request
        if computed_tokens + output.num_scheduled_tokens[request.request_id] < request.num_prompt_tokens:
            return
        del self._gives[request.request_id]
        self._mark_used(give.handoff.id)
        end = blocks_to_move(request.num_prompt_tokens, self._block_size)
        if end > 0:
            prompt_hash = hash_tokens(request.prompt_token_ids or (), request.cache_salt)
            self._metadata.saves.append(
                SaveJob(handoff=give.handoff, block_ids=give.block_ids[:end], prompt_hash=prompt_hash)
            )

    # ------------------------------------------------------------------------------------ both

    def finished(self, request: Request) -> None:
        """The request is over, for whatever reason, or was aborted before it began."""
        self._gives.pop(request.request_id, None)
        take = self._take(request)
        if take is None:
            return
        del self._take_of[request.request_id]
        take.members.discard(request.request_id)
        if take.leader == request.request_id:
            self._leader_left(take)
        if not take.members:
            del self._takes[take.handoff.id]
            self._mark_used(take.handoff.id)
            if take.stage is _Stage.NEW:
                self._metadata.drops.append((take.handoff.id, "aborted"))

    def _leader_left(self, take: _Take) -> None:
        take.leader = ""
        if take.stage is _Stage.LOADING:
            self._metadata.cancels.append(take.handoff.id)
        if take.stage is not _Stage.NEW:
            take.stage = _Stage.SETTLED

    def _mark_used(self, handoff_id: str) -> None:
        self._used[handoff_id] = None
        if len(self._used) > REMEMBERED:
            self._used.popitem(last=False)


def _params(request: Request) -> HandoffParams | None:
    """Never raises: one request's wrong data must not end the engine."""
    if not request.kv_transfer_params:
        return None
    try:
        return from_transfer_params(request.kv_transfer_params)
    except msgspec.ValidationError as error:
        logger.warning("request %s carries a hand-off that cannot be read: %s", request.request_id, error)
        return None
