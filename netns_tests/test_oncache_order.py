# SPDX-License-Identifier: Apache-2.0
"""No packet overtakes another of its flow when the flow turns fast, or back.

The tunnel device of each host gets a queue (tbf), so that the base path is the slow one: what goes
the fast way too early arrives early.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
import time
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
from oncache.core import control

SIZE = 200
FLOWS = 20
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
        for one, other in (hosts, hosts[::-1]):
            stack.enter_context(contextlib.closing(Fill(one.pod("filler"), other.pod("sink"))))
        yield hosts


def assert_turned(meters: list[Meter], *, waited: bool = True) -> None:
    """There were fast packets on both nodes, and base packets, of which some were waited for."""
    moved = [meter.moved() for meter in meters]
    assert all(counters.keys() > FAST for counters in moved)
    assert any("base_path.order" in counters for counters in moved) or not waited


@pytest.mark.parametrize("shape", list(Shape))
@pytest.mark.parametrize("napi", [False, True], ids=["backlog", "napi"])
def test_flows_turn_fast_in_order(slow_hosts: tuple[Host, Host], napi: bool) -> None:
    """`napi`: with GRO on a pod's device has a receive queue of its own."""
    with accelerated(slow_hosts, lease_seconds=LONG_LEASE) as nodes:
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
    with accelerated(slow_hosts, lease_seconds=LONG_LEASE) as nodes:
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


def stop_and_start(node: Node) -> None:
    node.agent.stop()
    node.agent.start()


def repeatedly(nodes: Nodes, act: Callable[[Node], None], turns: int) -> None:
    """Act on one node and the other in turn, each time both directions are fast there."""
    for turn in range(turns):
        node = nodes[turn % 2]
        meter = node.meter()
        until(lambda meter=meter: meter.moved().keys() >= FAST, SECONDS, "fast")  # type: ignore[misc]
        act(node)


@pytest.mark.parametrize(
    ("act", "turns"), [(flush, 60), (evict, 60), (restart, 2), (stop_and_start, 2)]
)
def test_flows_turn_back_in_order(
    slow_hosts: tuple[Host, Host], act: Callable[[Node], None], turns: int
) -> None:
    with accelerated(slow_hosts, lease_seconds=LONG_LEASE) as nodes:
        near, far = (node.pod for node in nodes)
        meters = [node.meter() for node in nodes]
        with numbered(near, far, BURSTS, SIZE) as flow:
            repeatedly(nodes, act, turns)
        flow.assert_whole()
        assert_turned(meters, waited=turns > 10)


@pytest.mark.parametrize("shape", list(Shape))
def test_leases_are_renewed_in_order(slow_hosts: tuple[Host, Host]) -> None:
    with accelerated(slow_hosts, lease_seconds=0.1) as nodes:
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


TURNS = 1500
DRAINED = 0.0006  # as long as the queue needs, at most, for what a turn puts there


def test_no_packet_overtakes_on_another_cpu(hosts: tuple[Host, Host]) -> None:
    """One CPU works off the queue while another sends the flow's next packet.

    Packets that leave the queue in one go are behind `to_wire`, but still before the wire.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("this takes two CPUs")
    for host in hosts:
        slow_tunnel(host, "100mbit")
    try:
        with accelerated(hosts, lease_seconds=LONG_LEASE) as nodes:
            near, far = (node.pod for node in nodes)
            race = Race(near, far)
            warm(nodes, race.exchange)
            orders = [race.run(nodes[0], cpus) for _ in range(TURNS)]
    finally:
        os.sched_setaffinity(0, cpus)
    wrong = [order for order in orders if order != sorted(order)]
    assert not wrong, f"in {len(wrong)} of {TURNS} turns: {wrong[:5]}"


class Race:
    """A flow that is made stale with packets in the queue, and goes on when they leave it."""

    def __init__(self, near: Pod, far: Pod) -> None:
        self._filler, self._sink = sockets.udp(near), sockets.udp(far)
        self._here, self._there = sockets.udp(near), sockets.udp(far)
        for sender, receiver, pod in (
            (self._filler, self._sink, far),
            (self._here, self._there, far),
            (self._there, self._here, near),
        ):
            sender.connect((str(pod.address), receiver.getsockname()[1]))

    def exchange(self) -> None:
        for sender, receiver in ((self._here, self._there), (self._there, self._here)):
            sender.send(b"x")
            receiver.recv(10)

    def run(self, node: Node, cpus: list[int]) -> list[int]:
        """The order in which four packets arrived: two from the queue and two that follow."""
        self.exchange()
        os.sched_setaffinity(0, cpus[1:2])  # its timer works off the queue
        for _ in range(3):
            self._filler.send(bytes(FILL_SIZE))
        os.sched_setaffinity(0, cpus[:1])
        node.plane.invalidate_all()
        self._here.send(bytes([0]))
        self._here.send(bytes([1]))
        self._there.send(b"confirmed")
        resume = time.perf_counter() + random.uniform(0, DRAINED)
        while time.perf_counter() < resume:
            pass
        self._here.send(bytes([2]))
        self._here.send(bytes([3]))
        self._here.recv(10)
        return [self._there.recv(10)[0] for _ in range(4)]
