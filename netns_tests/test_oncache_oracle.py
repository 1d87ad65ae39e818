# SPDX-License-Identifier: Apache-2.0
"""The fast path is the base path: IPv4 packet by packet, once without us and once with warm caches.

Each variant of the laboratory plays every case four times: base path and warm, with the uplinks'
transmit offloads on and off. Then the outcomes are compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from scapy.layers.inet import (
    ICMP,
    IP,
    TCP,
    UDP,
    IPOption_EOL,
    IPOption_LSRR,
    IPOption_NOP,
    IPOption_Router_Alert,
    IPOption_RR,
    IPOption_Timestamp,
    fragment,
)
from scapy.layers.l2 import GRE, Dot1Q, Ether
from scapy.layers.sctp import SCTP, SCTPChunkData
from scapy.packet import Packet, Raw

from netns_tests.lab import Lab, Shape, Vxlan, services, sockets
from netns_tests.nodes import LONG_LEASE, Nodes, accelerated, introduce_pods, warm
from netns_tests.oracle import (
    EXCEPTIONS,
    FAR_PORT,
    NEAR_PORT,
    Case,
    Exemption,
    Outcome,
    Place,
    Shot,
    Stage,
    View,
    differences,
    one_cpu,
)

# ------------------------------------------------------------------------------------- the variants


WIRE_MTU = 1500
FLANNEL = Vxlan()


@dataclass(frozen=True)
class Variant:
    name: str
    shape: Shape = Shape.BRIDGE
    device: Vxlan = FLANNEL
    policy: bool = False

    def __str__(self) -> str:
        return self.name


SMALL = {"pods": 16, "peers": 16, "flows": 1024}  # quick to empty

VARIANTS = [
    Variant("bridge", policy=True),
    Variant("routed", Shape.ROUTED),
    Variant("inherit", device=Vxlan(tos="inherit", ttl="inherit", df="inherit")),
    Variant(
        "fixed",
        Shape.ROUTED,
        Vxlan(vni=7, port=4789, tos=0x28, ttl=9, df="set", port_range=(50000, 50100)),
        policy=True,
    ),
    Variant("checksum", device=Vxlan(udp_checksum=True)),
]

# ---------------------------------------------------------------------------------------- the cases

Build = Callable[[Stage], Packet | list[Packet]]


def sent(build: Build) -> Callable[[Stage], list[Shot]]:
    """Packets that the near pod sends."""

    def shots(stage: Stage) -> list[Shot]:
        made = build(stage)
        return [stage.there(p) for p in (made if isinstance(made, list) else [made])]

    return shots


def eligible(name: str, build: Build, count: int = 1, flow: str = "udp") -> Case:
    """Packets of which each has to hit on both hosts."""
    return Case(name, sent(build), (count, count), flow)


def odd(name: str, build: Build, flow: str = "udp") -> Case:
    """Packets of which none may hit at the sender."""
    return Case(name, sent(build), (0, None), flow)


def between(name: str, build: Build) -> Case:
    """Odd packets among ordinary ones: the first of all is fast, and the order is kept."""

    def packets(stage: Stage) -> list[Packet]:
        made = build(stage)
        middle = made if isinstance(made, list) else [made]
        return [stage.udp(b"before"), *middle, stage.udp(b"after one"), stage.udp(b"after two")]

    return Case(f"{name}-among-others", sent(packets), (None, None))


def on_the_wire(name: str, build: Callable[[Stage], Shot | list[Shot]], hits: int | None) -> Case:
    """Tunnel packets that arrive from the wire; `hits` of them at the far host."""

    def shots(stage: Stage) -> list[Shot]:
        made = build(stage)
        return made if isinstance(made, list) else [made]

    return Case(name, shots, (0, hits))


def sized(length: int) -> bytes:
    """A datagram's payload that makes an IP packet of so many bytes."""
    return bytes(index & 0xFF for index in range(length - 28))


def pieces(stage: Stage, size: int = 1000, length: int = 3000) -> list[Packet]:
    whole: Packet = stage.udp(sized(length))
    made: list[Packet] = fragment(IP(bytes(whole)), size)  # type: ignore[no-untyped-call]
    return made


