"""The object store transport on a real Ray cluster, without vLLM: ends in processes of their own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from pd_serve.errors import TransferFailed
from pd_serve.kv.envelope import Envelope
from pd_serve.kv.transport.object_store import ObjectStoreEnd

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

ENVELOPE = Envelope(
    handoff_id="h",
    source="p",
    fingerprint="f",
    prompt_tokens=4,
    prompt_hash=b"",
    rank=0,
    layers=1,
    blocks=1,
    page_bytes=1,
)
MIB = 2**20


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    import ray

    directory = tempfile.mkdtemp(prefix="pdo")
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(
        address="local",
        _temp_dir=directory,
        include_dashboard=False,
        num_cpus=4,
        object_store_memory=100 * MIB,
        log_to_driver=False,
        namespace="pd_serve",
    )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def target(ray_address: str) -> Iterator[ObjectStoreEnd]:
    end = ObjectStoreEnd(ray_address, f"d{time.monotonic_ns()}", receives=True)
    end.wait_ready(60)
    yield end
    end.close()


@pytest.fixture
def source(ray_address: str) -> Iterator[ObjectStoreEnd]:
    end = ObjectStoreEnd(ray_address, "p", receives=False)
    yield end
    end.close()


def envelope(handoff_id: str) -> Envelope:
    return msgspec.structs.replace(ENVELOPE, handoff_id=handoff_id)


def stored_objects(address: str) -> int:
    """Objects in the store, whoever owns them."""
    from ray._private.internal_api import memory_summary

    found = re.search(r"Plasma memory usage .*?, (\d+) objects", memory_summary(address, stats_only=True))
    assert found is not None
    return int(found.group(1))


def eventually(condition: Any, within_s: float = 10.0) -> None:
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("take_first", [True, False])
def test_pages_arrive(source: ObjectStoreEnd, target: ObjectStoreEnd, take_first: bool) -> None:
    pages = os.urandom(3 * MIB)
    take = target.take("h", 20.0) if take_first else None
    source.offer(target.address(), envelope("h"), memoryview(pages), 20.0).result(20)
    if take is None:
        eventually(lambda: target.held() == 1)
        take = target.take("h", 20.0)
    payload = take.result(20)
    assert payload.pages == pages
    assert payload.pages.readonly
    assert payload.envelope == envelope("h")
    target.release("h")
    assert target.held() == 0


@pytest.mark.case("B86")
def test_the_store_does_not_fill(ray_address: str, source: ObjectStoreEnd, target: ObjectStoreEnd) -> None:
    """Four times what the store holds goes through; every fifth is withdrawn, every seventh never taken."""
    pages = memoryview(bytes(4 * MIB))
    for number in range(100):
        handoff_id = f"h{number}"
        if number % 5 == 0:
            target.withdraw(handoff_id, "cancelled")
        lease_s = 0.5 if number % 7 == 1 else 20.0
        source.offer(target.address(), envelope(handoff_id), pages, lease_s).result(20)
        if number % 5 and number % 7 != 1:
            assert target.take(handoff_id, 20.0).result(20).pages.nbytes == pages.nbytes
            target.release(handoff_id)
    eventually(lambda: target.held() == 0)
    eventually(lambda: stored_objects(ray_address) == 0, within_s=20)


@pytest.mark.case("B86")
@pytest.mark.case("B15")
def test_the_death_of_the_sender_is_a_failed_take(ray_address: str, target: ObjectStoreEnd) -> None:
    code = (
        "import sys, msgspec, time\n"
        "from pd_serve.kv.envelope import Envelope\n"
        "from pd_serve.kv.transport.object_store import ObjectStoreEnd\n"
        "from pd_serve.types import KvAddress\n"
        "address, engine_id, envelope = sys.argv[1:]\n"
        "end = ObjectStoreEnd(address, 'p', receives=False)\n"
        "envelope = msgspec.json.decode(envelope, type=Envelope)\n"
        "end.offer(KvAddress('object_store', engine_id), envelope, memoryview(bytes(2**21)), 30.0).result(30)\n"
        "print('offered', flush=True)\n"
        "time.sleep(60)\n"
    )
    arguments = [ray_address, target.address().engine_id, msgspec.json.encode(envelope("dead")).decode()]
    sender = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)
    assert sender.stdout is not None
    assert "offered" in sender.stdout.readline()
    eventually(lambda: target.held() == 1)
    os.kill(sender.pid, signal.SIGKILL)
    sender.wait()
    time.sleep(2)
    began = time.monotonic()
    with pytest.raises(TransferFailed, match="lost"):
        target.take("dead", 20.0).result(20)
    assert time.monotonic() - began < 5
    target.release("dead")
    assert target.held() == 0


def test_nobody_there_is_unreachable(source: ObjectStoreEnd, ray_address: str) -> None:
    gone = ObjectStoreEnd(ray_address, "gone", receives=True)
    gone.wait_ready(60)
    source.offer(gone.address(), envelope("a"), memoryview(b"x"), 5.0).result(20)
    gone.close()
    for attempt in range(2):
        with pytest.raises(TransferFailed, match="unreachable"):
            source.offer(gone.address(), envelope(f"b{attempt}"), memoryview(b"x"), 5.0).result(20)


def test_leases_end_takes_and_offers(source: ObjectStoreEnd, target: ObjectStoreEnd) -> None:
    with pytest.raises(TransferFailed, match="expired"):
        target.take("never", 0.2).result(10)
    source.offer(target.address(), envelope("untaken"), memoryview(b"x"), 3.0).result(20)
    eventually(lambda: target.held() == 1)
    eventually(lambda: target.held() == 0)
    with pytest.raises(TransferFailed, match="expired"):
        target.take("untaken", 5.0).result(5)


def test_withdrawing_ends_a_take_at_once(target: ObjectStoreEnd) -> None:
    take = target.take("w", 60.0)
    began = time.monotonic()
    target.withdraw("w", "prefill_failed")
    with pytest.raises(TransferFailed, match="prefill_failed"):
        take.result(5)
    assert time.monotonic() - began < 1


def offer_what_never_comes(target: ObjectStoreEnd, handoff_ids: list[str]) -> None:
    """Offers whose pages stay on their way, as those of a node that froze."""
    import ray

    never = ray.remote(num_cpus=0)(lambda: time.sleep(600)).remote()
    for handoff_id in handoff_ids:
        encoded = msgspec.msgpack.encode(envelope(handoff_id))
        assert ray.get(target._relay.publish.remote(handoff_id, encoded, [never], 60.0), timeout=20)
    eventually(lambda: target.held() == len(handoff_ids))
    _frozen.append(never)


_frozen: list[Any] = []


@pytest.fixture
def thaw() -> Iterator[None]:
    import ray

    yield
    while _frozen:
        ray.cancel(_frozen.pop(), force=True)


@pytest.mark.case("B12")
def test_pages_of_a_frozen_node_hold_up_nobody_and_end_in_time(
    source: ObjectStoreEnd, target: ObjectStoreEnd, thaw: None
) -> None:
    frozen = [f"frozen{number}" for number in range(20)]
    offer_what_never_comes(target, frozen)
    *cancelled, last = [target.take(handoff_id, 60.0) for handoff_id in frozen[:-1]] + [target.take(frozen[-1], 2.0)]
    source.offer(target.address(), envelope("h"), memoryview(b"xyz"), 20.0).result(20)
    assert bytes(target.take("h", 20.0).result(10).pages) == b"xyz"
    for handoff_id, take in zip(frozen, cancelled, strict=False):
        assert not take.done()
        target.withdraw(handoff_id, "cancelled")
        with pytest.raises(TransferFailed, match="cancelled"):
            take.result(timeout=0)
    with pytest.raises(TransferFailed, match="expired"):
        last.result(10)
    target.release("h")
    eventually(lambda: target.held() == 0)


def test_a_lease_counts_from_the_take(source: ObjectStoreEnd, target: ObjectStoreEnd, thaw: None) -> None:
    began = time.monotonic()
    take = target.take("slow", 3.0)
    time.sleep(1.5)
    offer_what_never_comes(target, ["slow"])
    with pytest.raises(TransferFailed, match="expired"):
        take.result(10)
    assert 3.0 <= time.monotonic() - began < 5.5


def test_closing_ends_everything(ray_address: str) -> None:
    end = ObjectStoreEnd(ray_address, "closing", receives=True)
    take = end.take("x", 60.0)
    end.close()
    end.close()
    with pytest.raises(TransferFailed, match="lost"):
        take.result(5)


def test_drivers_with_equal_random_seeds_do_not_keep_each_other_busy(ray_address: str) -> None:
    code = (
        "import random, sys, time\n"
        "from pd_serve.kv.transport.object_store import join\n"
        "random.seed(0)\n"
        "join(sys.argv[1])\n"
        "assert random.getrandbits(64) == random.Random(0).getrandbits(64)\n"
        "time.sleep(2)\n"
        "before = time.process_time()\n"
        "time.sleep(4)\n"
        "print(time.process_time() - before)\n"
        "time.sleep(1)\n"
    )
    command = [sys.executable, "-c", code, ray_address]
    drivers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    used = [float(driver.communicate(timeout=100)[0]) for driver in drivers]
    assert max(used) < 0.2


def test_a_relay_that_died_comes_back(source: ObjectStoreEnd, target: ObjectStoreEnd) -> None:
    import ray

    take = target.take("after", 60.0)
    source.offer(target.address(), envelope("before"), memoryview(b"x"), 20.0).result(20)
    ray.kill(target._relay, no_restart=False)

    def offered() -> bool:
        try:
            source.offer(target.address(), envelope("after"), memoryview(b"yz"), 20.0).result(20)
        except TransferFailed:
            return False
        return True

    eventually(offered, within_s=60)
    assert bytes(take.result(60).pages) == b"yz"
