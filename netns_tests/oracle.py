# SPDX-License-Identifier: Apache-2.0
"""The differential oracle: the same frames by the base path and with warm caches must end alike.

A stage is a laboratory of two hosts with one pod each (and a neighbour on the first). A case is a
list of frames that are put on it; its outcome is what is then seen at the receiving pod, at the
sending pod and on the wire, field by field. What may differ is `EXCEPTIONS` and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.l2 import Ether
from scapy.layers.vxlan import VXLAN
from scapy.packet import Packet

from netns_tests.lab import (
    Capture,
    Direction,
    Frame,
    Host,
    Injector,
    Namespace,
    Offload,
    Pod,
    Shape,
    Vxlan,
    set_offload,
    sockets,
    until,
)
from netns_tests.nodes import IN, OUT, SECONDS, Meter, Nodes

View = Mapping[str, object]

ETHER = 14
ETH_IPV4, ETH_ARP = 0x0800, 0x0806
MORE_OR_OFFSET = 0x3FFF
FENCE_PORTS = 9, 10  # never answered, so never fast
NEAR_PORT, FAR_PORT = 20000, 7000
POD_MTU = 1500  # more than the tunnel's: what is too big for it is refused by the host
ROUNDS = 4


@dataclass(frozen=True)
class Exemption:
    """A difference that is allowed: a row of "What may differ" in docs/packet-path.md."""

    row: str
    point: str
    field: str


EXCEPTIONS = (
    Exemption("outer IPv4 ID", "wire", "outer ident"),
    Exemption("outer UDP checksum", "wire", "outer udp checksum"),
)


# -------------------------------------------------------------------------------------------- views


def checksum_state(packet: bytes, header: int, length: int) -> tuple[str, int]:
    """How the checksum of a whole TCP, UDP or ICMP packet stands, and where it is in the packet.

    "none" for other protocols and what is too short, "absent" for UDP without one.
    """
    at = {socket.IPPROTO_TCP: 16, socket.IPPROTO_UDP: 6, socket.IPPROTO_ICMP: 2}.get(packet[9])
    payload = packet[header:length]
    if at is None or len(payload) < at + 2:
        return "none", 0
    if packet[9] == socket.IPPROTO_UDP and payload[at : at + 2] == b"\0\0":
        return "absent", header + at
    pseudo = b""
    if packet[9] != socket.IPPROTO_ICMP:
        pseudo = packet[12:20] + struct.pack("!HH", packet[9], len(payload))
    state = "right" if sockets.checksum(pseudo + payload) == 0 else "wrong"
    return state, header + at


def ip_view(packet: bytes, finished: bool) -> View:
    """Every field of an IPv4 packet. A checksum that is left to a device counts as right."""
    header = (packet[0] & 15) * 4
    _, tos, length, ident, fragment, ttl, protocol = struct.unpack_from("!BBHHHBB", packet)
    state, at = "fragment", 0
    if not fragment & MORE_OR_OFFSET:
        state, at = checksum_state(packet, header, length)
    if state == "wrong" and not finished:
        state = "right"
    data = bytearray(packet[header:length])
    if state == "right":
        data[at - header : at - header + 2] = b"\0\0"
    return {
        "version and header": packet[0],
        "dscp": tos >> 2,
        "ecn": tos & 3,
        "length": length,
        "ident": ident,
        "flags": fragment >> 13,
        "offset": fragment & 0x1FFF,
        "ttl": ttl,
        "protocol": protocol,
        "header checksum": "right" if sockets.checksum(packet[:header]) == 0 else "wrong",
        "source": socket.inet_ntoa(packet[12:16]),
        "destination": socket.inet_ntoa(packet[16:20]),
        "options": packet[20:header].hex(),
        "checksum": state,
        "data": data.hex(),
        "trailer": len(packet) - length,
    }


def frame_view(data: bytes, finished: bool, vlan: int | None = None) -> View:
    """An Ethernet frame and the packet in it."""
    kind = int.from_bytes(data[12:14])
    ether = {"to": data[:6].hex(":"), "from": data[6:12].hex(":"), "type": kind, "vlan": vlan}
    if kind != ETH_IPV4 or len(data) < ETHER + 20:
        return {**ether, "data": data[ETHER:].hex()}
    return {**ether, **ip_view(data[ETHER:], finished)}


def tunnel_view(frame: Frame, port: int) -> View:
    """A frame on the wire: of a tunnel packet the outer headers and the frame inside."""
    outer = dict(frame_view(frame.data, frame.checksum_ready, frame.vlan))
    whole = outer.get("protocol") == socket.IPPROTO_UDP and outer["checksum"] != "fragment"
    if not whole or int.from_bytes(frame.data[36:38]) != port:
        return {f"outer {name}": value for name, value in outer.items()}
    vxlan = frame.data[42:50]
    del outer["data"]
    view: dict[str, object] = {f"outer {name}": value for name, value in outer.items()}
    view["outer udp checksum"] = view.pop("outer checksum")
    view["outer source port"] = int.from_bytes(frame.data[34:36])
    view["outer udp length"] = int.from_bytes(frame.data[38:40])
    # What a device has still to finish is the outer checksum, if there is one.
    finished = frame.checksum_ready or view["outer udp checksum"] != "absent"
    view["vxlan"] = vxlan.hex()
    return view | dict(frame_view(frame.data[50:], finished))


# -------------------------------------------------------------------------------------------- cases


class Place(StrEnum):
    """Where a frame is put on the stage."""

    POD = "sent by the near pod"
    NEIGHBOUR = "sent by another pod of its host"
    WIRE = "sent on the wire towards the far host"
    BACK = "sent by the far pod"


Shot = tuple[Place, bytes]
Setting = Callable[["Stage"], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True)
class Case:
    """Frames to put on the stage once the flow is warm.

    `fast` is how many of them must hit at from_pod on the near host and at from_wire on the far
    one; None where that is not the point. `flow` is "udp", "icmp" or "tcp"; `setting` holds while
    the flow is made warm and the frames are sent.
    """

    name: str
    shots: Callable[[Stage], list[Shot]]
    fast: tuple[int | None, int | None] = (0, 0)
    flow: str = "udp"
    setting: Setting | None = None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Outcome:
    """What was seen, in order, by point of observation, and what the programs counted."""

    seen: Mapping[str, list[View]]
    near: Mapping[str, int] = field(default_factory=dict)
    far: Mapping[str, int] = field(default_factory=dict)


def without_exceptions(point: str, view: View) -> View:
    allowed = {each.field for each in EXCEPTIONS if each.point == point}
    return {name: value for name, value in view.items() if name not in allowed}


def differences(base: Outcome, warm: Outcome) -> list[str]:
    """Each field in which two outcomes differ, as "point number: field base -> fast"."""
    found = []
    for point, expected in base.seen.items():
        got = warm.seen[point]
        if len(expected) != len(got):
            found.append(f"{point}: {len(expected)} frames -> {len(got)}")
        for number, pair in enumerate(zip(expected, got, strict=False)):
            one, other = (without_exceptions(point, view) for view in pair)
            found += [
                f"{point} {number}: {name} {one.get(name)!r} -> {other.get(name)!r}"
                for name in sorted(one.keys() | other.keys())
                if one.get(name) != other.get(name)
            ]
    return found


# -------------------------------------------------------------------------------------------- stage


class Watch:
    """What is seen at the far pod, at the near pod and on the near host's end of the wire."""

    def __init__(self, far: Capture, near: Capture, wire: Capture, port: int) -> None:
        self._captures = (far, near, wire)
        self._port = port
        self._seen = [len(capture.packets()) for capture in self._captures]

    def arrived(self) -> list[View]:
        return [_view(frame) for frame in self._new(0) if _came(frame)]

    def returned(self) -> list[View]:
        """Without identification, which is its sender's own affair."""
        views = [_view(frame) for frame in self._new(1) if _came(frame)]
        return [{k: v for k, v in view.items() if k != "ident"} for view in views]

    def left(self) -> list[View]:
        return [tunnel_view(frame, self._port) for frame in self._new(2) if _went(frame)]

    def views(self, *, wire: bool) -> dict[str, list[View]]:
        """By point. Not the wire if a frame was put there: the receiver changes our copy of it."""
        found = {"pod": self.arrived(), "sender": self.returned()}
        return found | {"wire": self.left()} if wire else found

    def _new(self, which: int) -> list[Frame]:
        return self._captures[which].packets()[self._seen[which] :]


