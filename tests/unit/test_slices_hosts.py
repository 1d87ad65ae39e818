# SPDX-License-Identifier: Apache-2.0
"""What hosts and switches are told to do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fabric_agent.slices import hosts
from fabric_agent.slices.allocate import decide
from fabric_agent.slices.elements import Broken
from fabric_agent.slices.model import Fabric, Slice
from fabric_agent.slices.occupancy import Placement, occupancy
from oncache.core.errors import ConfigError
from tests.unit.slices_fabrics import cabled

FABRIC = cabled()  # 4 leaves, 4 spines, 8 hosts with 2 NICs


def slice_of(fabric: Fabric, gpus: int, *others: Slice) -> Slice:
    decision = decide(fabric, occupancy(fabric, others), gpus)
    assert isinstance(decision, Placement)
    return decision.named(f"job{len(others)}", len(others) + 1)


FIRST = slice_of(FABRIC, 8)
SECOND = slice_of(FABRIC, 8, FIRST)


def host(number: int = 0, *failed: str) -> dict[str, Any]:
    broken = Broken.of(FABRIC, failed)
    document = hosts.host_document(FABRIC, [FIRST, SECOND], number, broken)
    assert json.loads(json.dumps(document)) == document
    return document


def test_a_host_has_a_table_and_a_rule_per_nic() -> None:
    (part,) = host()["slices"]
    assert [nic["device"] for nic in part["nics"]] == ["eth0", "eth1"]
    assert [rule["source"] for rule in part["rules"]] == ["10.1.0.1/32", "10.1.0.3/32"]
    assert [rule["table"] for rule in part["rules"]] == [table["id"] for table in part["tables"]]
    assert {rule["priority"] for rule in part["rules"]} == {hosts.PRIORITY}


def test_every_destination_has_primary_backup_and_unreachable() -> None:
    (part,) = host()["slices"]
    first, second = (hop["id"] for hop in part["nexthops"])
    by_destination: dict[str, list[dict[str, Any]]] = {}
    for route in part["tables"][0]["routes"]:
        by_destination.setdefault(route["destination"], []).append(route)
    assert set(by_destination) == {"10.1.0.0/24", "10.1.1.0/24"}
    for routes in by_destination.values():
        assert [route.get("nexthop") for route in routes] == [first, second, None]
        assert [route["metric"] for route in routes] == [10, 20, 30]
        assert routes[-1]["type"] == "unreachable"


def test_numbers_are_ours_and_unlike() -> None:
    ids = [
        hop["id"]
        for number in range(8)
        for part in host(number)["slices"]
        for hop in part["nexthops"]
    ]
    assert all(hosts.NUMBERS <= each < 1 << 31 for each in ids)
    assert hosts.number(FIRST, 0) != hosts.number(SECOND, 0)
    with pytest.raises(ConfigError):
        hosts.number(FIRST, hosts.PER_SLICE)


def test_source_ports_name_the_uplink() -> None:
    (part,) = host()["slices"]
    assert [row["source_ports"] for row in part["ports"]] == [[61440, 62463], [62464, 63487]]
    assert part["ports"][0]["backup_source_ports"] == part["ports"][1]["source_ports"]
    assert part["ports"][0]["destinations"] == ["10.1.1.0/24"]


def test_a_lost_uplink_moves_the_ports_of_its_nic_only() -> None:
    (before,), (after,) = host()["slices"], host(0, "leaf0:up0")["slices"]
    assert after["ports"][0]["source_ports"] == before["ports"][0]["backup_source_ports"]
    assert after["ports"][0]["backup_source_ports"] is None
    assert after["ports"][1] == before["ports"][1]
    assert not after["contention_free"]


def test_settings_are_those_of_several_nics() -> None:
    (part,) = host()["slices"]
    assert {"name": "net.ipv4.conf.eth1.arp_announce", "value": "2"} in part["settings"]
    assert len(part["settings"]) == 6


def test_files_go_with_it() -> None:
    files = hosts.files(host(), hosts.job_document(FABRIC, FIRST), "/run/x")
    assert files["ranks"].splitlines()[3] == "rank 3=host1 slot=1"
    lines = files["MultiQpSrcPort.cfg"].splitlines()
    assert lines[0] == "10.1.0.1,10.1.1.1=61440"
    assert len(lines) == 2 * 4  # two NICs, four peers across the fabric
    assert "HCCL_RDMA_QP_PORT_CONFIG_PATH=/run/x" in files["environment"]
    assert "NCCL_SOCKET_IFNAME=eth0,eth1" in files["environment"]
    with pytest.raises(ConfigError, match="no part of slice job1"):
        hosts.files(host(), hosts.job_document(FABRIC, SECOND), "/run/x")


def leaf(number: int = 0, *failed: str) -> dict[str, Any]:
    return hosts.leaf_document(FABRIC, [FIRST, SECOND], number, Broken.of(FABRIC, failed))


def test_a_leaf_matches_ports_and_never_addresses() -> None:
    (part,) = leaf()["slices"]
    assert [rule["ingress_port"] for rule in part["rules"]] == ["down0", "down1", "down2", "down3"]
    assert "source" not in part["rules"][0]
    routes = part["tables"][0]["routes"]
    uplinks = {hop["id"]: hop["device"] for hop in part["nexthops"]}
    ways = [uplinks.get(route.get("nexthop"), route.get("type")) for route in routes]
    assert ways == ["up0", "up1", "unreachable"]


def test_a_far_failure_changes_the_way_there() -> None:
    (part,) = leaf(0, "leaf1:up0")["slices"]
    uplinks = {hop["id"]: hop["device"] for hop in part["nexthops"]}
    routes = part["tables"][0]["routes"]
    assert [uplinks.get(route.get("nexthop")) for route in routes] == ["up1", None]


def test_a_spine_joins_the_links_of_one_virtual_spine() -> None:
    first, second = hosts.spine_document(FABRIC, [FIRST, SECOND], 2)["slices"]
    assert [rule["ingress_port"] for rule in first["rules"]] == ["p0", "p1"]
    assert [rule["ingress_port"] for rule in second["rules"]] == ["p2", "p3"]
    assert len({rule["table"] for rule in first["rules"]}) == 1
    destinations = {route["destination"] for route in first["tables"][0]["routes"]}
    assert destinations == {"10.1.0.0/24", "10.1.1.0/24"}


def test_linux_lines() -> None:
    lines = hosts.linux(leaf())
    table = hosts.number(FIRST, 0)
    assert f"nexthop replace id {table} via 10.254.0.1 dev up0 onlink protocol 173" in lines
    assert f"rule add iif down0 lookup {table} priority 5173 protocol 173" in lines
    route = f"route replace 10.1.1.0/24 nhid {table} table {table} metric 10 protocol 173"
    assert route in lines
    assert lines.index(route) < lines.index(next(line for line in lines if "rule" in line))
    ports = hosts.linux(leaf(), match="source_ports")
    assert any("ipproto udp sport 61440-62463 dport 4789" in line for line in ports)


def test_under_one_leaf_no_uplink_is_named() -> None:
    part = slice_of(FABRIC, 2)
    document = hosts.host_document(FABRIC, [part], 0, Broken())
    assert document["slices"][0]["ports"] == []
    assert document["slices"][0]["nics"][0]["uplink"] is None
    assert hosts.leaf_document(FABRIC, [part], 0, Broken())["slices"] == []


def test_too_many_pairs_are_refused() -> None:
    (part,) = host()["slices"]
    peers = [{"prefix": "10.1.1.0/24", "address": "10.1.1.1"}] * (hosts.MOST_PAIRS // 2 + 1)
    with pytest.raises(ConfigError, match="131072"):
        hosts.port_file(part, peers)
