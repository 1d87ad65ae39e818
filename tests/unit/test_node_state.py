# SPDX-License-Identifier: Apache-2.0
"""What an event changes in what the agent knows, and what is no change at all."""

from dataclasses import replace
from ipaddress import ip_address, ip_network

import pytest

from fabric_agent.node import state as states
from fabric_agent.node.state import (
    AddressesChanged,
    EventsLost,
    FdbChanged,
    LinkChanged,
    NeighbourChanged,
    RoutingChanged,
    State,
    apply,
)
from oncache.core.net import (
    Event,
    FdbEntry,
    Item,
    Namespace,
    Neighbour,
    Overrun,
    Route,
    Rule,
)
from tests.unit.node_facts import (
    BRIDGE,
    EVERYTHING,
    POD_A,
    POD_A_LINK,
    POD_B,
    POD_B_LINK,
    REMOTE,
    TUNNEL,
    TUNNEL_LINK,
    UPLINK,
    UPLINK_LINK,
    address,
    eth0,
    host,
    link,
    mac,
)


def route(destination: str, kind: int = 1) -> Route:
    return Route(ip_network(destination), 254, kind, 3, 0, None, UPLINK)


NO_NEWS: list[Item] = [
    *EVERYTHING.links,
    *EVERYTHING.addresses,
    *EVERYTHING.neighbours,
    *EVERYTHING.fdb,
    route("192.0.2.1/32", kind=2),
    route("192.0.2.255/32", kind=3),
    route("fe80::/64"),
    route("ff00::/8", kind=5),
    Namespace(99),
]


@pytest.mark.parametrize("item", NO_NEWS, ids=repr)
def test_what_is_known_already_is_the_same_state(item: Item) -> None:
    before = host()
    assert apply(before, Event(item)) is before


NEWS = [
    (replace(UPLINK_LINK, mtu=9000), LinkChanged(UPLINK)),
    (replace(TUNNEL_LINK, mac=mac(0x99)), LinkChanged(TUNNEL)),
    (address(UPLINK, "198.51.100.1/24"), AddressesChanged(UPLINK)),
    (address(UPLINK, "192.0.2.1/24", usable=False), AddressesChanged(UPLINK)),
    (
        Neighbour(UPLINK, REMOTE, mac(0x23)),
        NeighbourChanged(UPLINK, REMOTE, mac(0x22), mac(0x23)),
    ),
    (Neighbour(UPLINK, REMOTE, b""), NeighbourChanged(UPLINK, REMOTE, mac(0x22), b"")),
    (
        FdbEntry(TUNNEL, mac(0x33), 0, ip_address("192.0.2.3")),
        FdbChanged(mac(0x33), frozenset({REMOTE, ip_address("192.0.2.3")}), moved=True),
    ),
    (FdbEntry(POD_B, mac(0xA), 0, None), FdbChanged(mac(0xA), frozenset(), moved=True)),
    (FdbEntry(POD_B, mac(0xB), 0, None), FdbChanged(mac(0xB), frozenset(), moved=False)),
    (route("10.2.0.0/24"), RoutingChanged()),
    (route("0.0.0.0/0", kind=7), RoutingChanged()),
    (route("2001:db8::/64"), RoutingChanged()),
    (Rule(2, 100, 12, None, None), RoutingChanged()),
]


@pytest.mark.parametrize(("item", "change"), NEWS, ids=repr)
def test_news_is_one_change(item: Item, change: states.Change) -> None:
    assert apply(host(), Event(item)).changes == {change}


@pytest.mark.parametrize(("item", "change"), NEWS[:2], ids=repr)
def test_news_is_news_once(item: Item, change: states.Change) -> None:
    once = apply(host(), Event(item))
    assert apply(once, Event(item)) is once


def test_a_mac_that_moves_on_a_bridge_and_back_moves_twice() -> None:
    there = states.settled(apply(host(), Event(FdbEntry(POD_B, mac(0xA), 0, None))))
    back = apply(there, Event(FdbEntry(POD_A, mac(0xA), 0, None)))
    assert back.changes == {FdbChanged(mac(0xA), frozenset(), moved=True)}
    assert back.fdb == host().fdb


def test_flooding_goes_to_every_node() -> None:
    state = host()
    for end in ("192.0.2.2", "192.0.2.3"):
        state = apply(state, Event(FdbEntry(TUNNEL, bytes(6), 0, ip_address(end))))
    assert len(state.fdb[TUNNEL, bytes(6), 0]) == 2


def test_a_device_takes_along_what_is_on_it() -> None:
    state = apply(host(), Event(UPLINK_LINK, gone=True))
    assert state.changes == {LinkChanged(UPLINK)}
    assert UPLINK not in state.links
    assert {a.index for a in state.addresses} == {BRIDGE}
    assert not state.neighbours


def test_a_device_is_read_again_when_its_far_end_left_our_namespace() -> None:
    near, far = (link(i, f"v{i}", "veth", lower=o) for i, o in ((8, 9), (9, 8)))
    state = apply(apply(host(), Event(near)), Event(far))
    state = apply(state, Event(far, gone=True))
    assert state.doubtful == {8}
    moved = replace(near, lower=2, lower_nsid=4)
    state = states.with_device(state, 8, moved)
    assert not state.doubtful
    assert states.unread(state) == {4}


def test_a_device_that_is_gone_when_read_again_is_forgotten() -> None:
    state = states.with_device(host(), POD_A, None)
    assert POD_A not in state.links
    assert states.far_ends(state) == {1}


def test_events_inside_a_pod_make_it_worth_reading() -> None:
    state = apply(host(), Event(Namespace(1)))
    assert states.unread(state) == {1}
    assert not states.unread(states.with_namespace(state, 1, [], []))


def test_a_number_that_is_free_again_is_forgotten() -> None:
    state = apply(host(), Event(Namespace(0), gone=True))
    assert 0 not in state.namespaces
    assert 0 not in state.names
    # A device that still leads there leads to another namespace, which is read anew.
    assert states.unread(state) == {0}


def test_the_pods_of_devices_that_are_gone_are_forgotten() -> None:
    state = apply(host(), Event(POD_B_LINK, gone=True))
    assert states.without_forgotten(state).namespaces.keys() == {0}
    assert states.without_forgotten(host()) == host()


def test_the_far_end_of_a_wire_is_nobodys_pod() -> None:
    wire = replace(UPLINK_LINK, kind="veth", lower=2, lower_nsid=9)
    state = apply(host(), Event(wire))
    assert states.far_ends(state) == {0, 1}
    assert states.far_ends(replace(state, addresses=frozenset())) == {0, 1, 9}


def test_an_overrun_asks_for_everything_again() -> None:
    state = apply(host(), Overrun())
    assert state.lost
    assert state.changes == {EventsLost()}
    again = states.with_snapshot(state, EVERYTHING)
    assert not again.lost
    assert states.unread(again) == {0, 1}
    assert again.changes == {EventsLost()}


def test_a_far_end_that_points_elsewhere_is_not_believed() -> None:
    state = states.with_namespace(host(), 0, [eth0(lower=77, last=0xA)], [])
    assert state.peer(POD_A_LINK) is None
    assert host().peer(POD_A_LINK) == eth0(POD_A, 0xA)
    assert State().peer(POD_A_LINK) is None
