"""What travels with KV bytes and says whose they are: nothing that does not match it is ever decoded (invariant 4)."""

from __future__ import annotations

import zlib

import msgspec

from pd_serve.types import Handoff


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """Describes one rank's part of one hand-off."""

    handoff_id: str
    source: str
    """Engine id of the life of the prefill engine that computed it."""
    fingerprint: str
    """Weights, dtype, block size, layout, packing, engine version: equal on both sides or refused."""
    prompt_tokens: int
    prompt_hash: bytes
    rank: int
    layers: int
    blocks: int
    page_bytes: int
    """Bytes of one block of one layer."""
    checksum: int | None = None
    """`checksum` of the pages; None when switched off."""

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.layers * self.blocks * self.page_bytes


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """What the receiving rank can put into its own blocks for one hand-off."""

    fingerprint: str
    rank: int
    layers: int
    blocks: int
    page_bytes: int


def checksum(pages: memoryview) -> int:
    """CRC-32 (zlib) of the pages. It finds damage, not malice: channels are authenticated elsewhere."""
    return zlib.crc32(pages)


def mismatch(envelope: Envelope, pages: memoryview, handoff: Handoff, expected: Expected) -> str:
    """Why this KV must not be decoded for this hand-off: one word for a metric label, or empty when it may."""
    if envelope.handoff_id != handoff.id:
        return "other_request"
    if envelope.source != handoff.source.engine_id:
        return "other_generation"
    if envelope.fingerprint != expected.fingerprint:
        return "fingerprint"
    if envelope.prompt_tokens != handoff.prompt_tokens or envelope.prompt_hash != handoff.prompt_hash:
        return "other_prompt"
    if envelope.rank != expected.rank:
        return "rank"
    if (envelope.layers, envelope.page_bytes) != (expected.layers, expected.page_bytes):
        return "layout"
    if envelope.blocks != expected.blocks:
        return "blocks"
    if envelope.nbytes != pages.nbytes:
        return "length"
    if envelope.checksum is not None and envelope.checksum != checksum(pages):
        return "checksum"
    return ""
