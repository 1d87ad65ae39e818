# SPDX-License-Identifier: Apache-2.0
"""What each five-tuple sent on each link, counted by the switches' own nftables."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from netns_tests.lab.namespaces import Namespace

# A set for each port: nft 1.0.6 cannot list a set whose keys begin with a device's name.
_TABLE = """
table ip lab_flows
delete table ip lab_flows
table ip lab_flows {{
  {sets}
  chain forward {{
    type filter hook forward priority 0
    {rules}
  }}
}}
"""
_SET = """
  set {port} {{
    type inet_proto . ipv4_addr . inet_service . ipv4_addr . inet_service
    flags dynamic
    size 65536
    counter
  }}
"""
_RULE = """
    oifname "{port}" meta l4proto {{ tcp, udp }} \
update @{port} {{ ip protocol . ip saddr . th sport . ip daddr . th dport counter }}
"""


class Tuple(NamedTuple):
    """Who talks to whom: addresses and ports, all as text or numbers."""

    protocol: str
    source: str
    source_port: int
    destination: str
    port: int


@dataclass(frozen=True)
class Counted:
    """Bytes and packets of one five-tuple that left a switch by a port."""

    switch: str
    port: str
    flow: Tuple
    packets: int
    bytes: int


def start(switch: Namespace, ports: Iterable[str]) -> None:
    """Count from zero what leaves by each of `ports`."""
    named = [*ports]
    sets = "".join(_SET.format(port=port) for port in named)
    rules = "".join(_RULE.format(port=port) for port in named)
    switch.command(["nft", "-f", "-"], text=_TABLE.format(sets=sets, rules=rules))


def counted(switch: Namespace, label: str) -> list[Counted]:
    """What left since `start`."""
    text = switch.command(["nft", "-j", "list", "table", "ip", "lab_flows"]).stdout
    sets = [item["set"] for item in json.loads(text)["nftables"] if "set" in item]
    return [
        _row(label, each["name"], element["elem"])
        for each in sets
        for element in each.get("elem", [])
    ]


def _row(label: str, port: str, element: dict[str, Any]) -> Counted:
    protocol, source, source_port, destination, destination_port = element["val"]["concat"]
    flow = Tuple(str(protocol), source, source_port, destination, destination_port)
    counter = element["counter"]
    return Counted(label, port, flow, counter["packets"], counter["bytes"])