def overlapping(stage: Stage) -> list[Packet]:
    first, second, third = pieces(stage)
    second[IP].frag -= 4
    return [IP(bytes(_again(each))) for each in (first, second, third)]


def _again(packet: Packet) -> Packet:
    """With checksum and length to be computed anew."""
    del packet[IP].chksum
    del packet[IP].len
    return packet


def quoting(stage: Stage, kind: int, code: int, **fields: Any) -> Shot:
    """An ICMP error by the far pod about a packet of the warm flow."""
    header = IP(src=str(stage.far_pod.address), dst=str(stage.pod.address))
    quoted = bytes(stage.udp())[:28]
    return stage.back(header / ICMP(type=kind, code=code, **fields) / Raw(quoted))


def quoting_from_near(stage: Stage) -> Packet:
    header = IP(src=str(stage.far_pod.address), dst=str(stage.pod.address))
    answer = header / UDP(sport=FAR_PORT, dport=NEAR_PORT) / b"back"
    made: Packet = stage.ip() / ICMP(type=3, code=3) / Raw(bytes(answer)[:28])
    return made


def tagged(stage: Stage, vlan: int) -> list[Shot]:
    link = stage.link(stage.pod)
    return [(Place.POD, bytes(link / Dot1Q(vlan=vlan) / stage.udp()))]


def tagged_outside(stage: Stage, vlan: int) -> Shot:
    place, frame = stage.tunnelled(stage.inner(stage.udp()))
    return place, frame[:12] + struct.pack("!HH", 0x8100, vlan) + frame[12:]


def tagged_inside(stage: Stage) -> Shot:
    plain = stage.inner(stage.udp())
    return stage.tunnelled(Ether(src=plain.src, dst=plain.dst) / Dot1Q(vlan=5) / plain[IP])


def padded(stage: Stage) -> list[Shot]:
    place, frame = stage.there(stage.udp(b"short"))
    return [(place, frame + bytes(20))]


def cut(stage: Stage) -> list[Shot]:
    place, frame = stage.there(stage.udp(sized(500)))
    return [(place, frame[:-100])]


def marked(outer: int) -> Callable[[Stage], list[Shot]]:
    """Inner packets of each codepoint, in an outer header of one codepoint."""

    def shots(stage: Stage) -> list[Shot]:
        return [
            stage.tunnelled(stage.inner(stage.udp(tos=0x20 | inner)), outer=stage.outer(tos=outer))
            for inner in range(4)
        ]

    return shots


def to_another_mac(stage: Stage) -> Shot:
    place, frame = stage.tunnelled(stage.inner(stage.udp()))
    return place, bytes.fromhex("020000990001") + frame[6:]


def inner_to_another_mac(stage: Stage) -> Shot:
    inner = stage.inner(stage.udp())
    inner.dst = "02:00:00:99:00:01"
    return stage.tunnelled(inner)


def vxlan_with(flags: int, reserved: int = 0) -> Callable[[Stage], Shot]:
    def shot(stage: Stage) -> Shot:
        place, frame = stage.tunnelled(stage.inner(stage.udp()))
        head = struct.pack("!II", flags << 24 | reserved, stage.device.vni << 8)
        return place, frame[:42] + head + frame[50:]

    return shot


def outer_fragments(stage: Stage) -> list[Shot]:
    _, frame = stage.tunnelled(stage.inner(stage.udp(sized(800))))
    ether = Ether(frame)
    return [
        (Place.WIRE, bytes(Ether(src=ether.src, dst=ether.dst) / piece))
        for piece in fragment(ether[IP], 400)  # type: ignore[no-untyped-call]
    ]


def summed_outside(stage: Stage) -> Shot:
    _, frame = stage.tunnelled(stage.inner(stage.udp()))
    ether = Ether(frame)
    raw = IP(bytes(ether[IP]))
    ports, rest = bytes(raw.payload)[:8], bytes(raw.payload)[8:]
    length = len(ports) + len(rest)
    pseudo = socket.inet_aton(raw.src) + socket.inet_aton(raw.dst)
    pseudo += struct.pack("!HH", socket.IPPROTO_UDP, length)
    check = sockets.checksum(pseudo + ports[:6] + b"\0\0" + rest) or 0xFFFF
    return Place.WIRE, frame[:40] + struct.pack("!H", check) + frame[42:]


