# SPDX-License-Identifier: Apache-2.0
"""Wires between hosts, and the overlay on top: the kernel's VXLAN the way Flannel sets it up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Any

from netns_tests.lab.errors import LabError
from netns_tests.lab.hosts import BRIDGE, UPLINK, Attachment, Host, Kind, Shape, mac
from netns_tests.lab.namespaces import Namespace

UNDERLAY = IPv4Network("192.0.2.0/24")
UNDERLAY6 = IPv6Network("fd00:ffff::/64")
OUTER_BYTES = {4: 50, 6: 70}  # Ethernet 14, IPv4 20 or IPv6 40, UDP 8, VXLAN 8
INHERIT = "inherit"

_TOS_INHERIT = 1  # drivers/net/vxlan: this value of the attribute means "as the inner packet"
_DF = {"unset": 0, "set": 1, INHERIT: 2}


@dataclass(frozen=True)
class Vxlan:
    """A VXLAN device's attributes. The defaults are Flannel's.

    `tos`: 0-255 or "inherit". `ttl`: 1-255, 0 for the system's default, or "inherit".
    `df`: "unset", "set" or "inherit". `port_range`: first and last outer source port, (0, 0) for
    the system's. `mtu`: the device's and its pods'; None: what the uplink leaves. `outer`: the IP
    version of the underlay, 4 or 6; over 6 the UDP checksum may be left out (sent) and be missing
    (taken) only if the device says so: `zero_checksum6_tx`, `zero_checksum6_rx`.
    """

    vni: int = 1
    port: int = 8472
    tos: int | str = 0
    ttl: int | str = 0
    df: str = "unset"
    udp_checksum: bool = False
    outer: int = 4
    zero_checksum6_tx: bool = False
    zero_checksum6_rx: bool = False
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
            "vxlan_udp_zero_csum6_tx": int(self.zero_checksum6_tx),
            "vxlan_udp_zero_csum6_rx": int(self.zero_checksum6_rx),
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
    if host.ip6:
        host.address6 = UNDERLAY6[host.number]
        prefix = UNDERLAY6.prefixlen
        host.netlink.addr("add", index=index, address=str(host.address6), prefixlen=prefix)
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


def _tunnel_addresses(host: Host, shape: Shape) -> list[IPv4Address | IPv6Address]:
    # In the bridge shape .1 is the bridge's; Flannel gives its device the network address.
    bridged = shape is Shape.BRIDGE
    own: list[IPv4Address | IPv6Address] = [host.pod_range[0] if bridged else host.gateway]
    if host.ip6:
        own.append(host.pod_range6[0] if bridged else host.gateway6)
    return own


def _make_bridge(host: Host, mtu: int) -> None:
    address = mac(Kind.BRIDGE, host.number)
    host.netlink.link("add", ifname=BRIDGE, kind="bridge", address=address, mtu=mtu)
    index = host.index(BRIDGE)
    prefix = host.pod_range.prefixlen
    host.netlink.addr("add", index=index, address=str(host.gateway), prefixlen=prefix)
    if host.ip6:
        prefix = host.pod_range6.prefixlen
        host.netlink.addr("add", index=index, address=str(host.gateway6), prefixlen=prefix)
    host.up(BRIDGE)


def _make_tunnel(host: Host, vxlan: Vxlan, shape: Shape) -> None:
    if host.address is None:
        raise LabError(f"host {host.label} has no uplink", hint="call lab.wire(...) first")
    uplink = host.netlink.link("get", ifname=host.uplink)[0]
    mtu = vxlan.mtu or uplink.get("mtu") - OUTER_BYTES[vxlan.outer]
    local = "vxlan_local" if vxlan.outer == 4 else "vxlan_local6"
    host.netlink.link(
        "add",
        ifname=vxlan.device,
        kind="vxlan",
        address=mac(Kind.TUNNEL, host.number),
        mtu=mtu,
        vxlan_link=uplink["index"],
        **{local: str(host.ip(vxlan.outer))},
        **vxlan.attributes(),
    )
    index = host.index(vxlan.device)
    for own in _tunnel_addresses(host, shape):
        prefix = own.max_prefixlen
        host.netlink.addr("add", index=index, address=str(own), prefixlen=prefix)
    host.up(vxlan.device)
    host.overlay = Attachment(vxlan.device, shape, mtu)
    if shape is Shape.BRIDGE:
        _make_bridge(host, mtu)


def introduce(host: Host, other: Host, shape: Shape, outer: int = 4) -> None:
    """Tell `host` how to reach the pods of `other`: neighbours, forwarding entry, routes.

    Both families share the device, where Flannel makes two.
    """
    index = host.index(host.tunnel)
    address = mac(Kind.TUNNEL, other.number)
    host.netlink.fdb("add", ifindex=index, lladdr=address, dst=str(other.ip(outer)))
    ranges = (other.pod_range, other.pod_range6)
    for hop, pods in zip(_tunnel_addresses(other, shape), ranges, strict=False):
        way = {"gateway": str(hop), "oif": index, "flags": ["onlink"]}
        host.netlink.neigh("add", dst=str(hop), lladdr=address, ifindex=index, state="permanent")
        host.netlink.route("add", dst=str(pods), **way)


def join(hosts: Sequence[Host], vxlan: Vxlan, shape: Shape) -> None:
    """Build the overlay on wired hosts: every one knows every other, statically."""
    for host in hosts:
        _make_tunnel(host, vxlan, shape)
    for host in hosts:
        for other in hosts:
            if other is not host:
                introduce(host, other, shape, vxlan.outer)
