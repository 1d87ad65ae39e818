# SPDX-License-Identifier: Apache-2.0
"""Flows that the base path translates: ClusterIP as kube-proxy makes it with nftables."""

import os
import socket
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from netns_tests.lab import Host, Offload, Pod, set_offload, sockets, until
from netns_tests.lab import services as rules
from netns_tests.nodes import SECONDS, Nodes, accelerated, only_fast, warm

SERVICE, PORT, BACKEND_PORT = "10.96.0.10", 80, 8080
BULK = 4 << 20


def serve(hosts: tuple[Host, Host], backend: Pod) -> None:
    """Translate the service to a pod, on the first host, for TCP and UDP."""
    rules.no_services(hosts[0])
    for protocol in ("tcp", "udp"):
        rules.cluster_ip(
            hosts[0],
            SERVICE,
            PORT,
            backend.address,
            backend_port=BACKEND_PORT,
            protocol=protocol,
        )


@pytest.fixture
def offload() -> bool:
    """Whether the uplinks complete checksums; only without it is a wrong one seen here."""
    return False


@pytest.fixture
def nodes(hosts: tuple[Host, Host], offload: bool) -> Iterator[Nodes]:
    """The service's clients are on the first host, its backend is the second's pod."""
    for host in hosts:
        rules.policy(host)
        set_offload(host, host.uplink, Offload.TX, offload)
    serve(hosts, hosts[1].pods["p1"])
    with accelerated(hosts) as made:
        yield made


def connection(nodes: Nodes) -> tuple[socket.socket, socket.socket]:
    """A client's connection to the service, and the backend's end of it."""
    client, backend = nodes[0].pod, nodes[1].pod
    waiting = sockets.listener(backend, BACKEND_PORT)
    near = sockets.connect(client, SERVICE, PORT)
    far, _ = waiting.accept()
    waiting.close()
    backend.own(far)
    far.settimeout(SECONDS)
    return near, far


def ask(client: socket.socket, server: socket.socket, text: bytes) -> None:
    """A datagram to the service and its answer, which must come from the service."""
    client.sendto(text, (SERVICE, PORT))
    got, sender = server.recvfrom(100)
    server.sendto(got, sender)
    assert client.recvfrom(100) == (text, (SERVICE, PORT))


def checksum_errors(pod: Pod) -> tuple[int, int]:
    """(UDP, TCP) packets thrown away in a pod for a wrong checksum."""
    return pod.run(_read_checksum_errors)


def _read_checksum_errors() -> tuple[int, int]:
    values = {}
    with open("/proc/net/snmp") as lines:
        for names in lines:
            kind, _, rest = names.partition(":")
            values[kind] = dict(zip(rest.split(), next(lines).split()[1:], strict=True))
    return int(values["Udp"]["InCsumErrors"]), int(values["Tcp"]["InCsumErrors"])


def test_a_connection_to_a_service_is_fast_both_ways(nodes: Nodes) -> None:
    near, far = connection(nodes)
    warm(nodes, lambda: sockets.exchange(near, far))
    assert near.getpeername() == (SERVICE, PORT)
    flows = {
        (flow.remote, flow.remote_port, flow.egress.state, flow.ingress.state)
        for flow in nodes[0].plane.flows()
        if flow.protocol == "tcp"
    }
    backend = str(nodes[1].pod.address)
    assert flows == {
        (SERVICE, PORT, "ready", "empty"),
        (backend, BACKEND_PORT, "empty", "ready"),
    }


@pytest.mark.parametrize("offload", [True, False], ids=["offload", "tx off"])
def test_large_writes_arrive_whole(nodes: Nodes) -> None:
    near, far = connection(nodes)
    warm(nodes, lambda: sockets.exchange(near, far))
    for sender, receiver in ((near, far), (far, near)):
        data, got = os.urandom(BULK), bytearray()

        def drain(receiver: socket.socket = receiver, got: bytearray = got) -> None:
            while len(got) < BULK:
                got.extend(receiver.recv(1 << 16))

        reading = threading.Thread(target=drain)
        reading.start()
        sender.sendall(data)
        reading.join(SECONDS)
        assert bytes(got) == data
    for node in nodes:
        assert checksum_errors(node.pod) == (0, 0)


def test_datagrams_to_a_service_are_fast_both_ways(nodes: Nodes) -> None:
    client, server = sockets.udp(nodes[0].pod), sockets.udp(nodes[1].pod, BACKEND_PORT)
    warm(nodes, lambda: ask(client, server, b"who"))
    for size in (0, 1, 2, 3, 99):
        assert only_fast(nodes, partial(ask, client, server, bytes(size)))
    for node in nodes:
        assert checksum_errors(node.pod) == (0, 0)


def test_closing_one_view_closes_the_other(nodes: Nodes) -> None:
    near, far = connection(nodes)
    warm(nodes, lambda: sockets.exchange(near, far))
    near.shutdown(socket.SHUT_WR)
    assert far.recv(1) == b""
    assert {flow.closed for flow in nodes[0].plane.flows()} == {True}
    meters = [node.meter() for node in nodes]
    far.sendall(b"late")
    assert near.recv(10) == b"late"
    for meter in meters:
        assert not meter.moved().keys() & {"hits.from_pod", "hits.from_wire"}


def test_a_service_that_moves_takes_its_flows_along(hosts: tuple[Host, Host]) -> None:
    """As kube-proxy does it: rules replaced, then the old backend's conntrack entries deleted."""
    for host in hosts:
        rules.policy(host)
    old, new = hosts[1].pods["p1"], hosts[1].pod("p2")
    serve(hosts, old)
    with accelerated(hosts, lease_seconds=1.0) as nodes:
        client, first = sockets.udp(nodes[0].pod), sockets.udp(old, BACKEND_PORT)
        warm(nodes, lambda: ask(client, first, b"old"))
        second = sockets.udp(new, BACKEND_PORT)
        second.settimeout(0.05)
        serve(hosts, new)
        hosts[0].command(["conntrack", "-D", "-p", "udp", "--orig-dst", SERVICE])

        def moved() -> bool:
            client.sendto(b"new", (SERVICE, PORT))
            try:
                return second.recv(10) == b"new"
            except TimeoutError:
                return False

        until(moved, SECONDS, "datagrams at the new backend")