def padded_inside(stage: Stage) -> Shot:
    return stage.tunnelled(Ether(bytes(stage.inner(stage.udp())) + bytes(20)))


def short_offset(stage: Stage) -> Packet:
    segment = stage.tcp("A", b"data")
    segment[TCP].dataofs = 4
    return segment


def stolen(stage: Stage, source: str) -> Shot:
    return stage.there(stage.udp(src=source))


@contextlib.contextmanager
def narrow_overlay(stage: Stage) -> Iterator[None]:
    """The route to the far pods has a smaller MTU than the tunnel device."""
    yield from _rerouted(stage, stage.far.pod_range.with_prefixlen, 1300)


@contextlib.contextmanager
def narrow_underlay(stage: Stage) -> Iterator[None]:
    """The route to the far host has a smaller MTU than the uplink."""
    yield from _rerouted(stage, f"{stage.far.address}/32", 1400)


def _rerouted(stage: Stage, destination: str, mtu: int) -> Iterator[None]:
    host = stage.near
    shown = host.command(["ip", "route", "show", destination]).stdout.split()
    if not shown:
        shown = [destination, "dev", host.uplink]
        undo = ["ip", "route", "del", destination]
    else:
        undo = ["ip", "route", "replace", *shown]
    host.command(["ip", "route", "replace", *shown, "mtu", str(mtu)])
    try:
        yield
    finally:
        host.command(undo)


