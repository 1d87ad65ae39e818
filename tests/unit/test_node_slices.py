# SPDX-License-Identifier: Apache-2.0
"""From a node's document to the kernel: what is wanted, and the order in which it comes about."""

from __future__ import annotations

import copy
from dataclasses import replace
from ipaddress import IPv4Address
from typing import Any

import pytest

from fabric_agent.node.slices import (
    RTN_UNREACHABLE,
    Act,
    Kernel,
    Setting,
    Step,
    ours,
    read,
    steps,
    wanted,
)
from fabric_agent.slices import hosts
from fabric_agent.slices import read as fabrics
from fabric_agent.slices.elements import Broken
from fabric_agent.slices.model import Slice
from oncache.core.errors import ConfigError
from oncache.core.net import NextHop, Route, Rule

FABRIC = fabrics.fabric(
    {
        "leaves": [{"name": "leaf[0-1]", "prefix": "10.20.0.0/24"}],
        "spines": [{"name": "spine[0-1]"}],
        "links": [{"leaves": "leaf[0-1]", "spines": "spine[0-1]", "addresses": "10.30.0.0/24"}],
        "hosts": [{"name": "host[0-1]", "devices": "eth[0-1]", "leaves": "leaf[0-1]"}],
    }
)
SLICE = Slice("job", 1, tuple(leaf.nics for leaf in FABRIC.leaves), FABRIC.cables)
READY = {"lo": 1, "eth0": 2, "eth1": 3}


@pytest.fixture
def document() -> dict[str, Any]:
    return hosts.host_document(FABRIC, [SLICE], 0, Broken())


def kernel(document: dict[str, Any], ready: dict[str, int] = READY) -> Kernel:
    return wanted(read(document), ready)


def test_a_nic_has_a_next_hop_a_rule_and_a_table_that_ends_unreachable(
    document: dict[str, Any],
) -> None:
    made = kernel(document)
    assert {(str(hop.gateway), hop.device) for hop in made.hops} == {
        ("10.20.0.0", 2),
        ("10.20.0.2", 3),
    }
    assert {str(rule.source) for rule in made.rules} == {"10.20.0.1/32", "10.20.0.3/32"}
    for table in {rule.table for rule in made.rules}:
        to_leaf1 = sorted(
            (route.priority, route.kind == RTN_UNREACHABLE)
            for route in made.routes
            if route.table == table and str(route.destination) == "10.20.1.0/24"
        )
        assert to_leaf1 == [(10, False), (20, False), (30, True)]


def test_a_leafs_document_is_understood_by_its_ports() -> None:
    document = hosts.leaf_document(FABRIC, [SLICE], 0, Broken())
    made = kernel(document, {"up0": 5, "up1": 6})
    assert {rule.device for rule in made.rules} == {"down0", "down1"}
    assert {hop.device for hop in made.hops} == {5, 6}


def test_without_its_device_a_next_hop_and_its_routes_are_not_wanted(
    document: dict[str, Any],
) -> None:
    made = kernel(document, {"eth1": 3})
    assert {hop.device for hop in made.hops} == {3}
    (left,) = {hop.id for hop in made.hops}
    assert {route.next_hop for route in made.routes} == {None, left}
    assert made.rules == kernel(document).rules


def test_first_the_way_then_the_rule_and_backwards(document: dict[str, Any]) -> None:
    whole, none = kernel(document), Kernel()
    up = [kind(step) for step in steps(whole, none)]
    assert up == sorted(up)
    down = [kind(step) for step in steps(none, whole)]
    assert down == sorted(down, reverse=True)
    assert {step.act for step in steps(none, whole)} == {Act.REMOVE}


def kind(step: Step) -> tuple[int, int]:
    """Next hops, then routes from the last resort on, then rules."""
    match step.item:
        case NextHop():
            return 0, 0
        case Route(priority=priority):
            return 1, -priority
        case Rule():
            return 2, 0


def test_nothing_to_do_when_the_kernel_is_as_wanted(document: dict[str, Any]) -> None:
    made = kernel(document)
    seen = [
        replace(route, gateway=IPv4Address("10.20.0.0"), device=2) if route.next_hop else route
        for route in made.routes
    ]
    assert steps(made, ours(made.hops, seen, made.rules)) == []


def test_a_nic_withdrawn_is_one_step(document: dict[str, Any]) -> None:
    after = copy.deepcopy(document)
    first, second = after["slices"][0]["nexthops"]
    first |= {"gateway": second["gateway"], "device": second["device"]}
    (step,) = steps(kernel(after), kernel(document))
    assert step.act is Act.SET and isinstance(step.item, NextHop)
    assert step.item.device == 3


def test_a_route_that_changes_is_replaced_never_removed(document: dict[str, Any]) -> None:
    after = copy.deepcopy(document)
    table = after["slices"][0]["tables"][0]
    one, other = table["routes"][:2]
    one["nexthop"], other["nexthop"] = other["nexthop"], one["nexthop"]
    changes = steps(kernel(after), kernel(document))
    assert [step.act for step in changes] == [Act.SET, Act.SET]


def test_what_others_made_is_not_looked_at(document: dict[str, Any]) -> None:
    made = kernel(document)
    hop, route, rule = next(iter(made.hops)), next(iter(made.routes)), next(iter(made.rules))
    foreign = ours(
        [replace(hop, protocol=3), replace(hop, id=7)],
        [replace(route, protocol=3), replace(route, table=254)],
        [replace(rule, protocol=3), replace(rule, table=254)],
    )
    assert foreign == Kernel()


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("format",), 2, "format 2"),
        (("slices", 0, "nexthops", 0, "id"), 7, "slices[0].nexthops[0].id"),
        (("slices", 0, "nexthops", 0, "gateway"), "here", "slices[0].nexthops[0].gateway"),
        (("slices", 0, "tables", 0, "id"), 254, "slices[0].tables[0].id"),
        (("slices", 0, "tables", 0, "routes", 0, "nexthop"), 2**30, "no next hop"),
        (("slices", 0, "rules", 0, "source"), "10.0.0.1/24", "slices[0].rules[0].source"),
        (("slices", 0, "settings", 0, "name"), "kernel.panic", "slices[0].settings[0].name"),
        (("slices", 0, "settings", 0, "value"), "x", "slices[0].settings[0].value"),
        (("slices", 0), "job", "slices[0]"),
        (("slices",), {}, "slices"),
    ],
)
def test_a_document_that_is_wrong_is_refused_whole(
    document: dict[str, Any], path: tuple[str | int, ...], value: Any, named: str
) -> None:
    place: Any = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(ConfigError, match=r".") as error:
        read(document)
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("name", "wanted_value", "device", "everywhere", "good"),
    [
        ("arp_ignore", 1, 0, 0, False),
        ("arp_ignore", 1, 0, 1, True),
        ("arp_announce", 2, 1, 0, False),
        ("arp_announce", 2, 2, 0, True),
        ("rp_filter", 2, 0, 0, True),
        ("rp_filter", 2, 0, 1, False),
        ("rp_filter", 2, 2, 1, True),
    ],
)
def test_the_kernel_takes_the_higher_of_two_settings(
    name: str, wanted_value: int, device: int, everywhere: int, good: bool
) -> None:
    assert Setting("eth0", name, wanted_value).held_by(device, everywhere) is good
