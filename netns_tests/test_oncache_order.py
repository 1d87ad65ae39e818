# SPDX-License-Identifier: Apache-2.0
"""No packet overtakes another of its flow when the flow turns fast, or back.

All on one CPU: a veth has a queue for each, and packets of one flow that are sent by two CPUs
overtake each other without us, too.

The tunnel device of each host gets a queue (tbf), so that the base path is the slow one: what goes
the fast way too early arrives early.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from netns_tests.lab import Host, Offload, Pod, Shape, set_offload, sockets, until
from netns_tests.nodes import (
    FAST,
    LONG_LEASE,
    SECONDS,
    Meter,
    Node,
    Nodes,
    accelerated,
    numbered,
    warm,
)
from netns_tests.oracle import one_cpu
from oncache.core import control

SIZE = 200
FLOWS = 12
random.seed(7)
# Some pauses let the queue drain, others do not.
BURSTS = [(random.randint(1, 12), random.choice((0.0003, 0.001, 0.006))) for _ in range(200)]
SLOW = "20mbit"
# Half of that, in bursts that keep the queue filled for 2.5 ms of every 5.
FILL = ((4, 0.005),)
FILL_SIZE = 1400


def slow_tunnel(host: Host, rate: str = SLOW) -> None:
    """Queue what leaves by the tunnel device; nothing is dropped."""
    index = host.index(host.tunnel)
    host.netlink.tc("add", "tbf", index=index, rate=rate, burst=2000, limit=64 << 20)


class Fill:
    """Traffic that nobody answers, so that it stays on the base path, in a thread."""

    def __init__(self, near: Pod, far: Pod) -> None:
        self._socket, self._sink = sockets.udp(near), sockets.udp(far)
        self._socket.connect((str(far.address), self._sink.getsockname()[1]))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        for count, pause in itertools.cycle(FILL):
            for _ in range(count):
                self._socket.send(bytes(FILL_SIZE))
            if self._ended.wait(pause):
                return

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


@pytest.fixture
def slow_hosts(hosts: tuple[Host, Host]) -> Iterator[tuple[Host, Host]]:
    """The usual two hosts, each with a busy queue on its tunnel device."""
    for host in hosts:
        slow_tunnel(host)
    with contextlib.ExitStack() as stack:
        with one_cpu():
            for one, other in (hosts, hosts[::-1]):
                stack.enter_context(contextlib.closing(Fill(one.pod("filler"), other.pod("sink"))))
        yield hosts


def assert_turned(meters: list[Meter], *, waited: bool = True) -> None:
    """There were fast packets on both nodes, and base packets, of which some were waited for."""
    moved = [meter.moved() for meter in meters]
    assert all(counters.keys() > FAST for counters in moved)
    assert any("base_path.order" in counters for counters in moved) or not waited


@pytest.mark.parametrize(
    ("shape", "napi"), [(Shape.BRIDGE, True), (Shape.ROUTED, False)], ids=["napi", "backlog"]
)
def test_flows_turn_fast_in_order(slow_hosts: tuple[Host, Host], napi: bool) -> None:
    """`napi`: with GRO on a pod's device has a receive queue of its own."""
    with accelerated(slow_hosts, lease_seconds=LONG_LEASE) as nodes, one_cpu():
        near, far = (node.pod for node in nodes)
        for pod in (near, far):
            set_offload(pod, pod.device, Offload.GRO, napi)
        meters = [node.meter() for node in nodes]
        for turn in range(FLOWS):
            with numbered(near, far, BURSTS[turn:], SIZE) as flow:
                until(lambda flow=flow: len(flow.back) > 100, SECONDS, "traffic")  # type: ignore[misc]
            flow.assert_whole()
        assert_turned(meters)


def test_a_long_queue_is_waited_for(slow_hosts: tuple[Host, Host]) -> None:
    """More packets in the base path than the learning ring has slots."""
    with accelerated(slow_hosts, lease_seconds=LONG_LEASE) as nodes, one_cpu():
        near, far = (node.pod for node in nodes)
        meters = [node.meter() for node in nodes]
        for _ in range(4):
            with numbered(
                near, far, [(1, 0.002), (1, 0.002), (600, 0.02), (1, 0.0002)], SIZE
            ) as flow:
                until(lambda flow=flow: len(flow.back) > 800, SECONDS, "traffic")  # type: ignore[misc]
            flow.assert_whole()
        assert_turned(meters)


def flush(node: Node) -> None:
    control.call(node.agent.run_dir, "flush")


def evict(node: Node) -> None:
    node.evict()


def restart(node: Node) -> None:
    node.agent.kill()
    node.agent.start()


def repeatedly(nodes: Nodes, act: Callable[[Node], None], turns: int) -> None:
    """Act on one node and the other in turn, each time both directions are fast there."""
    for turn in range(turns):
        node = nodes[turn % 2]
        meter = node.meter()
        until(lambda meter=meter: meter.moved().keys() >= FAST, SECONDS, "fast")  # type: ignore[misc]
        act(node)


@pytest.mark.parametrize(("act", "turns"), [(flush, 40), (evict, 40), (restart, 2)])
def test_flows_turn_back_in_order(
    slow_hosts: tuple[Host, Host], act: Callable[[Node], None], turns: int
) -> None:
    with accelerated(slow_hosts, lease_seconds=LONG_LEASE) as nodes, one_cpu():
        near, far = (node.pod for node in nodes)
        meters = [node.meter() for node in nodes]
        with numbered(near, far, BURSTS, SIZE) as flow:
            repeatedly(nodes, act, turns)
        flow.assert_whole()
        assert_turned(meters, waited=turns > 10)


@pytest.mark.parametrize("shape", list(Shape))
def test_leases_are_renewed_in_order(slow_hosts: tuple[Host, Host]) -> None:
    with accelerated(slow_hosts, lease_seconds=0.1) as nodes, one_cpu():
        near, far = (node.pod for node in nodes)
        meters = [node.meter() for node in nodes]
        with numbered(near, far, BURSTS, SIZE) as flow:
            until(
                lambda: all(m.moved().get("base_path.lease", 0) > 20 for m in meters),
                SECONDS,
                "leases",
            )
        flow.assert_whole()
        assert_turned(meters, waited=False)


UDP_SEGMENT = 103  # linux/udp.h
TURNS, BATCH, SEGMENT = 50, 10, 100


def test_a_batch_stays_behind_its_first_packet(hosts: tuple[Host, Host]) -> None:
    """Packets that arrive in one go: the first teaches, after the others have been looked at."""
    set_offload(hosts[0], hosts[0].uplink, Offload.TX, False)  # segments leave one by one, at once
    with accelerated(hosts, lease_seconds=LONG_LEASE) as nodes, one_cpu():
        near, far = (node.pod for node in nodes)
        set_offload(far, far.device, Offload.GRO, True)  # a receive queue of its own
        here, there = sockets.udp(near), sockets.udp(far)
        here.connect((str(far.address), there.getsockname()[1]))
        there.connect((str(near.address), here.getsockname()[1]))
        here.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, SEGMENT)
        batch = b"".join(bytes([number]) * SEGMENT for number in range(BATCH))

        def turn() -> list[int]:
            there.send(b"confirmed")
            here.recv(10)
            here.send(batch)
            return [there.recv(SEGMENT)[0] for _ in range(BATCH)]

        warm(nodes, turn)
        meter = nodes[1].meter()
        for _ in range(TURNS):
            nodes[1].plane.invalidate_all()
            assert turn() == list(range(BATCH))
        assert meter.moved()["base_path.stale"] >= TURNS