CASES = [
    eligible("one-datagram", lambda s: s.udp()),
    eligible("empty-datagram", lambda s: s.udp(b"")),
    eligible("many-sizes", lambda s: [s.udp(sized(n)) for n in range(28, 1451, 79)], 19),
    eligible("largest", lambda s: [s.udp(sized(1450)), s.udp(sized(1450), flags="DF")], 2),
    eligible("burst", lambda s: [s.udp(bytes([n])) for n in range(60)], 60),
    eligible("tos", lambda s: [s.udp(tos=n) for n in (0, 4, 0x28, 0x88, 0xB8, 0xE0, 0xFC)], 7),
    eligible("ecn", lambda s: [s.udp(tos=0x28 | n) for n in range(4)], 4),
    eligible("ids", lambda s: [s.udp(id=n, flags=f) for n in (1, 65535) for f in (0, "DF")], 4),
    eligible("ttl-255", lambda s: s.udp(ttl=255)),
    eligible("ttl-64", lambda s: s.udp(ttl=64)),
    eligible("ttl-3", lambda s: s.udp(ttl=3)),
    Case("ttl-2", sent(lambda s: s.udp(ttl=2)), (1, 0)),
    odd("ttl-1", lambda s: s.udp(ttl=1)),
    between("ttl-1", lambda s: s.udp(ttl=1)),
    between("ttl-2", lambda s: s.udp(ttl=2)),
    Case("ttl-0", sent(lambda s: s.udp(ttl=0)), (0, 0)),
    odd("option-nop", lambda s: s.udp(options=[IPOption_NOP()] * 3 + [IPOption_EOL()])),
    odd("option-record-route", lambda s: s.udp(options=[IPOption_RR(routers=["0.0.0.0"] * 4)])),
    odd("option-router-alert", lambda s: s.udp(options=[IPOption_Router_Alert()])),
    odd("option-timestamp", lambda s: s.udp(options=[IPOption_Timestamp(flg=1)])),
    odd("option-source-route", lambda s: s.udp(options=[IPOption_LSRR(routers=["10.9.9.9"])])),
    between("options", lambda s: s.udp(options=[IPOption_NOP()] * 4)),
    odd("fragments", pieces),
    odd("fragments-reversed", lambda s: pieces(s)[::-1]),
    odd("fragments-shuffled", lambda s: [pieces(s)[n] for n in (1, 0, 2)]),
    odd("fragment-first-only", lambda s: pieces(s)[0]),
    odd("fragment-middle-only", lambda s: pieces(s)[1]),
    odd("fragment-last-only", lambda s: pieces(s)[-1]),
    odd("fragments-tiny", lambda s: pieces(s, 8, 60)),
    odd("fragments-overlapping", overlapping),
    between("fragments", pieces),
    odd("too-big-with-df", lambda s: s.udp(sized(1451), flags="DF")),
    odd("far-too-big-with-df", lambda s: s.udp(sized(1500), flags="DF")),
    odd("too-big", lambda s: s.udp(sized(1451))),
    between("too-big", lambda s: [s.udp(sized(1500)), s.udp(sized(1500), flags="DF")]),
    Case(
        "route-mtu",
        sent(lambda s: [s.udp(sized(1300), flags="DF"), s.udp(sized(1400), flags="DF")]),
        (None, None),
        setting=narrow_overlay,
    ),
    Case(
        "underlay-mtu",
        sent(lambda s: [s.udp(sized(1350)), s.udp(sized(1400)), s.udp(sized(1400), flags="DF")]),
        (None, None),
        setting=narrow_underlay,
    ),
    Case("icmp-port-unreachable", lambda s: [quoting(s, 3, 3)]),
    Case("icmp-time-exceeded", lambda s: [quoting(s, 11, 0)]),
    Case("icmp-too-big", lambda s: [quoting(s, 3, 4, nexthopmtu=1200)]),
    odd("icmp-error-from-near", quoting_from_near),
    eligible("ping", lambda s: s.ip() / ICMP(id=7, seq=2) / b"data", flow="icmp"),
    eligible("ping-large", lambda s: s.ip() / ICMP(id=7) / bytes(1422), flow="icmp"),
    odd("ping-ttl-1", lambda s: s.ip(ttl=1) / ICMP(id=7, seq=3), flow="icmp"),
    odd("ping-with-code", lambda s: s.ip() / ICMP(id=7, code=1), flow="icmp"),
    odd("icmp-of-another-type", lambda s: s.ip() / ICMP(type=17, id=7), flow="icmp"),
    eligible("ping-bad-checksum", lambda s: s.ip() / ICMP(id=7, chksum=1), flow="icmp"),
    Case("vlan", lambda s: tagged(s, 5)),
    Case("vlan-priority", lambda s: tagged(s, 0), (0, None)),
    on_the_wire("vlan-outside", lambda s: tagged_outside(s, 5), 0),
    on_the_wire("vlan-priority-outside", lambda s: tagged_outside(s, 0), 0),
    on_the_wire("vlan-inside", tagged_inside, 0),
    odd("sctp", lambda s: s.ip() / SCTP(sport=NEAR_PORT, dport=FAR_PORT) / SCTPChunkData(data="x")),
    odd("gre", lambda s: s.ip() / GRE() / IP(dst="10.9.9.9") / b"inside"),
    odd("esp", lambda s: s.ip(proto=50) / Raw(bytes(40))),
    odd("ip-in-ip", lambda s: s.ip() / s.udp()),
    eligible(
        "no-udp-checksum",
        lambda s: s.ip() / UDP(sport=NEAR_PORT, dport=FAR_PORT, chksum=0) / b"data",
    ),
    eligible(
        "bad-udp-checksum",
        lambda s: s.ip() / UDP(sport=NEAR_PORT, dport=FAR_PORT, chksum=1) / b"data",
    ),
    Case("bad-header-checksum", sent(lambda s: s.udp(chksum=1)), (None, None)),
    odd(
        "udp-length-too-short",
        lambda s: s.ip() / UDP(sport=NEAR_PORT, dport=FAR_PORT, len=10) / b"data",
    ),
    odd(
        "udp-length-too-long",
        lambda s: s.ip() / UDP(sport=NEAR_PORT, dport=FAR_PORT, len=100) / b"data",
    ),
    Case("padding", padded, (0, None)),
    Case("cut-short", cut),
    eligible("reserved-flag", lambda s: s.udp(flags="evil")),
    odd("version-5", lambda s: s.udp(version=5)),
    odd("header-length-4", lambda s: s.udp(ihl=4)),
    Case("spoofed-neighbour", lambda s: [stolen(s, str(s.neighbour.address))], (0, None)),
    Case("spoofed-nobody", lambda s: [stolen(s, "10.1.0.200")], (0, None)),
    Case("spoofed-far-pod", lambda s: [stolen(s, str(s.far_pod.address))], (0, None)),
    Case(
        "spoofed-by-neighbour",
        lambda s: [(Place.NEIGHBOUR, bytes(s.link(s.neighbour) / s.udp()))],
        (0, None),
    ),
    on_the_wire("wire-good", lambda s: s.tunnelled(s.inner(s.udp())), 1),
    on_the_wire("wire-wrong-vni", lambda s: s.tunnelled(s.inner(s.udp()), vni=99), 0),
    on_the_wire(
        "wire-stranger", lambda s: s.tunnelled(s.inner(s.udp()), outer=s.outer(src="192.0.2.77")), 0
    ),
    on_the_wire(
        "wire-other-address",
        lambda s: s.tunnelled(s.inner(s.udp()), outer=s.outer(dst="192.0.2.78")),
        0,
    ),
    on_the_wire("wire-other-port", lambda s: s.tunnelled(s.inner(s.udp()), port=9999), 0),
    on_the_wire("wire-other-mac", to_another_mac, 0),
    on_the_wire("wire-inner-other-mac", inner_to_another_mac, 0),
    on_the_wire("wire-no-vni-flag", vxlan_with(0), 0),
    on_the_wire("wire-more-flags", vxlan_with(0x88), 0),
    on_the_wire("wire-reserved-bits", vxlan_with(8, 1), 0),
    on_the_wire(
        "wire-outer-options",
        lambda s: s.tunnelled(s.inner(s.udp()), outer=s.outer(options=[IPOption_NOP()] * 4)),
        0,
    ),
    on_the_wire("wire-outer-fragments", outer_fragments, 0),
    on_the_wire(
        "wire-outer-ttl-1", lambda s: s.tunnelled(s.inner(s.udp()), outer=s.outer(ttl=1)), 1
    ),
    on_the_wire("wire-outer-checksum", summed_outside, 1),
    on_the_wire("wire-inner-fragments", lambda s: [s.tunnelled(s.inner(p)) for p in pieces(s)], 0),
    on_the_wire(
        "wire-inner-options", lambda s: s.tunnelled(s.inner(s.udp(options=[IPOption_NOP()] * 4))), 0
    ),
    on_the_wire("wire-inner-ttl-1", lambda s: s.tunnelled(s.inner(s.udp(ttl=1))), 0),
    on_the_wire("wire-inner-ttl-0", lambda s: s.tunnelled(s.inner(s.udp(ttl=0))), 0),
    on_the_wire(
        "wire-inner-bad-header-checksum", lambda s: s.tunnelled(s.inner(s.udp(chksum=1))), None
    ),
    on_the_wire("wire-inner-padding", padded_inside, 0),
    *(on_the_wire(f"wire-marked-{outer}", marked(outer), None) for outer in range(4)),
    eligible("tcp-data", lambda s: [s.tcp("A", b"data"), s.tcp("PA", b"more")], 2, "tcp"),
    eligible("tcp-no-data", lambda s: s.tcp("A"), flow="tcp"),
    eligible(
        "tcp-ecn-and-urgent",
        lambda s: [s.tcp("AE", b"data"), s.tcp("AC", b"data"), s.tcp("AU", b"data")],
        3,
        "tcp",
    ),
    eligible("tcp-marked", lambda s: [s.tcp("A", b"data", tos=n) for n in range(4)], 4, "tcp"),
    odd("tcp-fin", lambda s: [s.tcp("FA"), s.tcp("A", b"data")], "tcp"),
    odd("tcp-rst", lambda s: [s.tcp("RA"), s.tcp("A", b"data")], "tcp"),
    odd("tcp-syn", lambda s: s.tcp("S"), "tcp"),
    odd("tcp-no-flags", lambda s: s.tcp("", b"data"), "tcp"),
    odd("tcp-syn-fin", lambda s: s.tcp("SF"), "tcp"),
    odd("tcp-header-too-short", short_offset, "tcp"),
]


