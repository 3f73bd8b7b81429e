"""Compares two OpenAI servers request by request: ours against vLLM's own, which is the reference."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
import msgspec

from pd_serve.ops.conformance_cases import Case, groups
from pd_serve.ops.openai_client import Answer, complete

QUIET_WITHIN_S = 10.0


class Difference(msgspec.Struct, frozen=True):
    """One case that the two servers answered differently, or ours not as planned."""

    case: str
    what: str


class Report(msgspec.Struct, kw_only=True):
    """What a comparison found."""

    compared: int = 0
    moved: int = 0
    """Requests whose KV went from a prefill to a decode replica."""
    moved_bytes: int = 0
    differences: list[Difference] = []
    held: list[str] = []
    """What was still held when all was over."""

    @property
    def passed(self) -> bool:
        return self.compared > 0 and not self.differences and not self.held


async def compare(
    base_url: str,
    reference: str,
    model: str,
    cases: list[Case],
    block_size: int | None,
    progress: Callable[[int], None] = lambda done: None,
    api_key: str = "",
) -> Report:
    """Send every case to both servers, group by group.

    Args:
        base_url: ours. With `block_size` it must be a pd_serve application: its records are checked, too.
        block_size: prompts of at least so many tokens must have been handed over; None does not look.
        progress: called with the number of cases compared so far.
        api_key: sent to both; where ours has keys it must be an operator's, who sees what is held.
    """
    report = Report(differences=[], held=[])
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with httpx.AsyncClient(timeout=300.0, headers=headers) as client:
        for group in groups(cases):
            pairs = await asyncio.gather(*(_ask_both(client, base_url, reference, model, case) for case in group))
            for case, (ours, theirs) in zip(group, pairs, strict=True):
                report.differences += differences(case, ours, theirs)
                report.compared += 1
            if block_size is not None:
                await _check_moved(client, base_url, group, [ours for ours, _ in pairs], block_size, report)
            progress(report.compared)
        if block_size is not None:
            report.held = await held(client, base_url, QUIET_WITHIN_S)
    return report


async def _ask_both(
    client: httpx.AsyncClient, base_url: str, reference: str, model: str, case: Case
) -> tuple[Answer, Answer]:
    body = case.body(model)
    ours, theirs = await asyncio.gather(complete(client, base_url, body), complete(client, reference, body))
    return ours, theirs


def differences(case: Case, ours: Answer, theirs: Answer) -> list[Difference]:
    """Every field in which the two answers differ."""
    mine, reference = ours.essence(), theirs.essence()
    return [
        Difference(str(case), f"{name}: ours {mine[name]!r}, reference {reference[name]!r}")
        for name in mine
        if mine[name] != reference[name]
    ]


async def _check_moved(
    client: httpx.AsyncClient, base_url: str, cases: list[Case], answers: list[Answer], block_size: int, report: Report
) -> None:
    """Every prompt with a full block was handed over, every shorter one was not: nothing silent (case B05)."""
    records = (await client.get(f"{base_url}/pd/records", params={"limit": 4 * len(cases)})).json()
    for case, answer in zip(cases, answers, strict=True):
        record = next((r for r in records if r["id"].startswith(answer.id)), None)
        kv = (record or {}).get("kv") or {}
        outcome = kv.get("outcome", "no record")
        expected = "moved" if len(case.prompt) >= block_size else "local"
        if outcome != expected:
            reason = kv.get("reason", "")
            report.differences.append(Difference(str(case), f"KV: {outcome} ({reason}), expected {expected}"))
        if outcome == "moved":
            report.moved += 1
            report.moved_bytes += kv["bytes"]


async def held(client: httpx.AsyncClient, base_url: str, within_s: float) -> list[str]:
    """What the replicas still hold after `within_s`; empty as soon as they hold nothing (check Q)."""
    give_up = time.monotonic() + within_s
    while True:
        view = (await client.get(f"{base_url}/pd/replicas")).json()
        found = [line for replica in (*view["prefill"], *view["decode"]) for line in _held_by(replica)]
        if not found or time.monotonic() > give_up:
            return found
        await asyncio.sleep(0.5)


def _held_by(replica: dict[str, Any]) -> list[str]:
    counts = ("waiting", "running", "waiting_prompt_tokens", "kv_tokens_used", "reserved_tokens", "handoffs_held")
    stats = replica["stats"]
    return [f"{replica['info']['id']}: {name} = {stats[name]}" for name in counts if stats.get(name)]
