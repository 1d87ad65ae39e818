# SPDX-License-Identifier: Apache-2.0
"""A small host as the agent would read it, for the tests of its pure parts.

Devices by index: 2 uplink und0, 3 tunnel flannel.1, 4 bridge cni0, 5 and 6 pods' host sides, whose
far ends are device 2 in the namespaces 0 and 1.
"""

from dataclasses import replace
from ipaddress import ip_address, ip_interface
from typing import Any

from fabric_agent.node import state as states
from fabric_agent.node.state import State
from oncache.core import config
from oncache.core.config import Config
from oncache.core.net import Address, FdbEntry, Link, Neighbour, Snapshot, Tunnel
from oncache.plane import PathRow

UPLINK, TUNNEL, BRIDGE, POD_A, POD_B = 2, 3, 4, 5, 6
REMOTE = ip_address("192.0.2.2")
CONFIG: Config = config.parse("{node: {uplink: und0, name: a}, overlay: {device: flannel.1}}")
VXLAN = Tunnel(vni=1, port=8472, local=ip_address("192.0.2.1"))


def mac(last: int) -> bytes:
    return bytes((2, 0, 0, 0, 0, last))


def link(index: int, name: str, kind: str, **changes: Any) -> Link:
    plain = Link(index=index, name=name, kind=kind, mac=mac(index), mtu=1500, up=True)
    return replace(plain, **changes)


def address(index: int, interface: str, **changes: Any) -> Address:
    plain = Address(index, ip_interface(interface), universe=True, primary=True, usable=True)
    return replace(plain, **changes)


UPLINK_LINK = link(UPLINK, "und0", "")
TUNNEL_LINK = link(TUNNEL, "flannel.1", "vxlan", mtu=1450, lower=UPLINK, tunnel=VXLAN)
BRIDGE_LINK = link(BRIDGE, "cni0", "bridge", mtu=1450)
POD_A_LINK = link(POD_A, "va", "veth", lower=2, lower_nsid=0, master=BRIDGE)
POD_B_LINK = link(POD_B, "vb", "veth", lower=2, lower_nsid=1, master=BRIDGE)
EVERYTHING = Snapshot(
    links=(UPLINK_LINK, TUNNEL_LINK, BRIDGE_LINK, POD_A_LINK, POD_B_LINK),
    addresses=(address(UPLINK, "192.0.2.1/24"), address(BRIDGE, "10.1.0.1/24")),
    neighbours=(Neighbour(UPLINK, REMOTE, mac(0x22)),),
    fdb=(FdbEntry(TUNNEL, mac(0x33), 0, REMOTE), FdbEntry(POD_A, mac(0xA), 0, None)),
)


def eth0(lower: int, last: int) -> Link:
    return link(2, "eth0", "veth", mac=mac(last), lower=lower, lower_nsid=7)


def host() -> State:
    """The host with both its pods, everything read and acted upon."""
    state = states.with_snapshot(State(lost=True), EVERYTHING)
    state = states.with_namespace(state, 0, [eth0(POD_A, 0xA)], [address(2, "10.1.0.11/24")])
    state = states.with_namespace(state, 1, [eth0(POD_B, 0xB)], [address(2, "10.1.0.12/24")])
    return states.with_names(state, {0: "pod-a", 1: "pod-b"})


def path(index: int, remote: str, next_hop: int, inner: int) -> PathRow:
    return PathRow(
        index=index,
        generation=1,
        remote=ip_address(remote),
        local=ip_address("192.0.2.1"),
        next_hop_mac=mac(next_hop).hex(":"),
        source_mac=mac(UPLINK).hex(":"),
        device=UPLINK,
        vni=1,
        port=8472,
        ttl=64,
        tos=0,
        df=False,
        inner_source_mac=mac(TUNNEL).hex(":"),
        inner_destination_mac=mac(inner).hex(":"),
        mtu=1450,
    )
