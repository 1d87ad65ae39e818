# SPDX-License-Identifier: Apache-2.0
"""Real traffic between pods of two hosts with running agents: fast, and as the base path had it.

Fast is what the counters of both hosts say; right is what arrives.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.l2 import Ether

from netns_tests.lab import (
    Capture,
    Direction,
    Frame,
    Host,
    Lab,
    Offload,
    Pod,
    Shape,
    ping,
    processes,
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
from oncache.core import attach, libbpf

HOPS_LEFT = 62  # of a TTL of 64: one hop on each host
DENIED = 8081
ROUNDS = 30
SIZES = (1, 2, 17, 512, 1398)  # of a payload; the last one fills the tunnel's MTU with TCP options


@dataclass(frozen=True)
class Variant:
    """A cluster: how pods hang on their hosts, kube-proxy's rules or none, offloads or none."""

    shape: Shape
    policy: bool
    offload: bool

    def __str__(self) -> str:
        policy = "policy" if self.policy else "no-policy"
        return f"{self.shape}-{policy}-tx-{'on' if self.offload else 'off'}"


VARIANTS = [
    Variant(Shape.BRIDGE, policy=True, offload=True),
    Variant(Shape.BRIDGE, policy=False, offload=False),
    Variant(Shape.ROUTED, policy=True, offload=False),
    Variant(Shape.ROUTED, policy=False, offload=True),
]


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def variant(request: pytest.FixtureRequest) -> Variant:
    chosen: Variant = request.param
    return chosen


@pytest.fixture(scope="module")
def nodes(variant: Variant) -> Iterator[Nodes]:
    with Lab() as lab:
        hosts = lab.pair(shape=variant.shape)
        for host in hosts:
            if variant.policy:
                services.policy(host, deny=(DENIED,))
            if not variant.offload:
                set_offload(host, host.uplink, Offload.TX, False)
        with accelerated(hosts, lease_seconds=LONG_LEASE) as running:
            yield running


# ------------------------------------------------------------------------------------- what arrived


def received(capture: Capture) -> list[Frame]:
    return capture.packets(lambda frame: frame.direction is Direction.HOST)


def assert_sound(frames: list[Frame], pod: Pod, *, finished: bool) -> list[IP]:
    """Frames as the base path delivers them; their IP packets. `finished`: no device was left to
    complete a checksum."""
    packets = []
    for frame in frames:
        ether = Ether(frame.data)
        assert ether.dst == pod.mac
        if IP not in ether:
            continue
        packet = ether[IP]
        assert packet.ttl == HOPS_LEFT
        assert len(packet) == packet.len == len(frame.data) - 14
        assert sockets.checksum(bytes(packet)[:20]) == 0
        assert frame.checksum_ready or not finished
        if frame.checksum_ready:
            assert transport_sum(packet) == 0
        packets.append(packet)
    return packets


def transport_sum(packet: IP) -> int:
    """0 if the TCP, UDP or ICMP checksum of a whole packet is right, or absent as UDP's may be."""
    payload = bytes(packet)[packet.ihl * 4 :]
    if packet.proto == socket.IPPROTO_ICMP:
        return sockets.checksum(payload)
    if packet.proto == socket.IPPROTO_UDP and payload[6:8] == b"\0\0":
        return 0
    ends = socket.inet_aton(packet.src) + socket.inet_aton(packet.dst)
    return sockets.checksum(ends + struct.pack("!HH", packet.proto, len(payload)) + payload)


@contextlib.contextmanager
def watched(nodes: Nodes, *, finished: bool) -> Iterator[tuple[list[IP], list[IP]]]:
    """What each pod receives in the block, checked at its end."""
    seen: tuple[list[IP], list[IP]] = ([], [])
    with contextlib.ExitStack() as stack:
        captures = [stack.enter_context(Capture(n.pod, n.pod.device)) for n in nodes]
        yield seen
        for node, capture, packets in zip(nodes, captures, seen, strict=True):
            packets.extend(assert_sound(received(capture), node.pod, finished=finished))


# --------------------------------------------------------------------------------------------- fast


