"""How a hand-off gets into an engine's request: the one prefill clamp, and decode's part.

Prefill's parameters are built from an allow-list, never copied from the caller's: nothing the caller asked for about
sampling, stopping or output can then change, refuse or prolong the leg whose only purpose is the prompt's KV.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_serve import compat
from pd_serve.kv.params import EXTRA_ARG, HandoffParams, to_extra_args
from pd_serve.types import Handoff, Role

if TYPE_CHECKING:
    from vllm import SamplingParams


def prefill_sampling(handoff: Handoff) -> SamplingParams:
    """One greedy token that nothing can stop or refuse, and the hand-off."""
    return compat.new_sampling(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        extra_args=to_extra_args(HandoffParams(Role.PREFILL, handoff)),
    )


def decode_sampling(params: SamplingParams, handoff: Handoff | None) -> SamplingParams:
    """`params` with this hand-off, or with none; whatever the caller put in its place is dropped (case B26)."""
    extra_args = {name: value for name, value in (params.extra_args or {}).items() if name != EXTRA_ARG}
    if handoff is not None:
        extra_args |= to_extra_args(HandoffParams(Role.DECODE, handoff))
    params.extra_args = extra_args or None
    return params