# ------------------------------------------------------------------------------------ conversations

UDP_SEGMENT = 103  # linux/udp.h
IP_RECVTOS, IP_RECVTTL, IP_MTU_DISCOVER, IP_PMTUDISC_DONT = 13, 12, 10, 0  # linux/in.h
DATAGRAMS = (1400, 1422, 1423, 1472, 1500, 2900, 9000, 40000, 65000)
Result = dict[str, object]
Conversation = Callable[[Stage, Nodes | None], Result]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def made_up(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def talkers(stage: Stage, nodes: Nodes | None, port: int) -> tuple[socket.socket, socket.socket]:
    """Both ends of a UDP flow that is warm; the far one tells TTL and TOS."""
    near, far = sockets.udp(stage.pod, port), sockets.udp(stage.far_pod, port)
    near.connect((str(stage.far_pod.address), port))
    far.connect((str(stage.pod.address), port))
    far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    for option in (IP_RECVTOS, IP_RECVTTL):
        far.setsockopt(socket.IPPROTO_IP, option, 1)

    def exchange() -> None:
        near.send(b"there")
        far.recv(10)
        far.send(b"back")
        near.recv(10)

    _warm(nodes, exchange)
    return near, far


def _warm(nodes: Nodes | None, exchange: Callable[[], object]) -> None:
    if nodes is None:
        for _ in range(4):
            exchange()
    else:
        warm(nodes, exchange)


def told(far: socket.socket) -> tuple[str, int, list[tuple[int, bytes]]]:
    """One datagram: its content, its size, and the control messages with TTL and TOS."""
    data, notes, _, _ = far.recvmsg(1 << 17, 256)
    return digest(data), len(data), sorted((kind, value) for _, kind, value in notes)


def numbered_ids(views: list[View]) -> list[View]:
    """Identifications by order of appearance: the pod's kernel drew them."""
    first: dict[object, int] = {}
    return [{**v, "ident": first.setdefault(v.get("ident"), len(first))} for v in views]


def large_datagrams(stage: Stage, nodes: Nodes | None) -> Result:
    """Fragments, among whole packets, of one warm flow."""
    near, far = talkers(stage, nodes, 21000)
    near.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DONT)
    watch = stage.watch()
    heard = []
    for size in DATAGRAMS:
        for data in (b"small", made_up(size)):
            near.send(data)
            heard.append(told(far))
    near.close()
    far.close()
    return {"heard": heard, "frames": numbered_ids(watch.arrived())}


