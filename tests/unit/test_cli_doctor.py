# SPDX-License-Identifier: Apache-2.0
"""Each fact a doctor can find, and what is said about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from oncache.cli.checks import Check, Device, Facts, Foreign, Level, MarkRule, examine, passed
from oncache.cli.doctor import render, rows, summary
from oncache.cli.gather import mark_rules, version
from oncache.core.config import GuardMode
from oncache.core.netlink import Rule

HEALTHY = Facts(
    privileged=True,
    kernel=(6, 1),
    btf=True,
    bpf_dir="/sys/fs/bpf/oncache",
    bpffs=True,
    tcx=True,
    ct_lookup=True,
    configured=True,
    uplink_name="eth0",
    tunnel_name="flannel.1",
    uplink=Device("eth0", "", 1500, up=True),
    tunnel=Device("flannel.1", "vxlan", 1450, up=True),
    rp_filter={"all": 0, "eth0": 2, "flannel.1": 0},
    be_liberal=1,
    ignore_invalid_rst=1,
    ip_forward=1,
    guard=GuardMode.ENFORCE,
)
TUNNEL = Device("flannel.1", "vxlan", 1450, up=True)


def found(**changes: Any) -> list[Check]:
    """What stands out on an otherwise healthy host."""
    return [c for c in examine(replace(HEALTHY, **changes)) if c.level is not Level.OK]


def test_a_healthy_host_has_nothing_to_repair() -> None:
    assert found() == []
    assert passed(examine(HEALTHY))


@pytest.mark.parametrize(
    ("name", "level", "changes"),
    [
        ("privileges", Level.FAIL, {"privileged": False}),
        ("kernel", Level.FAIL, {"kernel": (5, 15)}),
        ("btf", Level.FAIL, {"btf": False}),
        ("conntrack lookup", Level.WARN, {"ct_lookup": False}),
        ("bpffs", Level.FAIL, {"bpffs": False}),
        ("configuration", Level.WARN, {"configured": False}),
        ("uplink", Level.FAIL, {"uplink": None}),
        ("uplink", Level.FAIL, {"uplink": Device("eth0", "", 1500, up=False)}),
        ("tunnel", Level.FAIL, {"tunnel": None}),
        ("tunnel kind", Level.FAIL, {"tunnel": replace(TUNNEL, kind="geneve")}),
        ("tunnel namespace", Level.FAIL, {"tunnel": replace(TUNNEL, elsewhere=True)}),
        ("mtu", Level.FAIL, {"tunnel": replace(TUNNEL, mtu=1451)}),
        ("rp_filter", Level.WARN, {"rp_filter": {"all": 1, "eth0": 0}}),
        ("conntrack", Level.FAIL, {"be_liberal": 0, "attached": True}),
        ("conntrack", Level.WARN, {"ignore_invalid_rst": None}),
        ("ip_forward", Level.WARN, {"ip_forward": 0}),
        ("foreign programs", Level.WARN, {"foreign": (Foreign("eth0", "ingress", "cil"),)}),
        ("guard", Level.WARN, {"guard": GuardMode.OFF}),
        ("guard", Level.WARN, {"guard": GuardMode.OBSERVE}),
        ("guard hook", Level.WARN, {"xdp": "balancer"}),
        ("marks", Level.FAIL, {"mark_rules": (MarkRule(100, 0x40, 0xC0),)}),
    ],
)
def test_a_fault_is_found_alone_and_has_a_remedy(
    name: str, level: Level, changes: dict[str, Any]
) -> None:
    (check,) = found(**changes)
    assert (check.name, check.level) == (name, level)
    assert check.fact
    assert check.remedy


@pytest.mark.parametrize(
    "changes",
    [
        {"tcx": False},
        {"tcx": None, "ct_lookup": None},
        {"be_liberal": 0, "ignore_invalid_rst": 0},
        {"be_liberal": None, "ignore_invalid_rst": None},
        {"tunnel": None, "builtin": True},
        {"rp_filter": {"all": 1, "eth0": 2}},
        {"mark_rules": (MarkRule(100, 0x4000, 0x4000),)},
    ],
)
def test_what_is_no_fault(changes: dict[str, Any]) -> None:
    assert found(**changes) == []


def test_the_remedy_for_an_mtu_names_the_number() -> None:
    (check,) = found(tunnel=replace(TUNNEL, mtu=1500))
    assert "ip link set flannel.1 mtu 1450" in check.remedy


def test_a_strict_all_wins_over_a_loose_device_only_if_larger() -> None:
    (check,) = found(rp_filter={"all": 1, "eth0": 2, "flannel.1": 0})
    assert "flannel.1" in check.fact
    assert "eth0" not in check.fact


def test_rendering_and_json_say_the_same() -> None:
    checks = examine(replace(HEALTHY, bpffs=False, ip_forward=0))
    told = render(checks)
    for row in rows(checks):
        assert row["fact"] in told
        assert row["remedy"] in told
    assert rows(checks)[0].keys() == {"name", "level", "fact", "remedy"}
    assert summary(checks) in told
    assert "1 to repair" in summary(checks)
    assert "1 to consider" in summary(checks)


@pytest.mark.parametrize(
    ("release", "expected"),
    [("6.1.0-28-amd64", (6, 1)), ("6.18.44-custom", (6, 18)), ("odd", (0, 0))],
)
def test_kernel_versions(release: str, expected: tuple[int, int]) -> None:
    assert version(release) == expected


def test_a_rule_without_a_mask_looks_at_the_whole_mark() -> None:
    rules = [Rule(2, 10, 254, 0x1, None), Rule(2, 11, 254, None, None), Rule(2, 12, 254, 0, 0xF0)]
    assert list(mark_rules(rules)) == [MarkRule(10, 1, 0xFFFFFFFF), MarkRule(12, 0, 0xF0)]
