import msgspec
import pytest

from pd_serve.sim.clock import Clock
from pd_serve.sim.fleet import Slots, mixed
from pd_serve.sim.network import Network, Place
from pd_serve.sim.spec import Layout
from pd_serve.types import Role
from tests.sim.small import FAST

HERE, BESIDE, NEAR, FAR = Place(0, 0, 0), Place(0, 0, 1), Place(1, 0, 0), Place(4, 1, 0)


@pytest.mark.parametrize(
    ("target", "name", "seconds"),
    [(BESIDE, "node", 0.1), (NEAR, "rack", 1.0 + 0.001), (FAR, "across", 10.0 + 0.01)],
)
def test_one_transfer_takes_its_links_time(target, name, seconds):
    network = Network(Clock(), FAST)
    assert network.move(HERE, target, 100_000_000) == pytest.approx(seconds)
    assert network.bytes[name] == 100_000_000


def test_a_way_out_serves_one_after_the_other():
    network = Network(Clock(), FAST)
    first = network.move(HERE, NEAR, 100_000_000)
    second = network.move(HERE, Place(2, 0), 100_000_000)
    assert second == pytest.approx(first + 1.0)


def test_a_way_in_serves_one_after_the_other():
    network = Network(Clock(), FAST)
    network.move(HERE, NEAR, 100_000_000)
    assert network.move(Place(2, 0), NEAR, 100_000_000) == pytest.approx(2.001)


def test_other_pairs_are_not_disturbed():
    network = Network(Clock(), FAST)
    network.move(HERE, NEAR, 100_000_000)
    assert network.move(Place(2, 0), Place(3, 0), 100_000_000) == pytest.approx(1.001)
    assert network.move(BESIDE, HERE, 100_000_000) == pytest.approx(0.1)


def test_a_waiting_transfer_does_not_keep_a_free_way_busy():
    network = Network(Clock(), FAST)
    for _ in range(5):
        network.move(Place(2, 0), NEAR, 100_000_000)
    network.move(HERE, NEAR, 100_000_000)
    assert network.move(HERE, Place(3, 0), 100_000_000) == pytest.approx(2.001)


def test_racks_share_their_way_up():
    network = Network(Clock(), msgspec.structs.replace(FAST, rack_uplink_bytes_per_s=1e7))
    network.move(HERE, FAR, 100_000_000)
    assert network.move(NEAR, Place(5, 1), 100_000_000) == pytest.approx(20.01)


def test_an_idle_way_does_not_save_up_time():
    clock = Clock()
    network = Network(clock, FAST)
    network.move(HERE, BESIDE, 100_000_000)
    clock.at(5.0, lambda: None)
    clock.run()
    assert network.move(HERE, BESIDE, 100_000_000) == pytest.approx(5.1)


def test_nodes_are_filled_one_after_the_other_and_places_are_used_again():
    slots = Slots(Layout(gpus_per_node=4, nodes_per_rack=2))
    places = [slots.take(1) for _ in range(5)]
    assert [(place.node, place.rack, place.slot) for place in places] == [
        (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 3), (1, 0, 0),
    ]  # fmt: skip
    slots.give_back(places[2], 1)
    assert slots.take(1) == places[2]


def test_a_replica_does_not_straddle_nodes():
    slots = Slots(Layout(gpus_per_node=4, nodes_per_rack=1))
    assert [slots.take(gpus).node for gpus in (1, 4, 2, 2, 0)] == [0, 1, 2, 2, 3]


def test_pools_are_mixed_evenly():
    roles = mixed({Role.PREFILL: 2, Role.DECODE: 4})
    assert [role.value[0] for role in roles] == list("dpddpd")
