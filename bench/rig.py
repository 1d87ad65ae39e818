# SPDX-License-Identifier: Apache-2.0
"""The real programs on made-up packets: one node with one pod, one remote node with one pod.

The tests of the programs and their cost in the benchmark both stand on it. Nothing is attached. A
namespace holds the devices whose indices and MACs the programs see; conntrack does not run in it,
so having seen both directions makes a flow fast.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.l2 import Ether
from scapy.layers.vxlan import VXLAN
from scapy.packet import Packet, Raw

from netns_tests.lab import Host, Lab, inside
from oncache.core import libbpf, maps
from oncache.core.config import Limits
from oncache.core.skb import SkbContext
from oncache.plane import Plane, PodEntry, Settings

POD, REMOTE = "10.1.0.11", "10.2.0.11"
NEIGHBOUR = "10.1.0.12"
NODE, PEER, STRANGER = "192.0.2.1", "192.0.2.2", "192.0.2.99"
POD_MAC, GATEWAY_MAC = "02:00:00:00:01:11", "02:00:00:00:01:01"
NODE_MAC, PEER_MAC = "02:00:00:00:0a:01", "02:00:00:00:0b:01"
TUNNEL_MAC, PEER_TUNNEL_MAC = "02:00:00:00:aa:01", "02:00:00:00:bb:01"
VNI, PORT = 7, 4789
SPORT, DPORT = 40000, 5000
LIMITS = Limits(pods=16, peers=8, flows=64)
BASE, REDIRECT = -1, 7  # TC_ACT_UNSPEC, TC_ACT_REDIRECT
MTU = 1450


def from_pod(l4: Packet, *, ttl: int = 64, payload: bytes = b"ping", **ip: Any) -> Packet:
    """A packet of the pod to the remote pod, as the host side of its veth sees it."""
    return (
        Ether(src=POD_MAC, dst=GATEWAY_MAC)
        / IP(**{"src": POD, "dst": REMOTE, "ttl": ttl, **ip})
        / l4
        / Raw(payload)
    )


def to_pod(l4: Packet, *, ttl: int = 63, payload: bytes = b"pong", **ip: Any) -> Packet:
    """A packet of the remote pod inside the tunnel: its host has routed it once."""
    return (
        Ether(src=PEER_TUNNEL_MAC, dst=TUNNEL_MAC)
        / IP(**{"src": REMOTE, "dst": POD, "ttl": ttl, **ip})
        / l4
        / Raw(payload)
    )


def wrap(inner: Packet, *, vni: int = VNI, port: int = PORT, chksum: int = 0, **ip: Any) -> Packet:
    """A tunnel packet from the peer to this node."""
    return (
        Ether(src=PEER_MAC, dst=NODE_MAC)
        / IP(**{"src": PEER, "dst": NODE, "ttl": 64, "id": 1, **ip})
        / UDP(sport=50000, dport=port, chksum=chksum)
        / VXLAN(vni=vni, flags=8)
        / inner
    )


def udp() -> Packet:
    return UDP(sport=SPORT, dport=DPORT)


def udp_back() -> Packet:
    return UDP(sport=DPORT, dport=SPORT)


def tcp(flags: str = "A") -> Packet:
    return TCP(sport=SPORT, dport=DPORT, flags=flags, seq=1000, ack=2000)


def tcp_back(flags: str = "A") -> Packet:
    return TCP(sport=DPORT, dport=SPORT, flags=flags, seq=2000, ack=1000)


def echo(number: int = 77) -> Packet:
    return ICMP(type=8, id=number, seq=1)


def echo_back(number: int = 77) -> Packet:
    return ICMP(type=0, id=number, seq=1)


@dataclass(frozen=True)
class Run:
    """What a program did to a packet, and which counters moved, as "group.name"."""

    verdict: int
    data: bytes
    mark: int
    priority: int
    moved: dict[str, int]

    @property
    def packet(self) -> Packet:
        return Ether(self.data)


class Rig:
    """A loaded plane in a scratch namespace; `run` feeds one packet to one program."""

    def __init__(self, plane: Plane, uplink: int, pod: int, other: int) -> None:
        self.plane, self.uplink, self.pod, self.other = plane, uplink, pod, other
        self.programs = plane.program_fds()
        self.settings = Settings(
            uplink=uplink,
            tunnel=999,
            local=IPv4Address(NODE),
            vni=VNI,
            port=PORT,
            port_min=32768,
            port_max=60999,
            tos_inherit=False,
            ttl_inherit=False,
            df_inherit=False,
            mtu=MTU,
            lease_seconds=60.0,
            mark_mask=0xFF,
        )
        self.reset()

    def reset(self) -> None:
        """Forget every flow; settings, peers and pods as at first."""
        with _pinned(next(self.plane.directory.glob("maps-*")) / "filter_cache") as flows:
            for key, _ in list(flows.items()):
                flows.delete(key)
        plane, pod, other = self.plane, self.pod, self.other
        self.configure()
        plane.set_peers([IPv4Address(PEER)])
        for path in plane.paths():
            plane.set_path_mtu(path.index, 0)
        plane.set_pod(0, PodEntry(pod, _mac(POD_MAC), (IPv4Address(POD),), "pod"))
        plane.set_pod(1, PodEntry(other, _mac("02:00:00:00:01:12"), (IPv4Address(NEIGHBOUR),)))

    def configure(self, **changes: Any) -> None:
        """Settings as in `self.settings` but for `changes`; everything learned is stale."""
        self.plane.configure(replace(self.settings, **changes))
        self.plane.enable(3600)

    def run(self, program: str, packet: Packet | bytes, **context: int) -> Run:
        """One run; `context` sets fields of struct __sk_buff, the device by default the hook's."""
        uplink = program in ("from_wire", "to_wire")
        fields = {"ifindex": self.uplink if uplink else self.pod, **context}
        before = _flat(self.plane.counters())
        ran = libbpf.test_run(self.programs[program], bytes(packet), SkbContext(**fields))
        after = _flat(self.plane.counters())
        moved = {name: after[name] - before[name] for name in after if after[name] != before[name]}
        assert ran.ctx is not None
        return Run(ran.retval, ran.data, ran.ctx.mark, ran.ctx.priority, moved)

    def send(self, packet: Packet, **changes: Any) -> tuple[Run, Run | None]:
        """from_pod, and if that left it to the base path what to_wire makes of it then."""
        first = self.run("from_pod", packet)
        if first.verdict != BASE:
            return first, None
        return first, self.run("to_wire", encapsulated(packet, **changes), mark=first.mark)

    def receive(self, packet: Packet, **outer: Any) -> tuple[Run, Run | None]:
        """from_wire, and if that left it to the base path what to_pod makes of it then."""
        first = self.run("from_wire", wrap(packet, **outer))
        if first.verdict != BASE:
            return first, None
        return first, self.run("to_pod", delivered(packet), mark=first.mark)

    def warm(self, there: Packet, back: Packet) -> None:
        """Exchange base path packets until both directions are fast."""
        for _ in range(3):
            self.send(there)
            self.receive(back)


