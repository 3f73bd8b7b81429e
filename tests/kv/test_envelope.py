from __future__ import annotations

import msgspec
import pytest

from pd_serve.kv.envelope import Envelope, Expected, checksum, mismatch
from pd_serve.types import Handoff, KvAddress, hash_tokens

PAGES = memoryview(bytes(range(96)))
HANDOFF = Handoff(
    id="h",
    prompt_tokens=40,
    prompt_hash=hash_tokens(range(40)),
    source=KvAddress("in_process", "p"),
    target=KvAddress("in_process", "d"),
    lease_s=1.0,
)
ENVELOPE = Envelope(
    handoff_id="h",
    source="p",
    fingerprint="f",
    prompt_tokens=40,
    prompt_hash=hash_tokens(range(40)),
    rank=0,
    layers=3,
    blocks=2,
    page_bytes=16,
    checksum=checksum(PAGES),
)
EXPECTED = Expected(fingerprint="f", rank=0, layers=3, blocks=2, page_bytes=16)


def test_kv_that_matches_may_be_decoded() -> None:
    assert mismatch(ENVELOPE, PAGES, HANDOFF, EXPECTED) == ""
    unchecked = msgspec.structs.replace(ENVELOPE, checksum=None)
    assert mismatch(unchecked, PAGES, HANDOFF, EXPECTED) == ""


@pytest.mark.case("B16")
@pytest.mark.case("B82")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"handoff_id": "g"}, "other_request"),
        ({"source": "q"}, "other_generation"),
        ({"fingerprint": "g"}, "fingerprint"),
        ({"prompt_tokens": 41}, "other_prompt"),
        ({"prompt_hash": hash_tokens(range(1, 41))}, "other_prompt"),
        ({"rank": 1}, "rank"),
        ({"layers": 2}, "layout"),
        ({"page_bytes": 8}, "layout"),
        ({"blocks": 1}, "blocks"),
        ({"checksum": 1}, "checksum"),
    ],
)
def test_invariant_4_kv_that_differs_in_one_field_is_refused(change: dict[str, object], reason: str) -> None:
    assert mismatch(msgspec.structs.replace(ENVELOPE, **change), PAGES, HANDOFF, EXPECTED) == reason


def test_every_field_is_checked() -> None:
    tested = {"handoff_id", "source", "fingerprint", "prompt_tokens", "prompt_hash", "rank", "layers", "page_bytes"}
    assert {field.name for field in msgspec.structs.fields(Envelope)} == tested | {"blocks", "checksum"}


@pytest.mark.parametrize("pages", [PAGES[:95], memoryview(bytes(97)), memoryview(b"")])
def test_wrong_length_is_refused(pages: memoryview) -> None:
    assert mismatch(ENVELOPE, pages, HANDOFF, EXPECTED) == "length"


def test_one_flipped_bit_is_refused() -> None:
    damaged = bytearray(PAGES)
    damaged[50] ^= 1
    assert mismatch(ENVELOPE, memoryview(damaged), HANDOFF, EXPECTED) == "checksum"


def test_an_envelope_survives_the_wire() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ENVELOPE), type=Envelope) == ENVELOPE
