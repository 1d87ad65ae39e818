# SPDX-License-Identifier: Apache-2.0
"""A fabric's file: what it means, and what is said when it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fabric_agent.slices import read
from fabric_agent.slices.elements import Broken
from oncache.core.errors import ConfigError
from tests.unit.slices_fabrics import cabled, document, optical


def test_ranges_are_counted_on() -> None:
    fabric = cabled(leaves=4, spines=4, hosts=8, nics=2)
    assert [leaf.name for leaf in fabric.leaves] == ["leaf0", "leaf1", "leaf2", "leaf3"]
    assert str(fabric.leaves[3].prefix) == "10.1.3.0/24"
    assert len(fabric.nics) == 16
    last = fabric.nics[-1]
    assert (last.device, fabric.hosts[last.host].name) == ("eth1", "host7")
    assert (str(last.address), str(last.gateway)) == ("10.1.3.7/31", "10.1.3.6")


def test_parallel_links_are_virtual_spines() -> None:
    fabric = cabled(leaves=2, spines=2, hosts=2, nics=2, parallel=2)
    assert fabric.spine_of_column == (0, 0, 1, 1)
    assert fabric.free_columns(0, 0b1111) == 0b1111
    assert fabric.free_columns(0, 0b1110) == 0b1101  # one link to spine 0 is the first virtual one


def test_rails_put_each_nic_on_its_own_leaf() -> None:
    value = document(leaves=4, hosts=4, nics=2)
    value["hosts"][0]["wiring"] = "rails"
    fabric = read.fabric(value)
    assert [fabric.nics[nic].leaf for nic in fabric.hosts[0].nics] == [0, 1]
    assert [fabric.nics[nic].leaf for nic in fabric.hosts[3].nics] == [2, 3]


def test_every_element_can_be_written_out() -> None:
    fabric = read.parse(
        """
        leaves: [{name: l0, prefix: 10.0.0.0/24}, {name: l1, prefix: 10.0.1.0/24}]
        spines: [{name: s0, ports: 2}]
        links:
          - {leaf: l0, spine: s0, leaf_port: swp33, spine_port: swp1,
             leaf_address: 10.9.0.0, spine_address: 10.9.0.1}
          - {leaf: l1, spine: s0, leaf_port: swp33, spine_port: swp2}
        hosts:
          - name: h0
            nics: [{device: ib0, leaf: l0, leaf_port: swp1, address: 10.0.0.9/31,
                    gateway: 10.0.0.8}]
        failed: [s0:swp2]
        """
    )
    assert fabric.leaves[0].uplinks[0].name == "swp33"
    assert str(fabric.spines[0].downlinks[0].address) == "10.9.0.1"
    assert Broken.of(fabric, fabric.failed).uplinks == {(1, 0)}


def test_eight_thousand_gpus_are_read() -> None:
    fabric = cabled(leaves=128, spines=64, hosts=1024, nics=8)
    assert (len(fabric.nics), len(fabric.leaves[0].uplinks)) == (8192, 64)


Change = Callable[[dict[str, Any]], object]

WRONG: dict[str, tuple[Change, str]] = {
    "unknown key": (lambda d: d["leaves"][0].update(prefx=1), "leaves[0].prefx"),
    "no leaves": (lambda d: d.pop("leaves"), "leaves is missing"),
    "empty list": (lambda d: d.update(hosts=[]), "hosts is []"),
    "links and optics": (lambda d: d.update(optics={}), "either links or optics"),
    "unknown leaf": (lambda d: d["links"][0].update(leaves="leaf[0-4]"), "no leaf4"),
    "unknown leaf of a host": (lambda d: d["hosts"][0].update(leaves="rack0"), "no rack0"),
    "overlap": (
        lambda d: d["leaves"].append({"name": "x", "prefix": "10.1.2.0/25"}),
        "10.1.2.0/25 of x overlaps 10.1.2.0/24 of leaf2",
    ),
    "link inside a prefix": (
        lambda d: d["links"][0].update(addresses="10.1.3.128/25"),
        "10.1.3.128 lies in 10.1.3.0/24",
    ),
    "links without addresses": (
        lambda d: d["links"][0].update(addresses="10.254.0.0/30"),
        "links[0].addresses",
    ),
    "too few addresses": (lambda d: d["leaves"][0].update(prefix="10.1.0.0/30"), "too small"),
    "radix": (lambda d: d["spines"][0].update(ports=3), "spine0 has 3 ports"),
    "twice": (lambda d: d["spines"].append({"name": "leaf0"}), "leaf0 is there twice"),
    "uneven hosts": (lambda d: d["hosts"][0].update(name="host[0-8]"), "9 hosts"),
    "wiring": (lambda d: d["hosts"][0].update(wiring="star"), "hosts[0].wiring"),
    "failed": (lambda d: d.update(failed=["leaf9"]), "no element leaf9"),
    "failed port": (lambda d: d.update(failed=["leaf0:up9"]), "no such port"),
    "failed NIC": (lambda d: d.update(failed=["host0:eth7"]), "no such port"),
    "lonely spine": (lambda d: d["spines"].append({"name": "s"}), "s has no link"),
    "bad range": (lambda d: d["leaves"][0].update(name="leaf[3-1]"), "leaves[0].name"),
}


def _with_lonely_leaf_linked(value: dict[str, Any]) -> dict[str, Any]:
    """The overlap case adds a leaf, which needs a link to be wrong in one way only."""
    if len(value.get("leaves", [])) > 1:
        value["links"].append({"leaf": "x", "spine": "spine0", "leaf_port": "u", "spine_port": "x"})
    return value


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_named(case: str) -> None:
    change, words = WRONG[case]
    value = document()
    change(value)
    with pytest.raises(ConfigError) as caught:
        read.fabric(_with_lonely_leaf_linked(value))
    assert words in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("text", ["leaves: [", "- a", "leaves: 2021-99-99"])
def test_what_is_no_fabric_at_all(text: str) -> None:
    with pytest.raises(ConfigError):
        read.parse(text)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read.load(tmp_path / "absent.yaml")


def test_a_failed_port_behind_optics_leaves_the_far_end() -> None:
    broken = Broken.of(optical(), ["leaf0:up3"])
    assert broken.uplinks == {(0, 3)}
    assert not broken.downlinks
