"""One plan of one request, and what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_serve.types import Handoff, Plan

if TYPE_CHECKING:
    from pd_serve.sim.replica import Replica
    from pd_serve.sim.request import Run


class Attempt:
    """Both legs of one attempt. Messages of an attempt that is `over` are late and say nothing any more."""

    __slots__ = (
        "decode_on",
        "fallback",
        "granted_at",
        "handoff",
        "kv_tokens",
        "local_tokens",
        "moved_bytes",
        "number",
        "over",
        "plan",
        "planned_at",
        "prefill_cached",
        "prefill_on",
        "prefill_runs",
        "prefilled_at",
        "run",
    )

    def __init__(
        self,
        run: Run,
        number: int,
        plan: Plan,
        decode_on: Replica,
        prefill_on: Replica | None,
        handoff: Handoff | None,
        now: float,
    ) -> None:
        self.run = run
        self.number = number
        self.plan = plan
        self.decode_on = decode_on
        self.prefill_on = prefill_on
        self.handoff = handoff
        self.planned_at = now
        self.granted_at = 0.0
        self.prefilled_at = 0.0
        self.fallback = ""
        self.kv_tokens = 0
        """Prompt and output budget: what the decode leg counts for in the ingress's own view."""
        self.moved_bytes = 0
        self.local_tokens = 0
        self.prefill_cached = 0
        self.prefill_runs = False
        """The prefill leg was sent and has not ended."""
        self.over = False
