# SPDX-License-Identifier: Apache-2.0
"""IPv6 between pods, and under the tunnel, with running agents: every combination of the two.

Fast is what the counters of both hosts say; right is what arrives at the pods and on the wire.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from ipaddress import IPv6Address
from pathlib import Path

import pytest
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import (
    ICMPv6EchoRequest,
    ICMPv6MLReport2,
    ICMPv6ND_NA,
    ICMPv6ND_NS,
    ICMPv6PacketTooBig,
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
    IPv6ExtHdrRouting,
)
from scapy.layers.l2 import Ether
from scapy.layers.vxlan import VXLAN
from scapy.packet import Packet, Raw

from netns_tests.lab import (
    Capture,
    Direction,
    Frame,
    Host,
    Lab,
    Namespace,
    Offload,
    Pod,
    Shape,
    Vxlan,
    inject,
    ping,
    services,
    set_offload,
    sockets,
    until,
)
from netns_tests.nodes import (
    FAST,
    IN,
    LONG_LEASE,
    OUT,
    SECONDS,
    Node,
    Nodes,
    accelerated,
    numbered,
    warm,
)
from netns_tests.test_oncache import (
    Talk,
    assert_nothing_lost,
    by_command,
    by_command_after_its_death,
    dump,
    fast_again,
    invalid,
    links,
    no_longer_fast,
    received,
)

HOPS_LEFT = 62  # of 64: one hop on each host
ROUNDS = 20
TUNNEL_PORT = 8472
WRITE = 1 << 16
SIZES = (1, 2, 17, 512, 1300)
HEADERS = {4: 20, 6: 40}
ECHOES = (128, 129)
FAMILY = {4: "ip", 6: "ip6"}


@dataclass(frozen=True)
class Variant:
    """A dual stack cluster and the tunnel under it."""

    outer: int  # IP version of the underlay
    checksum: bool  # of the outer UDP header; over IPv4 Flannel has none
    shape: Shape
    policy: bool
    offload: bool

    def __str__(self) -> str:
        checksum = "sum" if self.checksum else "zero"
        policy = "policy" if self.policy else "no-policy"
        tx = "on" if self.offload else "off"
        return f"in{self.outer}-{checksum}-{self.shape}-{policy}-tx-{tx}"

    @property
    def segments(self) -> bool:
        """Whether large writes are fast: of segments no outer checksum can be derived."""
        return not (self.outer == 6 and self.checksum)

    @property
    def device(self) -> Vxlan:
        zero = self.outer == 6 and not self.checksum
        return Vxlan(outer=self.outer, zero_checksum6_tx=zero, zero_checksum6_rx=zero)


VARIANTS = [
    Variant(4, checksum=False, shape=Shape.BRIDGE, policy=True, offload=True),
    Variant(4, checksum=False, shape=Shape.ROUTED, policy=False, offload=False),
    Variant(6, checksum=True, shape=Shape.BRIDGE, policy=True, offload=False),
    Variant(6, checksum=True, shape=Shape.ROUTED, policy=False, offload=True),
    Variant(6, checksum=False, shape=Shape.BRIDGE, policy=False, offload=False),
    Variant(6, checksum=False, shape=Shape.ROUTED, policy=True, offload=True),
]
SIX_IN_SIX = Variant(6, checksum=True, shape=Shape.BRIDGE, policy=True, offload=True)


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def variant(request: pytest.FixtureRequest) -> Variant:
    chosen: Variant = request.param
    return chosen


@contextlib.contextmanager
def built(variant: Variant) -> Iterator[tuple[Host, Host]]:
    with Lab() as lab:
        hosts = lab.pair(device=variant.device, shape=variant.shape, ip6=True)
        for host in hosts:
            if variant.policy:
                services.policy(host)
            if not variant.offload:
                set_offload(host, host.uplink, Offload.TX, False)
        yield hosts


@pytest.fixture(scope="module")
def nodes(variant: Variant) -> Iterator[Nodes]:
    with built(variant) as hosts, accelerated(hosts, lease_seconds=LONG_LEASE) as running:
        yield running


@pytest.fixture(params=[6, 4], ids=["6", "4"])
def inner(request: pytest.FixtureRequest) -> int:
    """IP version of the pods' packets."""
    version: int = request.param
    return version


# ------------------------------------------------------------------------------------- what arrived


