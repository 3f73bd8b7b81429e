from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from pd_serve.kv.blocks import KvBlocks  # noqa: E402

SHAPE = (8, 2, 4, 6)  # blocks, heads, tokens, channels


def caches(layers: int = 3, order: tuple[int, ...] = (0, 1, 2, 3)) -> dict[str, torch.Tensor]:
    """Random caches whose physical layout is a permutation of the logical one."""
    made = {}
    for layer in range(layers):
        physical = torch.rand([SHAPE[i] for i in order])
        made[f"layer.{layer}"] = physical.permute([order.index(i) for i in range(4)])
    return made


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_survive_the_way_whatever_the_layouts(order: tuple[int, ...], dtype: str) -> None:
    source = {name: cache.to(getattr(torch, dtype)) for name, cache in caches().items()}
    target = {name: cache.to(getattr(torch, dtype)).zero_() for name, cache in caches(order=order).items()}
    pages = KvBlocks(source).gather([5, 1, 7]).pages()
    assert pages.nbytes == 3 * KvBlocks(source).block_bytes
    KvBlocks(target).scatter(memoryview(bytes(pages)), 1, [2, 3])
    for name, cache in target.items():
        assert torch.equal(cache[2], source[name][1])
        assert torch.equal(cache[3], source[name][7])
        untouched = [0, 1, 4, 5, 6, 7]
        assert not cache[untouched].any()


def test_gathered_pages_do_not_change_with_the_cache() -> None:
    source = caches()
    gathered = KvBlocks(source).gather([0, 1])
    before = bytes(gathered.pages())
    for cache in source.values():
        cache.zero_()
    assert bytes(gathered.pages()) == before


def test_pages_that_do_not_fit_are_refused_before_a_byte_is_written() -> None:
    target = caches()
    before = {name: cache.clone() for name, cache in target.items()}
    blocks = KvBlocks(target)
    for nbytes in (0, blocks.block_bytes - 1, 3 * blocks.block_bytes):
        with pytest.raises(ValueError, match="do not fit"):
            blocks.scatter(memoryview(bytes(nbytes)), 0, [0, 1])
    assert all(torch.equal(cache, before[name]) for name, cache in target.items())


def test_layout_says_what_both_sides_must_share() -> None:
    layout = KvBlocks(caches()).layout()
    assert layout == KvBlocks(caches(order=(0, 2, 1, 3))).layout()
    assert layout != KvBlocks(caches(layers=2)).layout()
    assert layout != KvBlocks(caches(), packing="cpu:vec").layout()
    assert layout != KvBlocks({name: c.half() for name, c in caches().items()}).layout()
    assert layout != KvBlocks({name: c[:, :1] for name, c in caches().items()}).layout()
    assert layout == KvBlocks({name: c[:4] for name, c in caches().items()}).layout()  # sizes of caches may differ


def test_layers_that_share_a_cache_are_moved_once() -> None:
    shared = caches(layers=2)
    shared["layer.9"] = shared["layer.0"]
    assert KvBlocks(shared).layers == 2


@pytest.mark.parametrize("wrong", [{}, {"a": torch.zeros(4, 2), "b": torch.zeros(4, 3)}, {"a": [torch.zeros(4, 2)]}])
def test_caches_that_cannot_be_moved_are_refused(wrong: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError):
        KvBlocks(wrong)
