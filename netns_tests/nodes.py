# SPDX-License-Identifier: Apache-2.0
"""Two hosts of the laboratory with their node agents, and what their programs count."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from netns_tests.lab import Agent, Host, Pod, ping, until
from oncache.core import libbpf, maps
from oncache.plane import Plane

SECONDS = 10.0
LONG_LEASE = 60.0

OUT, IN = "hits.from_pod", "hits.from_wire"
FAST = frozenset({OUT, IN})
# Address resolution and tunnel-less chatter of the hosts themselves.
BACKGROUND = frozenset({"base_path.not_ip", "base_path.not_tunnel"})


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

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._start = flat(plane.counters())

    def moved(self) -> dict[str, int]:
        """The counters that moved, and by how much; the hosts' own chatter left out."""
        now = flat(self._plane.counters())
        return {
            name: now[name] - before
            for name, before in self._start.items()
            if now[name] != before and name not in BACKGROUND
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
        return Meter(self.plane)

    def evict(self) -> int:
        """Empty the filter cache, as pressure by other flows would; returns how many were there."""
        (pin,) = self.agent.bpf_dir.glob("maps-*/filter_cache")
        fd = libbpf.get(pin)
        table: maps.Map[Any, Any] = maps.Map(fd, *maps.map_types(fd))
        return sum(table.delete(key) for key in [key for key, _ in table.items()])


Nodes = tuple[Node, Node]


def introduce_pods(hosts: tuple[Host, Host]) -> None:
    """One ping each way: every neighbour is known before an agent looks, so none is news."""
    one, other = hosts
    assert ping(one.pods["p1"], other.pods["p1"].address, 1).received
    assert ping(other.pods["p1"], one.pods["p1"].address, 1).received


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
