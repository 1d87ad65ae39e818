# SPDX-License-Identifier: Apache-2.0
"""Wires between hosts, and the overlay on top: the kernel's VXLAN the way Flannel sets it up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from netns_tests.lab.errors import LabError
from netns_tests.lab.hosts import BRIDGE, UPLINK, Attachment, Host, Kind, Shape, mac
from netns_tests.lab.namespaces import Namespace

UNDERLAY = IPv4Network("192.0.2.0/24")
OUTER_BYTES = 50  # Ethernet 14, IPv4 20, UDP 8, VXLAN 8
INHERIT = "inherit"

_TOS_INHERIT = 1  # drivers/net/vxlan: this value of the attribute means "as the inner packet"
_DF = {"unset": 0, "set": 1, INHERIT: 2}


@dataclass(frozen=True)
class Vxlan:
    """A VXLAN device's attributes. The defaults are Flannel's.

    `tos`: 0-255 or "inherit". `ttl`: 1-255, 0 for the system's default, or "inherit".
    `df`: "unset", "set" or "inherit". `port_range`: first and last outer source port, (0, 0) for
    the system's. `mtu`: the device's and its pods'; None: what the uplink leaves.
    """

    vni: int = 1
    port: int = 8472
    tos: int | str = 0
    ttl: int | str = 0
    df: str = "unset"
    udp_checksum: bool = False
    port_range: tuple[int, int] = (0, 0)
    mtu: int | None = None

    @property
    def device(self) -> str:
        return f"flannel.{self.vni}"

    def attributes(self) -> dict[str, Any]:
        """The device's attributes in pyroute2's words, but for its uplink and local address."""
        made: dict[str, Any] = {
            "vxlan_id": self.vni,
            "vxlan_port": self.port,
            "vxlan_learning": False,
            "vxlan_tos": _TOS_INHERIT if self.tos == INHERIT else self.tos,
            "vxlan_df": _DF[self.df],
            "vxlan_udp_csum": int(self.udp_checksum),
        }
        if self.ttl == INHERIT:
            made["vxlan_ttl_inherit"] = True
        else:
            made["vxlan_ttl"] = self.ttl
        if self.port_range != (0, 0):
            low, high = self.port_range
            made["vxlan_port_range"] = {"low": low, "high": high}
        return made


def _address(host: Host) -> None:
    host.address = UNDERLAY[host.number]
    index = host.index(UPLINK)
    prefix = UNDERLAY.prefixlen
    host.netlink.addr("add", index=index, address=str(host.address), prefixlen=prefix)
    host.up(UPLINK)


def _uplink(host: Host, mtu: int) -> dict[str, Any]:
    return {"ifname": UPLINK, "address": mac(Kind.UPLINK, host.number), "mtu": mtu}


def direct_wire(one: Host, other: Host, mtu: int) -> None:
    """Join two hosts by one veth pair: each end is the host's uplink."""
    peer = {**_uplink(other, mtu), "net_ns_fd": other.name}
    one.netlink.link("add", kind="veth", peer=peer, **_uplink(one, mtu))
    for host in (one, other):
        _address(host)


def switched_wire(switch: Namespace, hosts: Sequence[Host], mtu: int) -> None:
    """Join any number of hosts by a bridge in a namespace of its own."""
    # br_netfilter would show the switched frames to IPv4 hooks, as no switch does.
    switch.sysctl("net.bridge.bridge-nf-call-iptables", 0)
    switch.netlink.link("add", ifname="sw0", kind="bridge", mtu=mtu)
    bridge = switch.index("sw0")
    switch.up("sw0")
    for host in hosts:
        port = f"port{host.number}"
        peer = {**_uplink(host, mtu), "net_ns_fd": host.name}
        switch.netlink.link("add", ifname=port, kind="veth", mtu=mtu, peer=peer)
        switch.netlink.link("set", index=switch.index(port), master=bridge)
        switch.up(port)
        _address(host)


def _tunnel_address(host: Host, shape: Shape) -> IPv4Address:
    # In the bridge shape .1 is the bridge's; Flannel gives its device the network address.
    return host.pod_range[0] if shape is Shape.BRIDGE else host.gateway


def _make_bridge(host: Host, mtu: int) -> None:
    address = mac(Kind.BRIDGE, host.number)
    host.netlink.link("add", ifname=BRIDGE, kind="bridge", address=address, mtu=mtu)
    index = host.index(BRIDGE)
    prefix = host.pod_range.prefixlen
    host.netlink.addr("add", index=index, address=str(host.gateway), prefixlen=prefix)
    host.up(BRIDGE)


def _make_tunnel(host: Host, vxlan: Vxlan, shape: Shape) -> None:
    if host.address is None:
        raise LabError(f"host {host.label} has no uplink", hint="call lab.wire(...) first")
    uplink = host.netlink.link("get", ifname=host.uplink)[0]
    mtu = vxlan.mtu or uplink.get("mtu") - OUTER_BYTES
    host.netlink.link(
        "add",
        ifname=vxlan.device,
        kind="vxlan",
        address=mac(Kind.TUNNEL, host.number),
        mtu=mtu,
        vxlan_link=uplink["index"],
        vxlan_local=str(host.address),
        **vxlan.attributes(),
    )
    index = host.index(vxlan.device)
    own = str(_tunnel_address(host, shape))
    host.netlink.addr("add", index=index, address=own, prefixlen=32)
    host.up(vxlan.device)
    host.overlay = Attachment(vxlan.device, shape, mtu)
    if shape is Shape.BRIDGE:
        _make_bridge(host, mtu)


def introduce(host: Host, other: Host, shape: Shape) -> None:
    """Tell `host` how to reach the pods of `other`: neighbour, forwarding entry, route."""
    index = host.index(host.tunnel)
    hop, address = str(_tunnel_address(other, shape)), mac(Kind.TUNNEL, other.number)
    host.netlink.neigh("add", dst=hop, lladdr=address, ifindex=index, state="permanent")
    host.netlink.fdb("add", ifindex=index, lladdr=address, dst=str(other.address))
    host.netlink.route("add", dst=str(other.pod_range), gateway=hop, oif=index, flags=["onlink"])


def join(hosts: Sequence[Host], vxlan: Vxlan, shape: Shape) -> None:
    """Build the overlay on wired hosts: every one knows every other, statically."""
    for host in hosts:
        _make_tunnel(host, vxlan, shape)
    for host in hosts:
        for other in hosts:
            if other is not host:
                introduce(host, other, shape)