@dataclass(frozen=True)
class Seen:
    """An IP packet, dissected by hand: there are many."""

    version: int
    protocol: int  # IPv6: the next header
    hops: int
    ends: bytes  # source and destination
    label: int
    header: bytes
    payload: bytes

    @property
    def port(self) -> int:
        """UDP's or TCP's destination."""
        return int.from_bytes(self.payload[2:4])

    @property
    def data(self) -> bytes:
        """What UDP or TCP carries."""
        tcp = self.protocol == socket.IPPROTO_TCP
        return self.payload[(self.payload[12] >> 4) * 4 if tcp else 8 :]

    @property
    def background(self) -> bool:
        """Neighbour discovery and multicast reports."""
        icmp = self.version == 6 and self.protocol == socket.IPPROTO_ICMPV6
        return self.protocol == 0 or (icmp and self.payload[0] not in ECHOES)

    @property
    def transport_sum(self) -> int:
        """0 if the TCP, UDP or ICMP checksum of the whole packet is right."""
        if self.protocol == socket.IPPROTO_ICMP:
            return sockets.checksum(self.payload)
        pseudo = self.ends + struct.pack("!II", len(self.payload), self.protocol)
        return sockets.checksum(pseudo + self.payload)


def ip_of(data: bytes) -> Seen | None:
    """The IP packet in an Ethernet frame, None if there is another; its length must be right."""
    kind, packet = data[12:14], data[14:]
    if kind == b"\x08\x00":
        assert len(packet) == int.from_bytes(packet[2:4])
        size = (packet[0] & 15) * 4
        assert sockets.checksum(packet[:size]) == 0
        ends = packet[12:20]
        return Seen(4, packet[9], packet[8], ends, 0, packet[:size], packet[size:])
    if kind == b"\x86\xdd":
        assert len(packet) == int.from_bytes(packet[4:6]) + 40
        label = int.from_bytes(packet[1:4]) & 0xFFFFF
        return Seen(6, packet[6], packet[7], packet[8:40], label, packet[:40], packet[40:])
    return None


def assert_sound(frames: list[Frame], pod: Pod) -> list[Seen]:
    """Frames as the base path delivers them; their IP packets."""
    packets = []
    for frame in frames:
        packet = ip_of(frame.data)
        if packet is None or packet.background:
            continue
        assert frame.data[:6].hex(":") == pod.mac
        assert packet.hops == HOPS_LEFT
        if frame.checksum_ready:
            assert packet.transport_sum == 0
        packets.append(packet)
    return packets


def assert_wire(capture: Capture, variant: Variant) -> None:
    """Every tunnel packet on an uplink is whole, outside and inside."""
    for frame in capture.packets():
        outer = ip_of(frame.data)
        if outer is None or outer.protocol != socket.IPPROTO_UDP or outer.port != TUNNEL_PORT:
            continue
        summed = outer.payload[6:8] != b"\0\0"
        assert outer.version == variant.outer
        assert summed == (variant.outer == 6 and variant.checksum)
        assert frame.checksum_ready or variant.offload
        if frame.checksum_ready:
            assert not summed or outer.transport_sum == 0
            inside = ip_of(outer.payload[16:])
            assert inside is None or inside.background or inside.transport_sum == 0


def checksum_errors(namespace: Namespace) -> dict[str, int]:
    """All InCsumErrors counters of a namespace."""

    def read() -> dict[str, int]:
        found = {}
        for line in Path("/proc/thread-self/net/snmp6").read_text().splitlines():
            name, value = line.split()
            found[name] = int(value)
        rows = Path("/proc/thread-self/net/snmp").read_text().splitlines()
        for names, values in zip(rows[::2], rows[1::2], strict=True):
            kind, *columns = names.split()
            found |= {
                kind + column: int(value)
                for column, value in zip(columns, values.split()[1:], strict=True)
            }
        return {name: value for name, value in found.items() if "CsumErrors" in name}

    return namespace.run(read)


@contextlib.contextmanager
def watched(nodes: Nodes, variant: Variant) -> Iterator[tuple[list[Seen], list[Seen]]]:
    """What each pod receives in the block; it and what the wire had are checked at its end."""
    seen: tuple[list[Seen], list[Seen]] = ([], [])
    places = [place for node in nodes for place in (node.host, node.pod)]
    errors = [checksum_errors(place) for place in places]
    with contextlib.ExitStack() as stack:
        pods = [stack.enter_context(Capture(n.pod, n.pod.device)) for n in nodes]
        wires = [stack.enter_context(Capture(n.host, n.host.uplink)) for n in nodes]
        yield seen
        for node, capture, packets in zip(nodes, pods, seen, strict=True):
            packets.extend(assert_sound(received(capture), node.pod))
        for capture in wires:
            assert_wire(capture, variant)
        labels = [flow_labels(capture, Direction.OUTGOING) for capture in pods]
        assert labels == [flow_labels(capture, Direction.HOST) for capture in reversed(pods)]
    assert [checksum_errors(place) for place in places] == errors


def flow_labels(capture: Capture, direction: Direction) -> set[int]:
    frames = capture.packets(lambda frame: frame.direction is direction)
    packets = [packet for frame in frames if (packet := ip_of(frame.data))]
    return {packet.label for packet in packets if packet.version == 6 and not packet.background}


