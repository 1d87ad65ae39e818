# SPDX-License-Identifier: Apache-2.0
"""Status, stats, caches and explain: from what a plane says to what is printed."""

from __future__ import annotations

import json
from ipaddress import IPv4Address, IPv6Address
from typing import Any

import pytest

from oncache.cli import caches, explain, stats, status
from oncache.cli.tuples import endpoint
from oncache.core.errors import ConfigError
from oncache.flows import FlowRow, HalfRow
from oncache.plane import Explanation, PathRow, PodEntry

COUNTERS: dict[str, Any] = {
    "hits": {"from_pod": 60, "from_wire": 30, "local": 0},
    "base_path": {"miss": 6, "tcp_flags": 4, "vlan": 0},
    "dropped": {"unfinished": 0},
    "learned": 2,
    "not_learned": {"paused": 0, "mark": 1},
}
NOTHING: dict[str, Any] = {"hits": {"local": 0}, "base_path": {}, "dropped": {}, "learned": 0}

READY = HalfRow("ready", "", 3, 7, 1, 2, 3, 2, "", 1.5)
EMPTY = HalfRow("empty", "unconfirmed", 0, 0, 0, 0, 0, 0, "", 0.0)
FLOW = FlowRow("tcp", "10.1.0.11", 4000, "10.2.0.11", 80, False, READY, EMPTY)
PATH = PathRow(
    index=7,
    generation=1,
    remote=IPv4Address("192.168.0.2"),
    local=IPv4Address("192.168.0.1"),
    next_hop_mac="02:00:00:00:02:01",
    source_mac="02:00:00:00:01:01",
    device=4_000_001,
    vni=1,
    port=8472,
    ttl=64,
    tos=0,
    df=False,
    inner_source_mac="02:00:00:01:01:01",
    inner_destination_mac="02:00:00:01:02:01",
    mtu=1450,
)
POD = PodEntry(4_000_002, bytes.fromhex("020000030111"), (IPv4Address("10.1.0.11"),), "p1")


def test_the_share_of_hits() -> None:
    assert stats.share(COUNTERS) == 0.9
    assert stats.share(NOTHING) is None


def test_counters_that_did_not_move_are_left_out_unless_they_matter() -> None:
    names = [name for name, _ in stats.shown(COUNTERS)]
    assert "base_path.vlan" not in names
    assert "not_learned.paused" not in names
    assert {"hits.local", "dropped.unfinished", "base_path.miss", "not_learned.mark"} <= set(names)
    assert "90.0% of packets were fast" in stats.render(COUNTERS)
    assert "no packets yet" in stats.render(NOTHING)


def test_the_guards_counters_stand_beside_the_planes() -> None:
    guard = {"passed": 7, "stranger": 2, "strangers": {"192.0.2.99": 2}}
    told = stats.render({**COUNTERS, "guard": guard})
    for row in ("guard.passed", "guard.stranger", "guard.strangers.192.0.2.99"):
        assert row in told
    assert "90.0% of packets were fast" in told


def test_rates_are_per_second_and_never_negative() -> None:
    before = {**COUNTERS, "hits": {"from_pod": 20, "from_wire": 90, "local": 0}}
    told = stats.render_rates(COUNTERS, before, 2.0)
    rates = {row.split()[0]: row.split()[-1] for row in told.splitlines() if row.startswith("hits")}
    assert rates == {"hits.from_pod": "20", "hits.from_wire": "0", "hits.local": "0"}


def test_a_flow_row() -> None:
    row = caches.flow_row(FLOW, {"10.1.0.11": "vp1"})
    assert row["device"] == "vp1"
    assert row["egress"]["fast"] is True
    assert row["ingress"] == {"fast": False, **EMPTY._asdict()}
    assert json.loads(json.dumps(row))["local"] == "10.1.0.11"
    (line,) = caches.render_filter([row]).splitlines()[1:]
    assert line.split() == [
        *("tcp", "10.1.0.11:4000", "10.2.0.11:80", "vp1"),
        *("fast", "unconfirmed", "1.5", "7"),
    ]


def test_a_flow_of_a_forgotten_pod_has_no_device() -> None:
    row = caches.flow_row(FLOW._replace(local="fd00::11"), {})
    assert row["device"] is None
    assert "[fd00::11]:4000" in caches.render_filter([row])


def test_the_quick_dump_says_what_json_says() -> None:
    odd = FLOW._replace(closed=True, local="fd00::11", ingress=READY._replace(peer='"\\'))
    flows, devices = [FLOW, odd, FLOW._replace(egress=EMPTY)], {"10.1.0.11": 'v"p1'}
    form = caches.text_form(devices)

    def half(row: HalfRow) -> str:
        return form.half(form.shared(row._replace(age_seconds=0.0)), row.age_seconds)

    texts = [form.row(*flow[:-2], half(flow.egress), half(flow.ingress)) for flow in flows]
    rows = [caches.flow_row(flow, devices) for flow in flows]
    assert "".join(caches.array(iter(texts))) == json.dumps(rows)


