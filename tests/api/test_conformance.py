"""`pd-serve conformance` in short: every length of prompt, every way of asking, alone and eight at once."""

from __future__ import annotations

import random
import secrets

import pytest

from pd_serve.ops.conformance import compare
from pd_serve.ops.conformance_cases import block_edge_cases, edge_lengths, groups
from tests.api.ask import Server
from tests.api.deployment import Deployment

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


async def test_answers_are_those_of_vllms_own_server_and_kv_moves(
    demo: Deployment, reference: Server, full_length: bool
) -> None:
    seed = secrets.randbelow(1 << 31)
    cases = block_edge_cases(demo.block_size, prompts=len(edge_lengths(demo.block_size)), seed=seed)
    if not full_length:  # half of the groups of each kind
        by_group = list(groups(cases))
        alone = [group for group in by_group if len(group) == 1]
        together = [group for group in by_group if len(group) > 1]
        kept = random.Random(seed).sample(alone, len(alone) // 2) + together[: len(together) // 2]
        cases = [case for group in kept for case in group]
    report = await compare(demo.server.base_url, reference.base_url, demo.server.model, cases, demo.block_size)
    assert report.compared == len(cases)
    assert report.passed, (f"seed {seed}", report.differences[:5], report.held)
    assert report.moved > 0
