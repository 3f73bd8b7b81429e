from hypothesis import given
from hypothesis import strategies as st

from pd_serve.sim.blocks import Blocks, Unit, units_of


def unit(number: int, blocks: int = 2) -> Unit:
    return Unit(number, blocks, number * 16)


def fill(blocks: Blocks, *units: Unit) -> None:
    """A sequence computes these units and ends."""
    private = sum(unit.blocks for unit in units)
    assert blocks.take(private)
    held = [unit for unit in units if blocks.publish(unit)]
    blocks.release(held, private - sum(unit.blocks for unit in held))


def test_units_are_cut_at_full_blocks():
    units = units_of((7, 8, 9), 0, 1100, 512, 16)
    assert units == (Unit(7, 32, 512), Unit(8, 32, 1024), Unit(9, 4, 1088))


def test_a_unit_without_a_full_block_is_left_out():
    assert units_of((7, 8), 0, 520, 512, 16) == (Unit(7, 32, 512),)


def test_units_of_an_output_begin_where_they_stand():
    assert units_of((5,), 2, 1536, 512, 16) == (Unit(5, 32, 1536),)


def test_block_sizes_that_do_not_divide_a_unit_still_add_up():
    units = units_of(tuple(range(4)), 0, 2000, 512, 48)
    assert sum(unit.blocks for unit in units) == 2000 // 48
    assert units[-1].end == 2000 // 48 * 48


def test_a_prefix_is_found_again_and_held_only_once():
    blocks = Blocks(10, caching=True)
    fill(blocks, unit(1), unit(2))
    assert (blocks.available, blocks.used, blocks.free) == (10, 0, 6)
    assert blocks.match((unit(1), unit(2), unit(3))) == 2
    blocks.hold(unit(1))
    blocks.hold(unit(1))
    assert blocks.used == 2
    blocks.release([unit(1)], 0)
    assert blocks.used == 2
    blocks.release([unit(1)], 0)
    assert blocks.used == 0


def test_the_least_recently_used_goes_first_and_the_end_of_a_prefix_before_its_beginning():
    blocks = Blocks(8, caching=True)
    fill(blocks, unit(1), unit(2))
    fill(blocks, unit(3), unit(4))
    assert blocks.take(2)
    assert (blocks.match((unit(1), unit(2))), blocks.match((unit(3), unit(4)))) == (1, 2)
    assert blocks.evicted == 2


def test_held_units_are_never_given_up():
    blocks = Blocks(4, caching=True)
    fill(blocks, unit(1))
    blocks.hold(unit(1))
    assert not blocks.take(3)
    assert blocks.take(2)
    assert blocks.match((unit(1),)) == 1


def test_without_caching_nothing_is_found():
    blocks = Blocks(4, caching=False)
    fill(blocks, unit(1))
    assert (blocks.match((unit(1),)), blocks.free) == (0, 4)


def test_equal_ids_of_unequal_size_are_not_the_same():
    blocks = Blocks(8, caching=True)
    fill(blocks, unit(1, blocks=2))
    assert blocks.match((unit(1, blocks=3),)) == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=60))
def test_blocks_are_never_lost(works):
    blocks = Blocks(12, caching=True)
    for first, count in works:
        units = tuple(unit(first + number) for number in range(count))
        matched = blocks.match(units)
        for found in units[:matched]:
            blocks.hold(found)
        private = sum(unit.blocks for unit in units[matched:])
        if not blocks.take(private):
            blocks.release(list(units[:matched]), 0)
            continue
        held = [*units[:matched], *(unit for unit in units[matched:] if blocks.publish(unit))]
        blocks.release(held, private - sum(unit.blocks for unit in held[matched:]))
        assert blocks.free + blocks.idle_blocks == blocks.total
        assert blocks.idle_blocks == sum(blocks.idle.values())
        assert not blocks.held
