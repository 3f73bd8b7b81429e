"""Agents: sessions of many turns, each of which begins with everything before it."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator

from pd_serve.sim.clock import Streams
from pd_serve.sim.workloads.arrival import UNIT_TOKENS, Arrival
from pd_serve.sim.workloads.lengths import lognormal, unit_id

TOKEN_S = 0.02
"""Assumed for one token when the next turn's arrival is set: a trace has fixed times."""
_KINDS = 8
"""Kinds of agent, each with its own tool list in front."""
_TOOL_UNITS = 8


class _Session:
    """One agent at work."""

    def __init__(self, number: int, begins: float, rng: random.Random) -> None:
        self.number = number
        self.at = begins
        self.turns = min(int(rng.expovariate(1.0 / 8.0)) + 1, 40)
        self.turn = 0
        kind = rng.randrange(_KINDS)
        self.tools = tuple(unit_id("tools", kind, unit) for unit in range(_TOOL_UNITS))
        self.prompt = _TOOL_UNITS * UNIT_TOKENS + lognormal(rng, 870, 5342, 8192)

    def units(self, first: int, last: int) -> tuple[int, ...]:
        """Ids of the full units from number `first` up to `last`."""
        own = (1 << 48) + (self.number << 16)
        return tuple(self.tools[unit] if unit < _TOOL_UNITS else own + unit for unit in range(first, last))

    def next_turn(self, rng: random.Random) -> Arrival:
        """The present turn; afterwards the session stands before the one that follows."""
        output = lognormal(rng, 184, 939, 2048)
        full = self.prompt // UNIT_TOKENS
        tail = () if self.prompt % UNIT_TOKENS == 0 else ((1 << 52) + (self.number << 16) + self.turn,)
        arrival = Arrival(
            at=self.at,
            prompt_tokens=self.prompt,
            output_tokens=output,
            units=self.units(0, full) + tail,
            output_units=self.units(full, (self.prompt + output) // UNIT_TOKENS),
            session=f"agent-{self.number}",
        )
        self.turn += 1
        self.at += output * TOKEN_S + rng.lognormvariate(0.5, 1.0)
        self.prompt += output + lognormal(rng, 870, 5342, 8192)
        return arrival


def agent(times: Iterator[float], streams: Streams, most_tokens: int = 28_000) -> Iterator[Arrival]:
    """Sessions that begin at `times`, in the order of their turns.

    Sources: coding agents (TraceLab, arXiv:2606.30560: a turn appends a median of 857 to 886 tokens, p90 5,342 to
    8,310; outputs have a median of 184 to 252, p90 939 to 1,671; about 8 tool calls to a request of the user);
    Mooncake's tool and agent trace (FAST'25: 8,596 prompt and 182 output tokens on average, 59 % of the prompt
    reusable). Sessions end at `most_tokens`, 8 kinds of agent with 4,096 tokens of tools each are our choice.
    A turn follows the one before by an assumed time for its tokens plus the tool's (median 1.6 s).
    """
    rng = streams.get("agent")
    going: list[tuple[float, int, _Session]] = []
    for number, begins in enumerate(times):
        while going and going[0][0] <= begins:
            yield from _advance(going, rng, most_tokens)
        heapq.heappush(going, (begins, number, _Session(number, begins, rng)))
    while going:
        yield from _advance(going, rng, most_tokens)


def _advance(going: list[tuple[float, int, _Session]], rng: random.Random, most_tokens: int) -> Iterator[Arrival]:
    _, number, session = heapq.heappop(going)
    yield session.next_turn(rng)
    if session.turn < session.turns and session.prompt <= most_tokens:
        heapq.heappush(going, (session.at, number, session))
