# SPDX-License-Identifier: Apache-2.0
"""Two hosts of the laboratory with their node agents, and what their programs count."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from netns_tests.lab import Agent, Host, Pod, ping, sockets, until
from oncache.core import libbpf, maps
from oncache.plane import Plane

SECONDS = 10.0
_SO_RCVBUFFORCE = 33
LONG_LEASE = 14.0

OUT, IN = "hits.from_pod", "hits.from_wire"
FAST = frozenset({OUT, IN})
# Address resolution and tunnel-less chatter of the hosts themselves.
BACKGROUND = frozenset({"base_path.not_ip", "base_path.not_tunnel"})
# The same where there is IPv6: neighbour discovery, and multicast reports with their router alert.
BACKGROUND6 = BACKGROUND | {"base_path.icmp_type", "base_path.ip_options"}


def flat(counters: Mapping[str, Any], prefix: str = "") -> dict[str, int]:
    """Nested counters by dotted name: "base_path.miss"."""
    found: dict[str, int] = {}
    for name, value in counters.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


class Meter:
    """What a plane counts from the construction on."""

    def __init__(self, plane: Plane, background: frozenset[str] = BACKGROUND) -> None:
        self._plane = plane
        self._background = background
        self._start = flat(plane.counters())

    def moved(self) -> dict[str, int]:
        """The counters that moved, and by how much; the hosts' own chatter left out."""
        now = flat(self._plane.counters())
        return {
            name: now[name] - before
            for name, before in self._start.items()
            if now[name] != before and name not in self._background
        }


@dataclass(frozen=True)
class Node:
    """A host, its running agent, and its plane opened for reading."""

    host: Host
    agent: Agent
    plane: Plane

    @property
    def pod(self) -> Pod:
        return self.host.pods["p1"]

    def meter(self) -> Meter:
        return Meter(self.plane, BACKGROUND6 if self.host.ip6 else BACKGROUND)

    def evict(self) -> int:
        """Empty the filter cache, as pressure by other flows would; returns how many were there."""
        (pin,) = self.agent.bpf_dir.glob("maps-*/filter_cache")
        fd = libbpf.get(pin)
        table: maps.Map[Any, Any] = maps.Map(fd, *maps.map_types(fd))
        return sum(table.delete(key) for key in [key for key, _ in table.items()])


Nodes = tuple[Node, Node]


def introduce_pods(hosts: tuple[Host, Host]) -> None:
    """One ping each way: every neighbour is known before an agent looks, so none is news."""
    pods = tuple(host.pods["p1"] for host in hosts)
    for version in (4, 6) if hosts[0].ip6 else (4,):
        for near, far in (pods, pods[::-1]):
            assert ping(near, far.ip(version), 1).received


@contextlib.contextmanager
def accelerated(
    hosts: tuple[Host, Host], *, options: tuple[str, ...] = (), **config: Any
) -> Iterator[Nodes]:
    """Agents on both hosts; `config` replaces top-level keys of their configuration."""
    introduce_pods(hosts)
    with contextlib.ExitStack() as stack:

        def start(host: Host) -> Node:
            agent = stack.enter_context(host.agent(host.config(**config), options=options))
            plane = stack.enter_context(contextlib.closing(host.run(Plane.open, agent.bpf_dir)))
            return Node(host, agent, plane)

        yield start(hosts[0]), start(hosts[1])


def only_fast(nodes: Nodes, exchange: Callable[[], object]) -> bool:
    """Whether an exchange in both directions was fast on both hosts, and nothing else moved."""
    meters = [node.meter() for node in nodes]
    exchange()
    return all(meter.moved().keys() == FAST for meter in meters)


def warm(nodes: Nodes, exchange: Callable[[], object]) -> None:
    """Repeat an exchange in both directions until all of it is fast on both hosts."""
    until(lambda: only_fast(nodes, exchange), SECONDS, "fast both ways on both hosts")


STEADY = ((1, 0.0005),)  # 2,000 packets a second


class Numbered:
    """Numbered datagrams in a thread, each sent back by another, until `stop`.

    `rhythm` repeats: so many at once, then a pause of so many seconds. `version` is IP's.
    """

    def __init__(
        self, near: Pod, far: Pod, rhythm: Iterable[tuple[int, float]], size: int, version: int
    ) -> None:
        self.sent = 0
        self.there: list[int] = []
        self.back: list[int] = []
        self._rhythm = itertools.cycle(rhythm)
        self._padding = bytes(size - 8)
        self._ended = threading.Event()
        self._here = sockets.udp(near, version=version)
        self._far = sockets.udp(far, version=version)
        for each in (self._here, self._far):
            each.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 16 << 20)
        self._here.connect((str(far.ip(version)), self._far.getsockname()[1]))
        self._far.connect((str(near.ip(version)), self._here.getsockname()[1]))
        self._threads = [
            threading.Thread(target=run) for run in (self._echo, self._collect, self._send)
        ]
        for thread in self._threads:
            thread.start()

    def _send(self) -> None:
        for count, pause in self._rhythm:
            for _ in range(count):
                self._here.send(self.sent.to_bytes(8) + self._padding)
                self.sent += 1
            if self._ended.wait(pause):
                break
        self._here.send(b"")

    def _echo(self) -> None:
        while data := self._far.recv(2000):
            self.there.append(int.from_bytes(data[:8]))
            self._far.send(data)
        self._far.send(b"")

    def _collect(self) -> None:
        while data := self._here.recv(2000):
            self.back.append(int.from_bytes(data[:8]))

    def stop(self) -> None:
        """Stop sending, wait until the last datagram is back."""
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self._here.close()
        self._far.close()

    def assert_whole(self) -> None:
        """Nothing lost, nothing twice, nothing out of turn."""
        for way, seen in (("there", self.there), ("back", self.back)):
            late = [b for a, b in itertools.pairwise(seen) if b < a]
            assert not late, f"{way}: {len(late)} of {self.sent} were overtaken: {late[:10]}"
            assert len(seen) == self.sent, f"{way}: {self.sent - len(seen)} of {self.sent} lost"


@contextlib.contextmanager
def numbered(
    near: Pod,
    far: Pod,
    rhythm: Iterable[tuple[int, float]] = STEADY,
    size: int = 8,
    version: int = 4,
) -> Iterator[Numbered]:
    """A flow of numbered datagrams that runs during the block."""
    running = Numbered(near, far, rhythm, size, version)
    try:
        yield running
    finally:
        running.stop()