def test_pings_are_fast(nodes: Nodes, variant: Variant) -> None:
    """Echo requests from either side, answered by the other side's kernel."""
    for near, far in (nodes, nodes[::-1]):
        with watched(nodes, finished=not variant.offload) as arrived:
            meters = near.meter(), far.meter()
            answers = [ping(near.pod, far.pod.address, ROUNDS, size=n) for n in (8, 56, 1422)]
        assert [answer.lost for answer in answers] == [0, 0, 0]
        assert {ttl for answer in answers for ttl in answer.ttls} == {HOPS_LEFT}
        for meter in meters:
            moved = meter.moved()
            # Each ping is a flow of its own and teaches before it is fast.
            assert moved[OUT] > 3 * (ROUNDS - 5)
            assert moved[IN] > 3 * (ROUNDS - 5)
        assert sorted({p.len for packets in arrived for p in packets}) == [36, 84, 1450]


def datagrams(near: Pod, far: Pod, port: int = 0) -> tuple[Callable[..., None], Callable[[], None]]:
    """A UDP flow: a function that sends a payload there and back, and one that ends the flow."""
    here, there = sockets.udp(near), sockets.udp(far, port)
    here.connect((str(far.address), there.getsockname()[1]))
    there.connect((str(near.address), here.getsockname()[1]))

    def exchange(data: bytes = b"x") -> None:
        for sender, receiver in ((here, there), (there, here)):
            sender.send(data)
            assert receiver.recv(1 << 16) == data

    def end() -> None:
        here.close()
        there.close()

    return exchange, end


def test_a_udp_flow_is_fast(nodes: Nodes, variant: Variant) -> None:
    exchange, end = datagrams(nodes[0].pod, nodes[1].pod)
    warm(nodes, lambda: exchange(b"warm"))
    payloads = [os.urandom(size) for size in (*SIZES, 1422) for _ in range(5)]
    with watched(nodes, finished=not variant.offload) as arrived:
        meters = [node.meter() for node in nodes]
        for payload in payloads:
            exchange(payload)
        assert [meter.moved() for meter in meters] == [{OUT: 30, IN: 30}] * 2
    for packets in arrived:
        assert [bytes(packet[UDP].payload) for packet in packets] == payloads
    end()


def test_a_tcp_connection_is_fast(nodes: Nodes, variant: Variant) -> None:
    near, far = sockets.connection(nodes[0].pod, nodes[1].pod, nodes[1].pod.address)
    warm(nodes, lambda: sockets.exchange(near, far))
    payloads = [os.urandom(size) for size in SIZES for _ in range(6)]
    with watched(nodes, finished=not variant.offload) as arrived:
        meters = [node.meter() for node in nodes]
        for payload in payloads:
            sockets.exchange(near, far, payload)
        for meter in meters:
            moved = meter.moved()
            assert moved.keys() == FAST
            assert min(moved.values()) >= len(payloads)
    for packets in arrived:
        data = b"".join(bytes(packet[TCP].payload) for packet in packets)
        assert data == b"".join(payloads)
    assert_nothing_lost(near, far)
    near.close()
    far.close()


def test_bulk_is_fast_and_whole(nodes: Nodes) -> None:
    """Writes of 64 kB, that travel as segments larger than any MTU where devices allow it."""
    near, far = sockets.connection(nodes[0].pod, nodes[1].pod, nodes[1].pod.address)
    warm(nodes, lambda: sockets.exchange(near, far))
    meters = [node.meter() for node in nodes]
    for _ in range(8):
        sockets.exchange(near, far, os.urandom(1 << 16))
    assert [meter.moved().keys() for meter in meters] == [FAST, FAST]
    assert_nothing_lost(near, far)
    near.close()
    far.close()


def test_the_end_of_a_connection_takes_the_base_path(nodes: Nodes) -> None:
    near, far = sockets.connection(nodes[0].pod, nodes[1].pod, nodes[1].pod.address)
    warm(nodes, lambda: sockets.exchange(near, far))
    near.shutdown(socket.SHUT_WR)
    assert far.recv(1) == b""
    meters = [node.meter() for node in nodes]
    for number in range(10):
        far.sendall(bytes([number]))
        assert near.recv(1) == bytes([number])
    moved = [meter.moved() for meter in meters]
    assert not any(FAST & counters.keys() for counters in moved)
    assert all(counters["base_path.closed"] >= 10 for counters in moved)
    far.close()
    near.close()


