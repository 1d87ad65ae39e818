# SPDX-License-Identifier: Apache-2.0
"""IPv6 between pods, and under the tunnel, with running agents: every combination of the two.

Fast is what the counters of both hosts say; right is what arrives at the pods and on the wire.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from ipaddress import IPv6Address
from pathlib import Path

import pytest

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
    Meter,
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
TC_H_ROOT = 0xFFFFFFFF
WRITE = 1 << 16
SIZES = (1, 2, 17, 512, 1300)
HEADERS = {4: 20, 6: 40}
ECHOES = (128, 129)
FAMILY = {4: "ip", 6: "ip6"}
TRANSPORTS = {
    4: {socket.IPPROTO_TCP, socket.IPPROTO_UDP, socket.IPPROTO_ICMP},
    6: {socket.IPPROTO_TCP, socket.IPPROTO_UDP, socket.IPPROTO_ICMPV6},
}


@dataclass(frozen=True)
class Variant:
    """A dual stack cluster and the tunnel under it."""

    outer: int  # IP version of the underlay
    checksum: bool  # of the outer UDP header; over IPv4 Flannel has none
    shape: Shape
    policy: bool

    def __str__(self) -> str:
        checksum = "sum" if self.checksum else "zero"
        policy = "policy" if self.policy else "no-policy"
        return f"in{self.outer}-{checksum}-{self.shape}-{policy}"

    @property
    def segments(self) -> bool:
        """Whether large writes are fast: of segments no outer checksum can be derived."""
        return not (self.outer == 6 and self.checksum)

    @property
    def mtu(self) -> int:
        """Of the tunnel device."""
        return 1500 - (50 if self.outer == 4 else 70)

    @property
    def device(self) -> Vxlan:
        zero = self.outer == 6 and not self.checksum
        return Vxlan(outer=self.outer, zero_checksum6_tx=zero, zero_checksum6_rx=zero)


VARIANTS = [
    Variant(4, checksum=False, shape=Shape.BRIDGE, policy=True),
    Variant(6, checksum=True, shape=Shape.ROUTED, policy=True),
    Variant(6, checksum=False, shape=Shape.BRIDGE, policy=False),
]
SIX_IN_SIX = Variant(6, checksum=True, shape=Shape.BRIDGE, policy=True)


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


@pytest.fixture(params=[True, False], ids=["tx-on", "tx-off"])
def offload(request: pytest.FixtureRequest, nodes: Nodes) -> bool:
    """Whether the uplinks finish checksums and segments; if not, the kernel does before them."""
    on: bool = request.param
    for node in nodes:
        set_offload(node.host, node.host.uplink, Offload.TX, on)
    return on


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


def assert_wire(capture: Capture, variant: Variant, offload: bool) -> None:
    """Every tunnel packet on an uplink is whole, outside and inside."""
    for frame in capture.packets():
        outer = ip_of(frame.data)
        if outer is None or outer.protocol != socket.IPPROTO_UDP or outer.port != TUNNEL_PORT:
            continue
        summed = outer.payload[6:8] != b"\0\0"
        assert outer.version == variant.outer
        assert summed == (variant.outer == 6 and variant.checksum)
        assert frame.checksum_ready or offload
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
def watched(
    nodes: Nodes, variant: Variant, offload: bool
) -> Iterator[tuple[list[Seen], list[Seen]]]:
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
            assert_wire(capture, variant, offload)
        labels = [flow_labels(capture, Direction.OUTGOING) for capture in pods]
        assert labels == [flow_labels(capture, Direction.HOST) for capture in reversed(pods)]
    assert [checksum_errors(place) for place in places] == errors


def flow_labels(capture: Capture, direction: Direction) -> set[int]:
    frames = capture.packets(lambda frame: frame.direction is direction)
    packets = [packet for frame in frames if (packet := ip_of(frame.data))]
    return {packet.label for packet in packets if packet.version == 6 and not packet.background}


# --------------------------------------------------------------------------------------------- fast


def test_pings_are_fast(nodes: Nodes, variant: Variant, inner: int, offload: bool) -> None:
    """Echo requests from either side, answered by the other side's kernel."""
    room = variant.mtu - HEADERS[inner] - 8
    for near, far in (nodes, nodes[::-1]):
        with watched(nodes, variant, offload):
            meters = near.meter(), far.meter()
            answers = [ping(near.pod, far.pod.ip(inner), ROUNDS, size=n) for n in (0, 57, room)]
        assert [answer.lost for answer in answers] == [0, 0, 0]
        assert {ttl for answer in answers for ttl in answer.ttls} == {HOPS_LEFT}
        for meter in meters:
            moved = meter.moved()
            # Each ping is a flow of its own and teaches before it is fast.
            assert moved[OUT] > 3 * (ROUNDS - 5)
            assert moved[IN] > 3 * (ROUNDS - 5)


