# SPDX-License-Identifier: Apache-2.0
"""Frames that a test run cannot make, on real devices: counted, left alone, and nothing breaks.

The kernel makes no test packet of less than an Ethernet and an IP header, and none with a VLAN tag;
devices hand both over.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from scapy.layers.inet import UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether
from scapy.packet import Raw

from netns_tests.lab import Capture, Direction, Lab, Namespace, inject, sockets, until
from netns_tests.nodes import IN, LONG_LEASE, OUT, SECONDS, Node, Nodes, accelerated, flat, warm

ETHER = 14
PAYLOAD = b"sixteen letters."


class Flow:
    """A datagram flow between the pods of two nodes, warm at first."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self._near, self._far = (sockets.udp(node.pod) for node in nodes)
        self._near.connect((str(nodes[1].pod.address), self._far.getsockname()[1]))
        self.warm()

    def exchange(self) -> None:
        self._near.send(PAYLOAD)
        _, sender = self._far.recvfrom(100)
        self._far.sendto(PAYLOAD, sender)
        self._near.recv(100)

    def warm(self) -> None:
        warm(self.nodes, self.exchange)

    def frame(self, where: Namespace, device: str, direction: Direction) -> bytes:
        """A frame of this flow as it passes a device."""
        with Capture(where, device) as capture:
            self.exchange()
            seen = capture.wait(
                match=lambda frame: frame.direction is direction and PAYLOAD in frame.data
            )
        return seen[0].data


@pytest.fixture(scope="module")
def flow() -> Iterator[Flow]:
    with Lab() as lab, accelerated(lab.pair(), lease_seconds=LONG_LEASE) as nodes:
        yield Flow(nodes)


def _prefixes(frame: bytes) -> list[bytes]:
    return [frame[:length] for length in range(ETHER, len(frame))]


def _counted(node: Node) -> dict[str, int]:
    """What the first hooks have counted."""
    groups = ("hits.", "base_path.", "dropped.")
    counters = flat(node.plane.counters())
    return {name: count for name, count in counters.items() if name.startswith(groups)}


def _assert_left_alone(
    node: Node, where: Namespace, device: str, frames: list[bytes], reasons: set[str]
) -> None:
    """Each frame moves one of `reasons` on the node; none is fast and none is dropped."""
    before = _counted(node)

    def moved() -> dict[str, int]:
        now = _counted(node)
        return {name: now[name] - before[name] for name in now if now[name] != before[name]}

    def all_counted() -> bool:
        return sum(moved().get(f"base_path.{name}", 0) for name in reasons) >= len(frames)

    inject(where, device, *frames)
    until(all_counted, SECONDS, f"{len(frames)} frames counted as {reasons}")
    assert not moved().keys() & {IN, OUT, "dropped.unfinished"}


def test_prefixes_of_what_a_pod_sends(flow: Flow) -> None:
    near, pod = flow.nodes[0], flow.nodes[0].pod
    frame = flow.frame(pod, pod.device, Direction.OUTGOING)
    _assert_left_alone(near, pod, pod.device, _prefixes(frame), {"truncated"})
    flow.warm()


def test_prefixes_of_ipv6_that_a_pod_sends(flow: Flow) -> None:
    near, pod = flow.nodes[0], flow.nodes[0].pod
    ether = Ether(flow.frame(pod, pod.device, Direction.OUTGOING))
    frame = Ether(src=ether.src, dst=ether.dst) / IPv6() / UDP() / Raw(PAYLOAD)
    _assert_left_alone(near, pod, pod.device, _prefixes(bytes(frame)), {"truncated"})
    flow.warm()


def test_prefixes_of_what_arrives_by_the_tunnel(flow: Flow) -> None:
    near, far = flow.nodes
    frame = flow.frame(far.host, far.host.uplink, Direction.HOST)
    reasons = {"truncated", "not_tunnel"}
    _assert_left_alone(far, near.host, near.host.uplink, _prefixes(frame), reasons)
    flow.warm()


@pytest.mark.parametrize("hook", ["from_pod", "from_wire"])
def test_a_vlan_tag_keeps_a_frame_on_the_base_path(flow: Flow, hook: str) -> None:
    """The kernel takes the tag out of the frame, which then looks like any other of its flow."""
    near, far = flow.nodes
    if hook == "from_pod":
        frame = flow.frame(near.pod, near.pod.device, Direction.OUTGOING)
        _assert_left_alone(near, near.pod, near.pod.device, [tagged(frame)], {"vlan"})
    else:
        frame = flow.frame(far.host, far.host.uplink, Direction.HOST)
        _assert_left_alone(far, near.host, near.host.uplink, [tagged(frame)], {"vlan"})
    flow.warm()


def tagged(frame: bytes) -> bytes:
    return frame[:12] + bytes.fromhex("81000005") + frame[12:]