def test_a_denied_port_is_never_fast(nodes: Nodes, variant: Variant) -> None:
    near, far = (node.pod for node in nodes)
    if not variant.policy:
        exchange, end = datagrams(near, far, DENIED)
        warm(nodes, exchange)
        end()
        return
    exchange, end = datagrams(near, far)
    warm(nodes, exchange)
    with sockets.udp(far, DENIED), sockets.listener(far, DENIED), sockets.udp(near) as s:
        meters = [node.meter() for node in nodes]
        with Capture(far, far.device) as capture:
            for number in range(20):
                s.sendto(bytes([number]), (str(far.address), DENIED))
            refused = near.socket(socket.AF_INET, socket.SOCK_STREAM)
            refused.settimeout(0.2)
            with pytest.raises(TimeoutError):
                refused.connect((str(far.address), DENIED))
            refused.close()
            moved = [meter.moved() for meter in meters]
            assert not any(FAST & counters.keys() for counters in moved)
            exchange()
            ports = {Ether(frame.data)[UDP].dport for frame in received(capture)}
        assert DENIED not in ports
    end()


# ----------------------------------------------------------------------------------- and conntrack


def invalid(host: Host, family: str = "ip") -> int:
    """Packets that the policy dropped as INVALID."""
    rules = json.loads(host.command(["nft", "-j", "list", "table", family, "lab_policy"]).stdout)
    first = next(each["rule"] for each in rules["nftables"] if "rule" in each)
    return sum(e["counter"]["packets"] for e in first["expr"] if "counter" in e)


@pytest.mark.parametrize("way", ["evicted", "flushed"])
def test_a_warm_connection_outlives_its_entry(nodes: Nodes, variant: Variant, way: str) -> None:
    """Back on the base path after megabytes that conntrack never saw, it is not INVALID."""
    near, far = sockets.connection(nodes[0].pod, nodes[1].pod, nodes[1].pod.address)
    warm(nodes, lambda: sockets.exchange(near, far))
    for _ in range(32):
        sockets.exchange(near, far, bytes(1 << 16))
    for node in nodes:
        if way == "evicted":
            assert node.evict() > 0
        else:
            oncache(node, "flush")
    meters = [node.meter() for node in nodes]
    sockets.exchange(near, far)
    assert all(meter.moved().keys() - FAST for meter in meters)
    warm(nodes, lambda: sockets.exchange(near, far))
    assert_nothing_lost(near, far)
    if variant.policy:
        assert [invalid(node.host) for node in nodes] == [0, 0]
    near.close()
    far.close()


def assert_nothing_lost(*ends: socket.socket) -> None:
    """Every segment that an end sent again had arrived the first time, and none out of turn.

    A sender on a busy machine may probe too early (RFC 8985, 7); the receiver reports such a
    segment as a duplicate. Offsets are those of struct tcp_info (linux/tcp.h).
    """

    def lost(end: socket.socket) -> tuple[int, int]:
        info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 224)
        sent_again, duplicates, out_of_turn = (
            struct.unpack_from("=I", info, at)[0] for at in (100, 216, 220)
        )
        return sent_again - duplicates, out_of_turn

    until(lambda: all(lost(end) == (0, 0) for end in ends), 1.0, "no segment was lost")


def oncache(node: Node, *arguments: str) -> None:
    command = processes.python("oncache.cli", *arguments, "-c", str(node.agent.config_path))
    node.host.command(command)


# ---------------------------------------------------------------------------- an agent that is gone


def fast_again(node: Node) -> bool:
    """Both directions hit on this node within a moment, and nothing misses."""
    meter = node.meter()
    until(lambda: sum(meter.moved().values()) > 20, SECONDS, "traffic")
    return meter.moved().keys() == FAST


def no_longer_fast(node: Node) -> bool:
    meter = node.meter()
    until(lambda: sum(meter.moved().values()) > 20, SECONDS, "traffic")
    return meter.moved().keys() == {"base_path.deadline"}