@pytest.mark.parametrize("length", [0, 1, caches.PIECE, caches.PIECE + 1, 3 * caches.PIECE])
def test_an_array_in_pieces_is_whole(length: int) -> None:
    assert json.loads("".join(caches.array(map(str, range(length))))) == list(range(length))


def test_a_path_row_has_addresses_as_text_and_devices_by_name() -> None:
    row = caches.path_row(PATH)
    assert (row["remote"], row["device"], row["ifindex"]) == ("192.168.0.2", "if4000001", 4_000_001)
    json.dumps(row)
    assert "02:00:00:00:02:01" in caches.render_egress([row])


def test_a_pod_row() -> None:
    row = caches.pod_row(0, POD, 3)
    assert row == {
        "index": 0,
        "addresses": ["10.1.0.11"],
        "device": "if4000002",
        "ifindex": 4_000_002,
        "mac": "02:00:00:03:01:11",
        "generation": 3,
    }
    assert "10.1.0.11" in caches.render_ingress([row])


PLANE: dict[str, Any] = {
    "bpf_dir": "/b",
    "fast": True,
    "deadline_margin_seconds": 4.2,
    "uplinks": ["eth0"],
    "pod_devices": ["vp1"],
    "pods": [caches.pod_row(0, POD, 3)],
    "peers": ["192.168.0.2"],
    "paths": 1,
    "flows": 2,
    "hit_share": 0.9,
    "overlay": {"local": "192.168.0.1", "tunnel": "flannel.1", "vni": 1, "port": 8472, "mtu": 1450},
}
AGENT: dict[str, Any] = {
    "ok": True,
    "state": "attached",
    "pid": 7,
    "problems": ["somebody took our program off eth0"],
    "pods": [{"name": "p1", "device": "vp1", "addresses": ["10.1.0.11"], "index": 0}],
}


def test_status_of_a_running_agent() -> None:
    found = status.report(AGENT, PLANE)
    told = status.render(found)
    for expected in ("running, pid 7", "on, 4.2 s", "flannel.1", "90.0%", "p1", "10.1.0.11"):
        assert expected in told
    assert "problem: somebody took our program off eth0" in told
    assert found["plane"]["pods"][0]["name"] == "p1"


def test_status_without_an_agent_or_without_maps() -> None:
    off = {**PLANE, "fast": False, "overlay": None, "hit_share": None}
    assert "not running" in status.render(status.report(None, off))
    assert "fast path  off" in status.render(status.report(None, off))
    waiting = status.report({"ok": True, "state": "waiting", "pid": 7}, None)
    assert waiting == {"agent": {"running": True, "state": "waiting", "pid": 7}, "plane": None}
    assert "waiting" in status.render(waiting)


def test_explanations() -> None:
    flow = {"protocol": "tcp", "source": "10.1.0.11:4000", "destination": "10.2.0.11:80"}
    slow = explain.report(flow, Explanation(False, "lease", ("learned 12.0 s ago",)))
    assert explain.render(slow).splitlines() == [
        "tcp 10.1.0.11:4000 -> 10.2.0.11:80: base path, because of: lease",
        "  learned 12.0 s ago",
    ]
    fast = explain.report(flow, Explanation(True, ""))
    assert explain.render(fast).endswith(": fast")
    assert fast.keys() == {"protocol", "source", "destination", "fast", "reason", "detail"}


@pytest.mark.parametrize(
    ("text", "protocol", "expected"),
    [
        ("10.1.0.11:4000", "tcp", (IPv4Address("10.1.0.11"), 4000)),
        ("[fd00::11]:53", "udp", (IPv6Address("fd00::11"), 53)),
        ("10.1.0.11", "icmp", (IPv4Address("10.1.0.11"), 0)),
        ("10.1.0.11:77", "icmp", (IPv4Address("10.1.0.11"), 77)),
        ("[fd00::11]", "icmp", (IPv6Address("fd00::11"), 0)),
        ("fd00::11", "icmp", (IPv6Address("fd00::11"), 0)),
    ],
)
def test_endpoints(text: str, protocol: str, expected: object) -> None:
    assert endpoint(text, protocol) == expected


@pytest.mark.parametrize(
    ("text", "protocol"),
    [
        ("10.1.0.11", "tcp"),
        ("fd00::11", "tcp"),
        ("10.1.0.11:65536", "tcp"),
        ("10.1.0:80", "tcp"),
        ("host:80", "tcp"),
        ("", "icmp"),
        ("10.1.0.11:-1", "tcp"),
    ],
)
def test_wrong_endpoints(text: str, protocol: str) -> None:
    with pytest.raises(ConfigError):
        endpoint(text, protocol)
