# SPDX-License-Identifier: Apache-2.0
"""Who plugs where, and what must hold for light to make a link."""

from __future__ import annotations

import pytest

from fabric_agent.ocs.cabling import audit, audit_neighbours, plugs
from fabric_agent.ocs.devices import Device, Inventory
from fabric_agent.ocs.drivers.base import PortState, Status
from fabric_agent.ocs.plot import svg
from fabric_agent.ocs.wiring import (
    Circuit,
    CircuitError,
    Fabric,
    Layout,
    Link,
    Port,
    Switch,
    cross,
    links_of,
    transceiver_pairs,
    uniform,
)
from oncache.core.errors import ConfigError

FABRIC = Fabric(3, 1, 4)
EVERY = tuple(Switch(0, number) for number in range(4))
INVENTORY = Inventory(FABRIC, [Device("ocs-a", 16, EVERY)])


def test_a_link_is_two_circuits_and_back() -> None:
    link = Link(0, 1, 0, 2)
    reached = transceiver_pairs(cross(FABRIC), link.circuits)
    assert reached == {Port(0, 0, 2): Port(2, 0, 3), Port(2, 0, 3): Port(0, 0, 2)}
    assert links_of(FABRIC, link.circuits) == (link,)


def test_one_fibre_alone_is_no_link() -> None:
    with pytest.raises(CircuitError, match="sends to nowhere"):
        links_of(FABRIC, Link(0, 0, 0, 1).circuits[:1])


def test_fibres_that_end_at_different_transceivers_are_named() -> None:
    there, _ = Link(0, 0, 0, 1).circuits
    with pytest.raises(CircuitError, match="pod0/spine0/port0"):
        links_of(FABRIC, [there, Circuit(Switch(0, 1), 1, 2)])


def test_uniform_wiring_needs_matchings() -> None:
    switch = Switch(0, 0)
    both = [Circuit(switch, 0, 1), Circuit(switch, 1, 0)]
    assert transceiver_pairs(uniform(FABRIC), both)
    with pytest.raises(CircuitError):
        transceiver_pairs(uniform(FABRIC), [Circuit(switch, 0, 1), Circuit(switch, 1, 2)])


@pytest.mark.parametrize(
    ("links", "complaint"),
    [
        ([Link(0, 0, 0, 1), Link(0, 0, 2, 1)], "pod1/spine0/port1 is used twice"),
        ([Link(0, 0, 0, 0)], "no link of this fabric"),
        ([Link(0, 2, 0, 1)], "no link of this fabric"),
    ],
)
def test_links_that_cannot_be(links: list[Link], complaint: str) -> None:
    with pytest.raises(CircuitError, match=complaint):
        Layout.of(FABRIC, links)


def test_a_layout_of_another_fabric_is_refused() -> None:
    with pytest.raises(CircuitError, match="shape"):
        Layout.dark(Fabric(4, 1, 4)).require(FABRIC)


@pytest.mark.parametrize(
    ("targets", "complaint"),
    [((1, 2, 1), "no permutation"), ((0, -1, -1), "a pod to itself")],
)
def test_a_table_that_is_no_permutation_is_refused(
    targets: tuple[int, ...], complaint: str
) -> None:
    with pytest.raises(CircuitError, match=complaint):
        Layout(((targets, (-1, -1, -1)),)).require(FABRIC)


def test_a_fabric_needs_two_pods() -> None:
    with pytest.raises(ConfigError, match=r"fabric\.pods"):
        Fabric(1, 1, 2)


def test_cross_connects_translate_both_ways() -> None:
    circuits = [
        circuit for link in (Link(0, 1, 0, 2), Link(0, 0, 1, 0)) for circuit in link.circuits
    ]
    tables = INVENTORY.tables(circuits)
    assert tables["ocs-a"][7] == 16 + 9
    assert sorted(INVENTORY.circuits(tables)) == sorted(circuits)


def test_somebody_elses_ports_are_left_alone() -> None:
    assert INVENTORY.circuits({"ocs-a": {15: 31}}) == []
    with pytest.raises(CircuitError, match="somebody else"):
        INVENTORY.circuits({"ocs-a": {15: 17}})
    with pytest.raises(CircuitError, match="two logical switches"):
        INVENTORY.circuits({"ocs-a": {1: 16 + 4}})


@pytest.mark.parametrize(
    ("devices", "complaint"),
    [
        ([Device("a", 9, EVERY)], "more than its 9 ports"),
        ([Device("a", 16, EVERY[:3])], "no device holds ocs 0/3"),
        ([Device("a", 16, EVERY), Device("b", 16, EVERY[:1])], "on two devices"),
        ([Device("a", 16, (*EVERY, Switch(1, 0)))], "has no ocs 1/0"),
    ],
)
def test_every_switch_has_one_home(devices: list[Device], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Inventory(FABRIC, devices)


def reports(**changed: str) -> dict[str, dict[int, PortState]]:
    labels = {plug.number: plug.strand for plug in plugs(INVENTORY, cross(FABRIC))}
    labels |= {int(number[1:]): label for number, label in changed.items()}
    return {"ocs-a": {n: PortState(Status.BLOCKED, label) for n, label in labels.items()}}


def test_the_audit_is_silent_when_all_is_well() -> None:
    assert not audit(plugs(INVENTORY, cross(FABRIC)), reports())


def test_crossed_missing_and_wrong_fibres_are_named() -> None:
    listed = plugs(INVENTORY, cross(FABRIC))
    first, second = listed[0], listed[1]
    found = audit(
        listed, reports(p1=second.strand, p2=first.strand, p3="", p4="pod9/spine0/port0 tx")
    )
    assert [each.kind for each in found] == ["missing", "crossed", "wrong"]
    assert first.strand in found[1].text and "port 1 and ocs-a port 2" in found[1].text


def test_a_wrong_neighbour_is_named() -> None:
    link = Link(0, 0, 0, 1)
    heard = {link.ends[0]: link.ends[1], link.ends[1]: Port(2, 0, 0)}
    found = audit_neighbours(cross(FABRIC), link.circuits, heard)
    assert [each.text for each in found] == [
        "pod1/spine0/port1 hears pod2/spine0/port0, should hear pod0/spine0/port0"
    ]


def test_the_picture_shows_what_changes() -> None:
    picture = svg(FABRIC, Layout.dark(FABRIC), Layout.of(FABRIC, [Link(0, 0, 0, 1)]))
    assert picture.startswith("<svg") and "pods 0 and 1: 1" in picture