def segments(stage: Stage, nodes: Nodes | None) -> Result:
    """UDP segmentation offload: one call, many datagrams."""
    near, far = talkers(stage, nodes, 21001)
    near.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 0x2A)
    near.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, 1000)
    far.settimeout(0.2)
    watch = stage.watch()
    heard = []
    for turn in range(5):
        near.send(made_up(40_000 + turn))
        with contextlib.suppress(TimeoutError):  # what is missing shows in the comparison
            for _ in range(41 if turn else 40):
                heard.append(told(far))
    near.close()
    far.close()
    left = watch.left()
    return {
        "heard": heard,
        "checksums": {view["checksum"] for view in watch.arrived()},
        "lengths": [view["outer length"] for view in left],
        "tos": {(view["outer dscp"], view["outer ecn"]) for view in left},
        "ports": len({view["outer source port"] for view in left}),
    }


def bulk(stage: Stage, nodes: Nodes | None) -> Result:
    """TCP in writes of 64 kB; the connection's outer source port stays the handshake's."""
    watch = stage.watch()
    near, far = sockets.connection(stage.pod, stage.far_pod, stage.far_pod.address, 21002)
    near.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 0x28)
    _warm(nodes, lambda: sockets.exchange(near, far))
    meters = [node.meter() for node in nodes or ()]
    for _ in range(8):
        sockets.exchange(near, far, made_up(1 << 16))
    assert all(
        meter.moved().get(name, 0) >= 8 for meter, name in zip(meters, FAST_WAY, strict=False)
    )
    sizes = [end.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) for end in (near, far)]
    near.close()
    far.close()
    arrived, left = watch.arrived(), watch.left()
    tunnelled = [view for view in left if "vxlan" in view]
    return {
        "mss": sizes,
        "ttl": {view["ttl"] for view in arrived},
        "checksums": {view["checksum"] for view in arrived},
        "odd": len(left) - len(tunnelled),
        "ports": len({view["outer source port"] for view in tunnelled}),
        "tos": {(view["outer dscp"], view["outer ecn"]) for view in tunnelled},
        "fits": stage.tx_offload or max(int(str(v["outer length"])) for v in left) <= WIRE_MTU,
    }


