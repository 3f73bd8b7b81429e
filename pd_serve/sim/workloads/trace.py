"""Workloads in files: JSON lines in the format of Mooncake's traces, and the live system's own records.

A line of a trace has `timestamp` (milliseconds), `input_length`, `output_length` (tokens) and `hash_ids`, one for each
512 tokens of the prompt together with everything before it. Further fields are ours and optional: `output_hash_ids`,
`max_tokens`, `tenant`, `session_id`, `leaves_after` (milliseconds).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec

from pd_serve.errors import ConfigError
from pd_serve.sim.workloads.arrival import UNIT_TOKENS, Arrival


class TraceLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a trace."""

    timestamp: float
    input_length: int
    output_length: int = 0
    hash_ids: tuple[int, ...] = ()
    output_hash_ids: tuple[int, ...] = ()
    max_tokens: int = 0
    tenant: str = ""
    session_id: str | int = ""
    leaves_after: float | None = None


class RecordLine(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay needs of one record of the live system (`path.record.Record`)."""

    arrived: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    tenant: str = ""
    outcome: str = "ok"
    finished_at: float | None = None


def read_trace(lines: Iterable[str | bytes], unit_tokens: int = UNIT_TOKENS) -> Iterator[Arrival]:
    """Arrivals of a trace, in the order of the file.

    Args:
        unit_tokens: tokens that one hash id of this trace stands for; only `UNIT_TOKENS` can carry prefixes over, from
            other traces only the lengths and times are taken.

    Raises:
        ConfigError: a line is not as it should be, or earlier than the one before it.
    """
    before = 0.0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = _decode(line, number, TraceLine)
        _check(row, number)
        if row.timestamp < before:
            raise ConfigError(f"line {number}: timestamp {row.timestamp:g} is before that of the line above")
        before = row.timestamp
        yield _arrival(row, keep_ids=unit_tokens == UNIT_TOKENS)


def write_trace(arrivals: Iterable[Arrival]) -> Iterator[str]:
    """Lines of a trace, each with its line end."""
    encode = msgspec.json.Encoder().encode
    for row in arrivals:
        leaves = row.leaves_after_s
        line = TraceLine(
            timestamp=row.at * 1000.0,
            input_length=row.prompt_tokens,
            output_length=row.output_tokens,
            hash_ids=row.units,
            output_hash_ids=row.output_units,
            max_tokens=row.max_tokens,
            tenant=row.tenant,
            session_id=row.session,
            leaves_after=None if leaves == float("inf") else leaves * 1000.0,
        )
        yield encode(line).decode() + "\n"


def read_records(lines: Iterable[str | bytes]) -> list[Arrival]:
    """The workload that a log of live records saw, from the first arrival on. Records say nothing of prefixes.

    Those that were shed have no output; they count as one token. A client that left leaves again.
    """
    rows = [_decode(line, number, RecordLine) for number, line in enumerate(lines, 1) if line.strip()]
    rows.sort(key=lambda row: row.arrived)
    return [
        Arrival(
            at=row.arrived - rows[0].arrived,
            prompt_tokens=row.prompt_tokens,
            output_tokens=max(row.output_tokens, 1),
            max_tokens=row.max_tokens,
            tenant=row.tenant,
            leaves_after_s=row.finished_at if row.outcome == "cancelled" and row.finished_at else float("inf"),
        )
        for row in rows
    ]


T = TypeVar("T", TraceLine, RecordLine)


def _decode(line: str | bytes, number: int, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"line {number}: {error}") from error


def _check(row: TraceLine, number: int) -> None:
    if row.input_length < 1 or row.output_length < 0 or row.timestamp < 0:
        raise ConfigError(f"line {number}: lengths and times must not be negative, a prompt has at least one token")


def _arrival(row: TraceLine, keep_ids: bool) -> Arrival:
    leaves = row.leaves_after
    return Arrival(
        at=row.timestamp / 1000.0,
        prompt_tokens=row.input_length,
        output_tokens=max(row.output_length, 1),
        units=row.hash_ids if keep_ids else (),
        output_units=row.output_hash_ids if keep_ids else (),
        max_tokens=row.max_tokens,
        tenant=row.tenant,
        session=str(row.session_id),
        leaves_after_s=float("inf") if leaves is None else leaves / 1000.0,
    )