Exchange = Callable[[bytes], object]


@contextlib.contextmanager
def datagrams(
    near: Pod, far: Pod, inner: int
) -> Iterator[tuple[Exchange, socket.socket, socket.socket]]:
    """A UDP flow: a function that sends a payload there and back, and both sockets."""
    with sockets.udp(near, version=inner) as here, sockets.udp(far, version=inner) as there:
        here.connect((str(far.ip(inner)), there.getsockname()[1]))
        there.connect((str(near.ip(inner)), here.getsockname()[1]))

        def exchange(data: bytes) -> None:
            for sender, receiver in ((here, there), (there, here)):
                sender.send(data)
                assert receiver.recv(1 << 16) == data

        yield exchange, here, there


@contextlib.contextmanager
def connected(near: Pod, far: Pod, inner: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection, of which nothing was lost at the end."""
    ends = sockets.connection(near, far, far.ip(inner))
    with ends[0], ends[1]:
        yield ends
        assert_nothing_lost(*ends)


def test_a_udp_flow_is_fast(nodes: Nodes, variant: Variant, inner: int, offload: bool) -> None:
    payloads = [os.urandom(size) for size in SIZES for _ in range(5)]
    count = len(payloads)
    with datagrams(nodes[0].pod, nodes[1].pod, inner) as (exchange, _, _):
        warm(nodes, lambda: exchange(b"warm"))
        with watched(nodes, variant, offload) as arrived:
            meters = [node.meter() for node in nodes]
            for payload in payloads:
                exchange(payload)
            assert [meter.moved() for meter in meters] == [{OUT: count, IN: count}] * 2
    for packets in arrived:
        assert [packet.data for packet in packets] == payloads


def test_a_tcp_connection_is_fast(
    nodes: Nodes, variant: Variant, inner: int, offload: bool
) -> None:
    payloads = [os.urandom(size) for size in SIZES for _ in range(5)]
    with connected(nodes[0].pod, nodes[1].pod, inner) as (near, far):
        warm(nodes, lambda: sockets.exchange(near, far))
        with watched(nodes, variant, offload) as arrived:
            meters = [node.meter() for node in nodes]
            for payload in payloads:
                sockets.exchange(near, far, payload)
            for meter in meters:
                moved = meter.moved()
                assert moved.keys() == FAST
                assert min(moved.values()) >= len(payloads)
    for packets in arrived:
        assert b"".join(packet.data for packet in packets) == b"".join(payloads)


def test_large_writes_arrive_whole(
    nodes: Nodes, variant: Variant, inner: int, offload: bool
) -> None:
    """As segments larger than any MTU; fast, unless the outer checksum of each has to be made."""
    with connected(nodes[0].pod, nodes[1].pod, inner) as (near, far):
        warm(nodes, lambda: sockets.exchange(near, far))
        with watched(nodes, variant, offload):
            meters = [node.meter() for node in nodes]
            for _ in range(3):
                sockets.exchange(near, far, os.urandom(WRITE))
            for meter in meters:
                moved = meter.moved()
                assert (moved.keys() == FAST) == variant.segments
                assert ("base_path.checksum" in moved) == (not variant.segments)
        warm(nodes, lambda: sockets.exchange(near, far))


def test_the_outer_port_of_a_flow_stays(nodes: Nodes, inner: int) -> None:
    """The fast path chooses the source port that the tunnel device chose: no flow changes lanes."""
    near, far = (node.pod for node in nodes)
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(Capture(n.host, n.host.uplink)) for n in nodes]
        ends = stack.enter_context(connected(near, far, inner))
        exchange, _, _ = stack.enter_context(datagrams(near, far, inner))
        ping(near, far.ip(inner), ROUNDS)
        warm(nodes, lambda: exchange(b"warm"))
        warm(nodes, lambda: sockets.exchange(*ends))
        for capture in wires:
            ports = outer_ports(capture)
            assert {key[1] for key in ports} == TRANSPORTS[inner]
            assert {key: len(found) for key, found in ports.items()} == dict.fromkeys(ports, 1)


def outer_ports(capture: Capture) -> dict[tuple[bytes, int, bytes], set[bytes]]:
    """By flow (addresses, protocol, ports or echo number), the source ports on the wire."""
    found: dict[tuple[bytes, int, bytes], set[bytes]] = {}
    for frame in capture.packets(lambda frame: frame.direction is Direction.OUTGOING):
        outer = ip_of(frame.data)
        if outer is None or outer.protocol != socket.IPPROTO_UDP or outer.port != TUNNEL_PORT:
            continue
        packet = ip_of(outer.payload[16:])
        if packet is not None and not packet.background:
            icmp = packet.protocol in (socket.IPPROTO_ICMP, socket.IPPROTO_ICMPV6)
            own = packet.payload[4:6] if icmp else packet.payload[:4]
            found.setdefault((packet.ends, packet.protocol, own), set()).add(outer.payload[:2])
    return found


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


# -------------------------------------------------------------------------------------------- sizes


@contextlib.contextmanager
def larger(*pods: Pod) -> Iterator[None]:
    """Pods whose devices take more than the tunnel does, as a careless CNI makes them."""
    ends = [
        (place, device) for p in pods for place, device in ((p, p.device), (p.host, p.host_device))
    ]

    def set_mtu(mtu: int) -> None:
        for place, device in ends:
            place.netlink.link("set", index=place.index(device), mtu=mtu)

    before = pods[0].netlink.link("get", ifname=pods[0].device)[0].get("mtu")
    set_mtu(1500)
    try:
        yield
    finally:
        set_mtu(before)


def complaint(pod: Pod, inner: int, send: Callable[[], object]) -> tuple[bytes, bytes, int, int]:
    """The "too big" that a pod gets for what it sends: type and MTU, who says so, TTL, size."""
    kinds = {4: b"\x03\x04", 6: b"\x02\x00"}

    def told(frame: Frame) -> bool:
        packet = ip_of(frame.data) if frame.direction is Direction.HOST else None
        return packet is not None and packet.payload[:2] == kinds[inner]

    with Capture(pod, pod.device) as capture:
        send()
        (frame,) = capture.wait(1, SECONDS, told)
    packet = ip_of(frame.data)
    assert packet is not None
    assert packet.transport_sum == 0
    icmp = packet.payload
    return icmp[:2] + icmp[4:8], packet.ends[: len(packet.ends) // 2], packet.hops, len(icmp)


def test_too_big_is_answered_as_on_the_base_path(
    nodes: Nodes, variant: Variant, inner: int
) -> None:
    """1,500 bytes that may not be fragmented, sent whatever the pod knows of the path."""
    near, far = (node.pod for node in nodes)
    level, option, probe = {
        4: (socket.IPPROTO_IP, 10, 3),  # IP_MTU_DISCOVER, IP_PMTUDISC_PROBE
        6: (socket.IPPROTO_IPV6, 23, 3),  # IPV6_MTU_DISCOVER, IPV6_PMTUDISC_PROBE
    }[inner]
    data = bytes(1500 - HEADERS[inner] - 8)

    def told(here: socket.socket) -> tuple[bytes, bytes, int, int]:
        here.setsockopt(level, option, probe)
        said = complaint(near, inner, lambda: here.send(data))
        assert here.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.EMSGSIZE
        return said

    with larger(near):
        with datagrams(near, far, inner) as (_, here, _):
            cold = told(here)
        with datagrams(near, far, inner) as (exchange, here, _):
            meter = nodes[0].meter()

            def refused() -> bool:
                # Not at once: the agent is still to hear of the pod's new MTU.
                warm(nodes, lambda: exchange(b"warm"))
                assert told(here) == cold
                return "base_path.size" in meter.moved()

            until(refused, SECONDS, "a packet that is too big for its fast flow")
            warm(nodes, lambda: exchange(b"warm"))
    assert int.from_bytes(cold[0][2:]) == variant.mtu


def test_tcp_finds_the_size_of_the_path(nodes: Nodes, inner: int) -> None:
    near, far = (node.pod for node in nodes)
    with larger(near, far):
        here, there = sockets.connection(near, far, far.ip(inner))
        warm(nodes, lambda: sockets.exchange(here, there))
        sockets.exchange(here, there, os.urandom(WRITE))
        for end in (here, there):
            end.close()


# ---------------------------------------------------------------------------- what IPv6 alone has

PADDING = b"\x01\x04\0\0\0\0"
ROUTING = b"\x04\0\0\0\0\0"  # none left
EXTENSIONS = {"hop-by-hop": (0, PADDING), "destination": (60, PADDING), "routing": (43, ROUTING)}


def extended(packet: Seen, number: int, content: bytes) -> bytes:
    """The UDP packet with its checksum finished and 8 bytes of extension header before it."""
    bare = replace(packet, payload=packet.payload[:6] + b"\0\0" + packet.payload[8:])
    udp = bare.payload[:6] + bare.transport_sum.to_bytes(2) + bare.payload[8:]
    length = (len(udp) + 8).to_bytes(2)
    header = packet.header[:4] + length + bytes((number,)) + packet.header[7:]
    return header + bytes((packet.protocol, 0)) + content + udp


@pytest.mark.parametrize("kind", EXTENSIONS)
def test_extension_headers_arrive_unchanged(nodes: Nodes, kind: str) -> None:
    """On a flow that is fast without them, and stays so."""
    number, content = EXTENSIONS[kind]
    near, far = (node.pod for node in nodes)
    with datagrams(near, far, 6) as (exchange, _, there):
        warm(nodes, lambda: exchange(b"warm"))
        with Capture(near, near.device) as capture:
            exchange(b"to be extended")
            (frame,) = capture.packets(lambda frame: is_udp6(frame, Direction.OUTGOING))
        packet = ip_of(frame.data)
        assert packet is not None
        sent = extended(packet, number, content)
        meters = [Meter(node.plane) for node in nodes]
        with Capture(far, far.device) as capture:
            inject(near, near.device, frame.data[:14] + sent)
            (frame,) = capture.wait(1, SECONDS, lambda frame: sent[8:] == frame.data[22:])
        assert frame.data[14:21] == sent[:7]
        assert frame.data[21] == HOPS_LEFT
        for meter in meters:
            moved = meter.moved()
            assert moved["base_path.ip_options"] >= 1
            assert not FAST & moved.keys()
        there.settimeout(0.1)
        with contextlib.suppress(TimeoutError):
            there.recv(100)
        there.settimeout(SECONDS)
        warm(nodes, lambda: exchange(b"fast again"))


def is_udp6(frame: Frame, direction: Direction) -> bool:
    packet = ip_of(frame.data) if frame.direction is direction else None
    return packet is not None and (packet.version, packet.protocol) == (6, socket.IPPROTO_UDP)


def test_fragments_arrive_whole(nodes: Nodes, inner: int) -> None:
    """Datagrams of any size on a warm flow, small ones among them."""
    with datagrams(nodes[0].pod, nodes[1].pod, inner) as (exchange, _, _):
        warm(nodes, lambda: exchange(b"warm"))
        meters = [node.meter() for node in nodes]
        for size in (1401, 1453, 3000, 20, 9000, 65_000, 1):
            exchange(os.urandom(size))
        assert all(meter.moved()["base_path.fragment"] > 50 for meter in meters)
        warm(nodes, lambda: exchange(b"fast again"))


@contextlib.contextmanager
def slow_tunnel(node: Node) -> Iterator[None]:
    """A queue for what leaves by the tunnel device: the base path takes its time."""
    index = node.host.index(node.host.tunnel)
    node.host.netlink.tc("add", "tbf", index=index, rate="60mbit", burst=4000, limit=64 << 20)
    try:
        yield
    finally:
        node.host.netlink.tc("del", index=index, parent=TC_H_ROOT)


def test_fragments_are_not_overtaken(nodes: Nodes, inner: int) -> None:
    """A large datagram and a small one right behind it, which alone would be fast."""
    large, small = bytes(6000), b"small"
    with (
        slow_tunnel(nodes[0]),
        datagrams(nodes[0].pod, nodes[1].pod, inner) as (exchange, here, there),
    ):
        for _ in range(10):
            warm(nodes, lambda: exchange(b"warm"))
            here.send(large)
            here.send(small)
            assert [len(there.recv(1 << 16)) for _ in range(2)] == [len(large), len(small)]


def forget_neighbours(place: Namespace, device: str) -> None:
    """What was learned, not what is configured."""
    place.command(["ip", "-6", "neigh", "flush", "dev", device])


def test_neighbour_discovery_is_undisturbed(nodes: Nodes) -> None:
    """A pod and a host that have forgotten each other, in the middle of a flow."""
    one, other = nodes
    with datagrams(one.pod, other.pod, 6) as (exchange, _, _):
        warm(nodes, lambda: exchange(b"warm"))
        for node in nodes:
            meter = Meter(node.plane)
            forget_neighbours(node.pod, node.pod.device)
            exchange(b"who is my gateway?")
            assert meter.moved()["base_path.icmp_type"] >= 1
            for _, device in node.host.run(socket.if_nameindex):
                forget_neighbours(node.host, device)
            exchange(b"who is my pod?")
        warm(nodes, lambda: exchange(b"fast again"))


def test_multicast_listeners_are_heard(nodes: Nodes, variant: Variant) -> None:
    """A pod's report of what it listens to (hop-by-hop header, router alert) reaches the bridge."""
    host, pod = nodes[0].host, nodes[0].pod
    group = IPv6Address("ff05::1:3")
    meter = Meter(nodes[0].plane)
    with sockets.udp(pod, version=6) as member:
        membership = group.packed + struct.pack("=I", pod.index(pod.device))
        member.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, membership)
        until(lambda: meter.moved().get("base_path.ip_options"), SECONDS, "the report")
        if variant.shape is Shape.BRIDGE:
            until(
                lambda: str(group) in host.command(["bridge", "mdb", "show"]).stdout,
                SECONDS,
                "the bridge to know the group",
            )