@contextmanager
def _pinned(pin: Path) -> Iterator[maps.Map[Any, Any]]:
    fd = libbpf.get(pin)
    try:
        yield maps.Map(fd, *maps.map_types(fd))
    finally:
        os.close(fd)


def encapsulated(packet: Packet, *, hops: int = 1, **outer: Any) -> Packet:
    """What the base path puts on the wire for a packet of the pod."""
    inner = packet.copy()
    inner[Ether].src, inner[Ether].dst = TUNNEL_MAC, PEER_TUNNEL_MAC
    inner[IP].ttl -= hops
    del inner[IP].chksum
    return (
        Ether(src=NODE_MAC, dst=PEER_MAC)
        / IP(**{"src": NODE, "dst": PEER, "ttl": 64, "id": 4711, "flags": 0, **outer})
        / UDP(sport=40404, dport=PORT, chksum=0)
        / VXLAN(vni=VNI, flags=8)
        / inner
    )


def delivered(packet: Packet, *, hops: int = 1) -> Packet:
    """What the base path puts on the pod's device for an inner packet."""
    inner = packet.copy()
    inner[Ether].src, inner[Ether].dst = GATEWAY_MAC, POD_MAC
    inner[IP].ttl -= hops
    del inner[IP].chksum
    return inner


@contextmanager
def rig() -> Iterator[Rig]:
    """A rig in a laboratory of its own; the calling thread is in its namespace meanwhile."""
    with Lab() as lab:
        host = lab.host("rig")
        uplink = _veth(host, "uplink", address=NODE_MAC)
        pod, other = _veth(host, "pod"), _veth(host, "other")
        with inside(host):
            plane = Plane.load(host.bpf_dir, LIMITS)
            try:
                yield Rig(plane, uplink, pod, other)
            finally:
                plane.close()
                Plane.unload(host.bpf_dir)


def _veth(host: Host, name: str, **attributes: str) -> int:
    """A pair of devices, both up; the index of the first, which gets the attributes."""
    far = f"{name}-far"
    host.netlink.link("add", ifname=name, kind="veth", peer={"ifname": far}, **attributes)
    for each in (name, far):
        host.up(each)
    return host.index(name)


def _mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def _flat(counters: dict[str, Any], prefix: str = "") -> dict[str, int]:
    flat: dict[str, int] = {}
    for name, value in counters.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{name}."))
        else:
            flat[prefix + name] = value
    return flat