FAST_WAY = ("hits.from_pod", "hits.from_wire")
CONVERSATIONS: list[Conversation] = [large_datagrams, segments, bulk]

# ---------------------------------------------------------------------------------------- the runs


@dataclass(frozen=True)
class Run:
    """What one run showed, by case and by conversation."""

    cases: dict[str, Outcome]
    conversations: dict[str, Result]


@dataclass(frozen=True)
class Runs:
    """Without us and warm, by whether the uplinks' offloads are on."""

    base: dict[bool, Run]
    warm: dict[bool, Run]


def run(stage: Stage, offload: bool, nodes: Nodes | None) -> Run:
    stage.offload(offload)
    stage.rewind()
    cases = {case.name: stage.play(case, nodes) for case in CASES}
    return Run(cases, {talk.__name__: talk(stage, nodes) for talk in CONVERSATIONS})


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def runs(request: pytest.FixtureRequest) -> Iterator[Runs]:
    variant: Variant = request.param
    with Lab() as lab, contextlib.ExitStack() as stack:
        hosts = lab.pair(shape=variant.shape, device=variant.device)
        if variant.policy:
            for host in hosts:
                services.policy(host)
        introduce_pods(hosts)
        stage = stack.enter_context(contextlib.closing(Stage(hosts, variant.shape, variant.device)))
        with one_cpu():
            base = {offload: run(stage, offload, None) for offload in (True, False)}
        nodes = stack.enter_context(accelerated(hosts, lease_seconds=LONG_LEASE, limits=SMALL))
        with one_cpu():
            fast = {offload: run(stage, offload, nodes) for offload in (False, True)}
        yield Runs(base, fast)


both_offloads = pytest.mark.parametrize("offload", [True, False], ids=["tx-on", "tx-off"])


# What docs/packet-path.md lists under "Known gaps": a difference there is not news.
KNOWN_GAPS = frozenset({"route-mtu", "underlay-mtu", "bad-udp-checksum", "ping-bad-checksum"})


@both_offloads
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_ends_as_on_the_base_path(
    request: pytest.FixtureRequest, runs: Runs, case: Case, offload: bool
) -> None:
    if case.name in KNOWN_GAPS:
        request.applymarker(pytest.mark.xfail(reason="a known gap", strict=False))
    base, fast = runs.base[offload].cases[case.name], runs.warm[offload].cases[case.name]
    assert differences(base, fast) == []
    hits = (fast.near.get(FAST_WAY[0], 0), fast.far.get(FAST_WAY[1], 0))
    for expected, got in zip(case.fast, hits, strict=True):
        assert expected in (None, got), (hits, fast.near, fast.far)


@both_offloads
@pytest.mark.parametrize("talk", CONVERSATIONS, ids=lambda talk: talk.__name__)
def test_conversations_are_the_same(runs: Runs, talk: Conversation, offload: bool) -> None:
    name = talk.__name__
    assert runs.warm[offload].conversations[name] == runs.base[offload].conversations[name]


@pytest.mark.parametrize("exemption", EXCEPTIONS, ids=lambda exemption: exemption.row)
def test_every_exemption_is_documented(exemption: Exemption) -> None:
    page = (Path(__file__).parents[1] / "docs" / "packet-path.md").read_text(encoding="utf-8")
    assert f"\n| {exemption.row} |" in page
