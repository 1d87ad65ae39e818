# SPDX-License-Identifier: Apache-2.0
"""No packet overtakes another of its flow when the flow turns fast, or back.

The tunnel device of each host gets a queue (tbf), so that the base path is the slow one: what goes
the fast way too early arrives early.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

from netns_tests.lab import Host, Offload, Pod, Shape, set_offload, until
from netns_tests.nodes import FAST, LONG_LEASE, SECONDS, Meter, Node, Nodes, accelerated, numbered
from oncache.core import control

SIZE = 1000
SLOW = "60mbit"  # 140 microseconds for each packet
FLOWS = 25
random.seed(7)
# Some pauses let the queue drain, others do not.
BURSTS = [(random.randint(1, 14), random.choice((0.0003, 0.001, 0.003))) for _ in range(200)]


def slow_tunnel(host: Host, rate: str = SLOW) -> None:
    """Queue what leaves by the tunnel device; nothing is dropped."""
    host.netlink.tc(
        "add", "tbf", index=host.index(host.tunnel), rate=rate, burst=4000, limit=64 << 20
    )


@pytest.fixture
def slow_hosts(hosts: tuple[Host, Host]) -> tuple[Host, Host]:
    for host in hosts:
        slow_tunnel(host)
    return hosts


def assert_turned(meters: list[Meter]) -> None:
    """There were packets of both kinds, and some that waited for their turn."""
    for meter in meters:
        moved = meter.moved()
        assert moved.keys() >= FAST
        assert moved["base_path.order"] > 0


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
            with numbered(near, far, [(1, 0.002), (1, 0.002), (600, 0.02), (1, 0.0002)], SIZE) as flow:
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


def toggle(node: Node) -> None:
    control.call(node.agent.run_dir, "detach")
    control.call(node.agent.run_dir, "attach")


def repeatedly(nodes: Nodes, act: Callable[[Node], None], turns: int) -> None:
    """Act on one node and the other in turn, each time both directions are fast there."""
    for turn in range(turns):
        node = nodes[turn % 2]
        meter = node.meter()
        until(lambda meter=meter: meter.moved().keys() >= FAST, SECONDS, "fast")  # type: ignore[misc]
        act(node)


@pytest.mark.parametrize(
    ("act", "turns"), [(flush, 60), (evict, 60), (restart, 3), (stop_and_start, 2)]
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
        assert_turned(meters)


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
        assert_turned(meters)


_ = (Pod, threading, toggle)
