"""Pages in and out of device memory, in the order of the engine's own stream."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from pd_serve.kv.blocks import KvBlocks  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

SHAPE = (64, 8, 16, 256)


def test_pages_survive_the_way_between_device_caches() -> None:
    source = {f"layer.{n}": torch.rand(SHAPE, device="cuda").bfloat16() for n in range(8)}
    target = {name: torch.zeros_like(cache) for name, cache in source.items()}
    ids, into = [5, 60, 2, 33], [9, 0, 63]
    giver, taker = KvBlocks(source), KvBlocks(target)
    expected = {name: cache[ids[1:]].clone() for name, cache in source.items()}
    gathered = giver.gather(ids)
    for cache in source.values():
        cache.zero_()  # the next step of the engine, queued behind the gather
    fence = taker.fence()
    taker.scatter(gathered.pages(), 1, into, fence)
    for name, cache in target.items():
        assert torch.equal(cache[into], expected[name])
        rest = [block for block in range(64) if block not in into]
        assert not cache[rest].any()


def test_a_scatter_waits_for_what_the_engine_had_queued() -> None:
    source = {"layer": torch.rand(SHAPE, device="cuda")}
    target = {"layer": torch.zeros(SHAPE, device="cuda")}
    giver, taker = KvBlocks(source), KvBlocks(target)
    pages = giver.gather([1, 2]).pages()
    big = torch.rand(8192, 8192, device="cuda")
    for _ in range(20):
        big = big @ big  # an earlier step, still running,
    target["layer"][[3, 4]] = 7.0  # which writes the blocks before they were freed and given to us
    taker.scatter(pages, 0, [3, 4], taker.fence())
    torch.cuda.synchronize()
    assert torch.equal(target["layer"][[3, 4]], source["layer"][[1, 2]])