def _view(frame: Frame) -> View:
    return frame_view(frame.data, frame.checksum_ready, frame.vlan)


@contextlib.contextmanager
def one_cpu() -> Iterator[None]:
    """On one CPU a frame has arrived when the call that sent it returns, and none overtakes."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Stage:
    """Two hosts with pods, ready for frames of all kinds. Nothing of ours has to run."""

    def __init__(self, hosts: tuple[Host, Host], shape: Shape, device: Vxlan) -> None:
        self.near, self.far = hosts
        self.shape, self.device, self.tx_offload = shape, device, True
        self.pod, self.far_pod = (host.pods["p1"] for host in hosts)
        self.neighbour = self.near.pod("p2")
        (tunnel,) = self.near.netlink.link("get", index=self.near.index(self.near.tunnel))
        tunnel_mtu = tunnel.get("mtu")
        pods = (self.pod, self.far_pod, self.neighbour)
        for pod in pods:
            for where, name in ((pod, pod.device), (pod.host, pod.host_device)):
                where.netlink.link("set", index=where.index(name), mtu=POD_MTU)
            # The pod's own sockets keep to what the tunnel carries.
            route = pod.command(["ip", "route", "show", "default"]).stdout.split()
            pod.command(["ip", "route", "replace", *route, "mtu", str(tunnel_mtu)])
            # Flows are made by hand: a kernel that knows nothing of them must not answer.
            pod.command(["nft", "-f", "-"], text=_MUTE)
            for port in (NEAR_PORT, FAR_PORT, FENCE_PORTS[1]):
                sockets.udp(pod, port)
        for each in (*hosts, *pods):
            each.sysctl("net.ipv4.icmp_ratelimit", 0)
            each.sysctl("net.ipv4.icmp_msgs_per_sec", 100000)
        self._injectors = {
            Place.POD: Injector(self.pod, self.pod.device),
            Place.NEIGHBOUR: Injector(self.neighbour, self.neighbour.device),
            Place.WIRE: Injector(self.near, self.near.uplink),
            Place.BACK: Injector(self.far_pod, self.far_pod.device),
        }
        self._gateways = {pod.name: self._gateway(pod) for pod in pods}
        self._uplinks = tuple(_mac_of(host, host.uplink) for host in hosts)
        self._tunnels = tuple(_mac_of(host, host.tunnel) for host in hosts)
        # Closing one waits for every CPU of the machine, so they stay open.
        self._at_far = Capture(self.far_pod, self.far_pod.device)
        self._at_near = Capture(self.pod, self.pod.device)
        self._on_wire = Capture(self.near, self.near.uplink)
        self._built: dict[str, list[Shot]] = {}
        self._tcp_port = 30000

    def close(self) -> None:
        for injector in self._injectors.values():
            injector.close()
        for capture in (self._at_far, self._at_near, self._on_wire):
            capture.__exit__(None, None, None)

    def offload(self, on: bool) -> None:
        """Uplinks finish checksums and cut segments themselves, or leave both to the kernel."""
        self.tx_offload = on
        for host in (self.near, self.far):
            set_offload(host, host.uplink, Offload.TX, on)

    def rewind(self) -> None:
        """To be called before each run: both runs use the same ports, and find none in use."""
        self._tcp_port = 30000
        for host in (self.near, self.far):
            host.command(["conntrack", "-F"])

    # --- frames

    def _gateway(self, pod: Pod) -> str:
        return _mac_of(pod.host, "cni0" if self.shape is Shape.BRIDGE else pod.host_device)

    def link(self, pod: Pod) -> Ether:
        """The Ethernet header of a frame that a pod sends to its gateway."""
        return Ether(src=pod.mac, dst=self._gateways[pod.name])

    def there(self, packet: Packet) -> Shot:
        """A packet that the near pod sends."""
        return Place.POD, bytes(self.link(self.pod) / packet)

    def back(self, packet: Packet) -> Shot:
        """A packet that the far pod sends."""
        return Place.BACK, bytes(self.link(self.far_pod) / packet)

    def ip(self, **fields: Any) -> IP:
        """An IPv4 header from the near pod to the far one."""
        defaults: dict[str, Any] = {
            "src": str(self.pod.address),
            "dst": str(self.far_pod.address),
            "id": 0x4321,
        }
        return IP(**(defaults | fields))

    def udp(self, data: bytes = b"sixteen letters.", **fields: Any) -> Packet:
        """A datagram of the warm flow; `fields` of its IP header."""
        return self.ip(**fields) / UDP(sport=NEAR_PORT, dport=FAR_PORT) / data

    def tunnelled(
        self, inner: Packet, *, vni: int | None = None, outer: IP | None = None, port: int = 0
    ) -> Shot:
        """A frame as the near host's tunnel would send it, put on the wire."""
        link = Ether(src=self._uplinks[0], dst=self._uplinks[1])
        header = outer or self.outer()
        vxlan = VXLAN(vni=self.device.vni if vni is None else vni, flags=8)
        udp = UDP(sport=50000, dport=port or self.device.port, chksum=0)
        return Place.WIRE, bytes(link / header / udp / vxlan / inner)

    def outer(self, **fields: Any) -> IP:
        defaults: dict[str, Any] = {
            "src": str(self.near.address),
            "dst": str(self.far.address),
            "id": 77,
        }
        return IP(**(defaults | fields))

    def inner(self, packet: Packet) -> Packet:
        """A packet between the tunnel devices' MACs, as it travels."""
        return Ether(src=self._tunnels[0], dst=self._tunnels[1]) / packet

    # --- flows

    def _round(self, flow: str) -> list[Shot]:
        """One packet each way."""
        source, destination = str(self.pod.address), str(self.far_pod.address)
        if flow == "icmp":
            return [self.there(self.ip() / ICMP(id=7, seq=1) / b"sixteen letters.")]
        if flow == "tcp":
            return [self.there(self.tcp("A", b"data")), self.back(self.tcp_back("A"))]
        answer = IP(src=destination, dst=source) / UDP(sport=FAR_PORT, dport=NEAR_PORT) / b"back"
        return [self.there(self.udp()), self.back(answer)]

    def tcp(self, flags: str, data: bytes = b"", **fields: Any) -> Packet:
        """A segment of the open connection; data has the same numbers each time, as if repeated."""
        seq = 100 if "S" in flags else 105 if "F" in flags or "R" in flags else 101
        header = TCP(sport=self._tcp_port, dport=FAR_PORT, flags=flags, seq=seq, ack=201)
        return self.ip(**fields) / header / data

    def tcp_back(self, flags: str) -> Packet:
        seq = 200 if "S" in flags else 201
        link = IP(src=str(self.far_pod.address), dst=str(self.pod.address))
        ack = 101 if "S" in flags else 105
        header = TCP(sport=FAR_PORT, dport=self._tcp_port, flags=flags, seq=seq, ack=ack)
        return link / header

    def put(self, shots: list[Shot]) -> None:
        for place, frame in shots:
            self._injectors[place].send(frame)

    def _open(self, flow: str) -> None:
        if flow == "tcp":
            self._tcp_port += 1
            syn, answer = self.tcp("S"), self.tcp_back("SA")
            self.put([self.there(syn), self.back(answer), self.there(self.tcp("A"))])

    def _warm(self, flow: str, nodes: Nodes | None) -> None:
        shots = self._round(flow)
        for node in nodes or ():
            node.evict()  # conntrack's timers start anew, too
        for _ in range(ROUNDS):
            self.put(shots)
        if nodes is None:
            self._fence()
            return

        def fast() -> bool:
            meters = [node.meter() for node in nodes]
            self.put(shots)
            return all(m.moved().get(k) == 1 for m in meters for k in (OUT, IN))

        until(fast, SECONDS, f"the {flow} flow is fast")

    # --- a run

    def play(self, case: Case, nodes: Nodes | None) -> Outcome:
        """Make the flow warm (`nodes`: until its caches are), send the frames, look what came."""
        with case.setting(self) if case.setting else contextlib.nullcontext():
            self._open(case.flow)
            self._warm(case.flow, nodes)
            shots = self._built.get(case.name) or case.shots(self)
            self._built[case.name] = shots
            watch = self.watch()
            meters = [Meter(node.plane) for node in nodes] if nodes else []
            self.put(shots)
            counted = [meter.moved() for meter in meters] or [{}, {}]
            self._fence()
            return Outcome(watch.views(wire=all(p is not Place.WIRE for p, _ in shots)), *counted)

    def watch(self) -> Watch:
        """What is seen from now on."""
        return Watch(self._at_far, self._at_near, self._on_wire, self.device.port)

    def _fence(self) -> None:
        """Wait until a packet of its own, that takes the base path, has come each way."""
        ends = (
            (self.pod, self.far_pod, Place.POD, self._at_far),
            (self.far_pod, self.pod, Place.BACK, self._at_near),
        )
        for source, target, place, capture in ends:
            packet = IP(src=str(source.address), dst=str(target.address))
            probe = packet / UDP(sport=FENCE_PORTS[0], dport=FENCE_PORTS[1]) / b"fence"
            count = len(capture.packets(_is_fence_that_came))
            self._injectors[place].send(bytes(self.link(source) / probe))
            capture.wait(count + 1, match=_is_fence_that_came)


_MUTE = """
table ip mute {
  chain output { type filter hook output priority 0; tcp flags & rst == rst drop; }
}
"""


def _is_fence(frame: Frame) -> bool:
    return frame.data.endswith(b"fence")


def _is_fence_that_came(frame: Frame) -> bool:
    return frame.direction is not Direction.OUTGOING and _is_fence(frame)


def _came(frame: Frame) -> bool:
    return frame.direction is not Direction.OUTGOING and _counts(frame)


def _went(frame: Frame) -> bool:
    return frame.direction is Direction.OUTGOING and _counts(frame)


def _counts(frame: Frame) -> bool:
    """Not address resolution, group membership and our own fence."""
    to_many = frame.data[0] & 1
    return not to_many and _kind(frame) != ETH_ARP and not _is_fence(frame)


def _kind(frame: Frame) -> int:
    return int.from_bytes(frame.data[12:14])


def _mac_of(host: Namespace, device: str) -> str:
    (link,) = host.netlink.link("get", index=host.index(device))
    address: str = link.get("address")
    return address