def links(node: Node) -> set[int]:
    """The identities of the tcx links on a host's devices; a link that is replaced is another."""
    kinds = (libbpf.AttachType.TCX_INGRESS, libbpf.AttachType.TCX_EGRESS)
    devices = node.host.run(socket.if_nameindex)
    return {
        link
        for index, _ in devices
        for kind in kinds
        for _, link in node.host.run(libbpf.tcx_query, index, kind)
    }


@pytest.mark.parametrize("shape", list(Shape))
def test_a_killed_agent_loses_no_packet(hosts: tuple[Host, Host]) -> None:
    """SIGKILL under traffic: fast until the deadline, then base path, then the next agent."""
    for host in hosts:
        services.policy(host)
    with accelerated(hosts, deadline_seconds=1.0, lease_seconds=LONG_LEASE) as nodes:
        near, far = (node.pod for node in nodes)
        here, there = sockets.connection(near, far, far.address)
        with numbered(near, far) as flow:

            def meanwhile(question: Callable[[Node], bool], what: str) -> None:
                def answer() -> bool:
                    sockets.exchange(here, there, bytes(1000))
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
        flow.assert_whole()
        assert_nothing_lost(here, there)
        assert [invalid(host) for host in hosts] == [0, 0]


# -------------------------------------------------------------------------------------------- leave


VOLATILE = ("nf_conntrack_count",)


def settings() -> dict[str, str]:
    """Every network sysctl of the calling thread's namespace that can be read."""
    found = {}
    for path in Path("/proc/sys/net").rglob("*"):
        if path.is_file() and path.name not in VOLATILE:
            with contextlib.suppress(OSError):
                found[str(path)] = path.read_text()
    return found


def chains() -> dict[str, list[str]]:
    """The programs on every device of the calling thread's namespace, by device and direction."""
    return {
        f"{name} {direction}": [program.name for program in attach.attached(index, direction)]
        for index, name in socket.if_nameindex()
        for direction in attach.Direction
    }


def dump(host: Host) -> dict[str, Any]:
    """Everything an agent could leave behind on a host."""

    def said(*command: str) -> str:
        return host.command(command).stdout

    return {
        "links": said("ip", "link", "show"),
        "addresses": [line for line in said("ip", "addr", "show").splitlines() if "inet" in line],
        "qdiscs": said("tc", "qdisc", "show"),
        "programs": host.run(chains),
        "settings": host.run(settings),
        "rules": said("nft", "--stateless", "list", "ruleset"),
        "routes": said("ip", "route", "show", "table", "all"),
        "routing rules": said("ip", "rule", "show"),
        "pins": sorted(str(path) for path in host.bpf_dir.parent.rglob(f"{host.label}*")),
    }


def by_command(node: Node) -> None:
    oncache(node, "detach")
    assert node.agent.stop() == 0


def by_its_end(node: Node) -> None:
    assert node.agent.stop() == 0


def by_command_after_its_death(node: Node) -> None:
    node.agent.kill()
    oncache(node, "detach")


class Talk:
    """Exchanges over a connection in a thread, from construction to `stop`."""

    def __init__(self, near: socket.socket, far: socket.socket, size: int) -> None:
        self._ends = near, far
        self._data = os.urandom(size)
        self._ended = threading.Event()
        self._failure: list[Exception] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                sockets.exchange(*self._ends, self._data)
        except Exception as error:
            self._failure.append(error)

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()
        assert self._failure == []