# --------------------------------------------------------------------------------------------- fast


def test_pings_are_fast(nodes: Nodes, variant: Variant, inner: int) -> None:
    """Echo requests from either side, answered by the other side's kernel."""
    room = 1500 - (50 if variant.outer == 4 else 70) - HEADERS[inner] - 8
    for near, far in (nodes, nodes[::-1]):
        with watched(nodes, variant):
            meters = near.meter(), far.meter()
            answers = [ping(near.pod, far.pod.ip(inner), ROUNDS, size=n) for n in (0, 57, room)]
        assert [answer.lost for answer in answers] == [0, 0, 0]
        assert {ttl for answer in answers for ttl in answer.ttls} == {HOPS_LEFT}
        for meter in meters:
            moved = meter.moved()
            # Each ping is a flow of its own and teaches before it is fast.
            assert moved[OUT] > 3 * (ROUNDS - 5)
            assert moved[IN] > 3 * (ROUNDS - 5)


Exchange = Callable[[bytes], None]


@contextlib.contextmanager
def datagrams(near: Pod, far: Pod, inner: int) -> Iterator[tuple[Exchange, int, int]]:
    """A UDP flow: a function that sends a payload there and back, and the two ports."""
    with sockets.udp(near, version=inner) as here, sockets.udp(far, version=inner) as there:
        ports = here.getsockname()[1], there.getsockname()[1]
        here.connect((str(far.ip(inner)), ports[1]))
        there.connect((str(near.ip(inner)), ports[0]))

        def exchange(data: bytes) -> None:
            for sender, receiver in ((here, there), (there, here)):
                sender.send(data)
                assert receiver.recv(1 << 16) == data

        yield exchange, *ports


@contextlib.contextmanager
def connected(near: Pod, far: Pod, inner: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection, of which nothing was lost at the end."""
    ends = sockets.connection(near, far, far.ip(inner))
    with ends[0], ends[1]:
        yield ends
        assert_nothing_lost(*ends)


def test_a_udp_flow_is_fast(nodes: Nodes, variant: Variant, inner: int) -> None:
    payloads = [os.urandom(size) for size in SIZES for _ in range(5)]
    count = len(payloads)
    with datagrams(nodes[0].pod, nodes[1].pod, inner) as (exchange, _, _):
        warm(nodes, lambda: exchange(b"warm"))
        with watched(nodes, variant) as arrived:
            meters = [node.meter() for node in nodes]
            for payload in payloads:
                exchange(payload)
            assert [meter.moved() for meter in meters] == [{OUT: count, IN: count}] * 2
    for packets in arrived:
        assert [packet.data for packet in packets] == payloads


def test_a_tcp_connection_is_fast(nodes: Nodes, variant: Variant, inner: int) -> None:
    payloads = [os.urandom(size) for size in SIZES for _ in range(5)]
    with connected(nodes[0].pod, nodes[1].pod, inner) as (near, far):
        warm(nodes, lambda: sockets.exchange(near, far))
        with watched(nodes, variant) as arrived:
            meters = [node.meter() for node in nodes]
            for payload in payloads:
                sockets.exchange(near, far, payload)
            for meter in meters:
                moved = meter.moved()
                assert moved.keys() == FAST
                assert min(moved.values()) >= len(payloads)
    for packets in arrived:
        assert b"".join(packet.data for packet in packets) == b"".join(payloads)


def test_large_writes_arrive_whole(nodes: Nodes, variant: Variant, inner: int) -> None:
    """As segments larger than any MTU; fast, unless the outer checksum of each has to be made."""
    with connected(nodes[0].pod, nodes[1].pod, inner) as (near, far):
        warm(nodes, lambda: sockets.exchange(near, far))
        with watched(nodes, variant):
            meters = [node.meter() for node in nodes]
            for _ in range(3):
                sockets.exchange(near, far, os.urandom(WRITE))
            for meter in meters:
                moved = meter.moved()
                assert (moved.keys() == FAST) == variant.segments
                assert ("base_path.checksum" in moved) == (not variant.segments)
        warm(nodes, lambda: sockets.exchange(near, far))


def test_a_warm_connection_outlives_its_entry(nodes: Nodes, variant: Variant, inner: int) -> None:
    """Back on the base path after what conntrack never saw, it is not INVALID."""
    with connected(nodes[0].pod, nodes[1].pod, inner) as (near, far):
        warm(nodes, lambda: sockets.exchange(near, far))
        for _ in range(1000):
            sockets.exchange(near, far, bytes(1200))
        assert all(node.evict() > 0 for node in nodes)
        sockets.exchange(near, far)
        warm(nodes, lambda: sockets.exchange(near, far))
    if variant.policy:
        assert [invalid(node.host, FAMILY[inner]) for node in nodes] == [0, 0]