def test_a_pod_with_ipv6_alone(nodes: Nodes) -> None:
    near, far = nodes
    pod = near.host.pod("six")
    index = pod.index(pod.device)
    pod.netlink.addr(
        "del", index=index, address=str(pod.address), prefixlen=_prefix(pod, str(pod.address))
    )
    assert pod.address6 is not None

    def known() -> bool:
        return (pod.address6,) in [entry.addresses for entry in near.plane.pods().values()]

    until(known, SECONDS, "the pod to be known by its one address")
    with datagrams(pod, far.pod, 6) as (exchange, _, _):
        warm(nodes, lambda: exchange(b"warm"))
    with datagrams(far.pod, pod, 6) as (exchange, _, _):
        warm(nodes, lambda: exchange(b"warm"))
    pod.delete()


def _prefix(pod: Pod, address: str) -> int:
    (found,) = pod.netlink.get_addr(address=address)
    return int(found["prefixlen"])


# ------------------------------------------------------------------------------- an agent that goes


def test_agents_are_killed_started_and_detached() -> None:
    """Under traffic: fast until the deadline, base path, fast again, and in the end as before."""
    with built(SIX_IN_SIX) as hosts:
        before = [dump(host) for host in hosts]
        with accelerated(hosts, deadline_seconds=1.0, lease_seconds=LONG_LEASE) as nodes:
            near, far = (node.pod for node in nodes)
            with (
                connected(near, far, 6) as ends,
                connected(near, far, 6) as other_ends,
                numbered(near, far, version=6) as flow,
            ):
                killed_and_started(nodes, lambda: sockets.exchange(*ends, bytes(1000)))
                talk = Talk(*other_ends, size=60_000)
                by_command(nodes[0])
                by_command_after_its_death(nodes[1])
                talk.stop()
                assert [dump(host) for host in hosts] == before
                sockets.exchange(*ends, os.urandom(WRITE))
            flow.assert_whole()
        assert [invalid(host, "ip6") for host in hosts] == [0, 0]


def killed_and_started(nodes: Nodes, exchange: Callable[[], object]) -> None:
    def meanwhile(question: Callable[[Node], bool], what: str) -> None:
        def answer() -> bool:
            exchange()
            return all(question(node) for node in nodes)

        until(answer, SECONDS, what)

    meanwhile(fast_again, "fast")
    before = [links(node) for node in nodes]
    for node in nodes:
        node.agent.kill()
    assert all(fast_again(node) for node in nodes)
    meanwhile(no_longer_fast, "the dead-man switch")
    for node in nodes:
        node.agent.start()
    meanwhile(fast_again, "fast again")
    assert [links(node) for node in nodes] == before