@pytest.mark.parametrize(
    ("shape", "leave"),
    [
        (Shape.BRIDGE, by_command),
        (Shape.ROUTED, by_command),
        (Shape.BRIDGE, by_its_end),
        (Shape.ROUTED, by_command_after_its_death),
    ],
)
def test_detach_leaves_connections_and_nothing_else(
    hosts: tuple[Host, Host], leave: Callable[[Node], None]
) -> None:
    for host in hosts:
        services.policy(host)
    exit_option = ("--detach-on-exit",) if leave is by_its_end else ()
    before = [dump(host) for host in hosts]
    with accelerated(hosts, options=exit_option, lease_seconds=LONG_LEASE) as nodes:
        assert [dump(host) for host in hosts] != before
        near, far = (node.pod for node in nodes)
        pairs = [sockets.connection(near, far, far.address) for _ in range(3)]
        for pair in pairs:
            warm(nodes, lambda pair=pair: sockets.exchange(*pair))  # type: ignore[misc]
            for _ in range(16):
                sockets.exchange(*pair, bytes(1 << 16))
        talks = [Talk(*pairs[1], size=100), Talk(*pairs[2], size=60_000)]
        for node in nodes:
            leave(node)
        for talk in talks:
            talk.stop()
        assert [dump(host) for host in hosts] == before
        for pair in pairs:
            for _ in range(16):
                sockets.exchange(*pair, os.urandom(5000))
        assert_nothing_lost(*pairs[0])
        assert [host.sysctl("net.netfilter.nf_conntrack_tcp_be_liberal") for host in hosts] == [
            "0",
            "0",
        ]
        assert [invalid(host) for host in hosts] == [0, 0]
        for near_end, far_end in pairs:
            near_end.shutdown(socket.SHUT_WR)
            assert far_end.recv(1) == b""
            far_end.sendall(b"the end")
            assert near_end.recv(7, socket.MSG_WAITALL) == b"the end"


# ---------------------------------------------------------------------------- pods that come and go


def again(host: Host, label: str, number: int) -> Pod:
    """A pod with a number, and so an address and MAC, that another one had."""
    assert host.overlay is not None
    made = Pod(host, label, number, host.overlay)
    host.pods[label] = made
    return made


@pytest.mark.parametrize("shape", list(Shape))
def test_pods_that_come_and_go_are_followed(hosts: tuple[Host, Host]) -> None:
    one, other = hosts
    with accelerated(hosts, lease_seconds=LONG_LEASE) as nodes:
        old, near = other.pods["p1"], one.pods["p1"]
        number = int(str(old.address).rpartition(".")[2])
        exchange, end = datagrams(near, old)
        warm(nodes, exchange)
        end()
        old.delete(abrupt=True)
        new = again(other, "p2", number)
        assert new.address == old.address
        exchange, end = datagrams(near, new)
        ping(new, near.address, 1)
        warm(nodes, exchange)
        with Capture(new, new.device) as capture:
            exchange(b"for the new one")
            frames = received(capture)
        assert [Ether(frame.data).dst for frame in frames] == [new.mac]
        end()
        late = one.pod("late")
        exchange, end = datagrams(late, new)
        warm(nodes, exchange)
        end()


@pytest.mark.parametrize("shape", list(Shape))
def test_an_old_flow_finds_the_new_owner_of_its_address(hosts: tuple[Host, Host]) -> None:
    """The same five-tuple, kept warm by its sender, while its address gets another pod and MAC."""
    one, other = hosts
    with accelerated(hosts, lease_seconds=LONG_LEASE) as nodes:
        near, old, bystander = one.pods["p1"], other.pods["p1"], other.pod("p3")
        here, there = sockets.udp(near), sockets.udp(old, 7000)
        here.connect((str(old.address), 7000))
        here.settimeout(0.1)

        def exchange(server: socket.socket) -> None:
            server.settimeout(0.1)
            # What is sent before the agent hears of a move finds nobody.
            with contextlib.suppress(OSError):
                here.send(b"?")
                data, peer = server.recvfrom(10)
                server.sendto(data, peer)
                here.recv(10)

        warm(nodes, lambda: exchange(there))
        with Capture(bystander, bystander.device) as capture:
            old.delete()
            new = again(other, "p2", int(str(old.address).rpartition(".")[2]))
            new.command(["ip", "link", "set", new.device, "address", "02:00:00:00:00:77"])
            serving = sockets.udp(new, 7000)
            ping(new, near.address, 1)  # tells the host's neighbour table of the new MAC
            warm(nodes, lambda: exchange(serving))
            assert [f for f in received(capture) if UDP in Ether(f.data)] == []
        with Capture(new, new.device) as capture:
            exchange(serving)
            assert {Ether(frame.data).dst for frame in received(capture)} == {"02:00:00:00:00:77"}
