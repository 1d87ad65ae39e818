# SPDX-License-Identifier: Apache-2.0
"""The machine room of a fabric: one namespace per leaf, spine and host, wires between them."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any, Self

from fabric_agent.slices import hosts as documents
from fabric_agent.slices import read
from fabric_agent.slices.elements import Broken
from fabric_agent.slices.model import Fabric as Model
from fabric_agent.slices.model import Slice
from netns_tests.fabric import counters
from netns_tests.lab import namespaces
from netns_tests.lab.namespaces import Namespace
from netns_tests.lab.signals import terminating_in_order, undisturbed

BURST = 20_000  # bytes that a link may send at once
QUEUE = 150_000  # bytes: 12 ms at 100 Mbit/s
# Small enough that flows on one link take turns often; large enough for two CPUs.
LARGEST_FRAME = 16_384
BUCKETS = 128
GROUP = 1_000_000  # number of the group towards leaf 0

SWITCH = {
    "net.ipv4.ip_forward": 1,
    "net.ipv4.fib_multipath_hash_policy": 1,  # by ports too
}
HOST = {
    "net.ipv4.tcp_slow_start_after_idle": 0,  # a barrier is no reason to start anew
    "net.ipv4.tcp_no_metrics_save": 1,  # a run must not profit from the one before
    **{
        f"net.ipv4.conf.all.{name}": value
        for name, value in documents.SETTINGS
        if name.startswith("arp_")
    },
}


class Way(StrEnum):
    """How a leaf chooses the uplink when there are no slices."""

    ECMP = "ecmp"
    RESILIENT = "resilient"


@dataclass(frozen=True)
class Rates:
    """Mbit/s of links between switches and of NICs, in each direction; None: as fast as it goes.

    NICs at the links' rate would leave acknowledgements no room.
    """

    link: int | None = 100
    nic: int | None = 90


def small(leaves: int = 4, spines: int = 4, hosts_per_leaf: int = 2, nics: int = 2) -> Model:
    """A fabric in which every leaf has its hosts' NICs, and a link to each spine."""
    return read.fabric(
        {
            "leaves": [{"name": f"leaf[0-{leaves - 1}]", "prefix": "10.20.0.0/24"}],
            "spines": [{"name": f"spine[0-{spines - 1}]"}],
            "links": [
                {
                    "leaves": f"leaf[0-{leaves - 1}]",
                    "spines": f"spine[0-{spines - 1}]",
                    "addresses": "10.30.0.0/24",
                }
            ],
            "hosts": [
                {
                    "name": f"host[0-{leaves * hosts_per_leaf - 1}]",
                    "devices": f"eth[0-{nics - 1}]",
                    "leaves": f"leaf[0-{leaves - 1}]",
                }
            ],
        }
    )


class Fabric:
    """A fabric, cabled and limited, with the routes of a switch that knows no slices (``route``).

    A context manager; names are random as in the laboratory.
    """

    def __init__(self, model: Model, rates: Rates) -> None:
        namespaces.require()
        self.model = model
        self.rates = rates
        self.name = f"{namespaces.PREFIX}{secrets.token_hex(3)}"
        self.nodes: dict[str, Namespace] = {}
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._undo.enter_context(terminating_in_order())
        try:
            self._build()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        with undisturbed():
            self._undo.close()

    @property
    def switches(self) -> list[str]:
        """Names of the leaves, then of the spines."""
        leaves = [leaf.name for leaf in self.model.leaves]
        return leaves + [spine.name for spine in self.model.spines]

    # --- building

    def _build(self) -> None:
        for leaf in self.model.leaves:
            self._node(leaf.name, SWITCH)
        for spine in self.model.spines:
            self._node(spine.name, SWITCH)
        for host in self.model.hosts:
            self._node(host.name, HOST)
        self._cable()
        self._plug()
        self._address_spines()
        for host in self.model.hosts:
            self._source_routes(self.nodes[host.name], host.nics)

    def _node(self, label: str, settings: dict[str, Any]) -> None:
        with undisturbed():
            node = Namespace(f"{self.name}-{label}")
            self._undo.callback(node.delete)
        for name, value in settings.items():
            node.sysctl(name, value)
        self.nodes[label] = node

    def _wire(self, one: Namespace, device: str, other: Namespace, far: str) -> None:
        peer = {"ifname": far, "net_ns_fd": other.name}
        one.netlink.link("add", ifname=device, kind="veth", peer=peer)

    def _port(self, node: Namespace, device: str, address: str, rate: int | None) -> None:
        index = node.index(device)
        node.netlink.addr("add", index=index, address=address, prefixlen=31)
        node.netlink.link("set", index=index, gso_max_size=LARGEST_FRAME, state="up")
        if rate is not None:
            limit = {"rate": f"{rate}mbit", "burst": BURST, "limit": QUEUE}
            node.netlink.tc("add", kind="tbf", index=index, **limit)

    def _cable(self) -> None:
        for leaf in self.model.leaves:
            for port in leaf.uplinks:
                spine = self.model.spines[port.peer]
                far = spine.downlinks[port.peer_port]
                one, other = self.nodes[leaf.name], self.nodes[spine.name]
                self._wire(one, port.name, other, far.name)
                self._port(one, port.name, str(port.address), self.rates.link)
                self._port(other, far.name, str(far.address), self.rates.link)

    def _plug(self) -> None:
        for nic in self.model.nics:
            host = self.nodes[self.model.hosts[nic.host].name]
            leaf = self.nodes[self.model.leaves[nic.leaf].name]
            self._wire(host, nic.device, leaf, nic.leaf_port)
            self._port(host, nic.device, str(nic.address.ip), self.rates.nic)
            self._port(leaf, nic.leaf_port, str(nic.gateway), self.rates.nic)

    def _address_spines(self) -> None:
        for spine in self.model.spines:
            for port in spine.downlinks:
                leaf = self.model.leaves[port.peer]
                gateway = str(leaf.uplinks[port.peer_port].address)
                node = self.nodes[spine.name]
                node.netlink.route("replace", dst=str(leaf.prefix), gateway=gateway)

    def _source_routes(self, host: Namespace, nics: Sequence[int]) -> None:
        """What a host with several NICs needs in any case: answers leave by the NIC asked."""
        for place, number in enumerate(nics):
            nic = self.model.nics[number]
            table = 100 + place
            gateway, device = str(nic.gateway), host.index(nic.device)
            host.netlink.route("add", dst="default", gateway=gateway, oif=device, table=table)
            host.netlink.rule("add", src=str(nic.address.ip), table=table, priority=30000)
        host.netlink.route("add", dst="default", gateway=str(self.model.nics[nics[0]].gateway))

    # --- ways

    def route(self, way: Way) -> None:
        """Have every leaf spread what leaves it over all uplinks."""
        for place, leaf in enumerate(self.model.leaves):
            node = self.nodes[leaf.name]
            lines = []
            hops = [GROUP + 1 + number for number in range(len(leaf.uplinks))]
            for hop, port in zip(hops, leaf.uplinks, strict=True):
                far = self.model.spines[port.peer].downlinks[port.peer_port].address
                lines.append(f"nexthop replace id {hop} via {far} dev {port.name}")
            group = "/".join(map(str, hops))
            kind = f"type resilient buckets {BUCKETS}" if way is Way.RESILIENT else "type mpath"
            number = GROUP + 1000 + list(Way).index(way)
            lines.append(f"nexthop replace id {number} group {group} {kind}")
            for other, target in enumerate(self.model.leaves):
                if other != place:
                    lines.append(f"route replace {target.prefix} nhid {number}")
            batch(node, lines)

    def documents(
        self, slices: Sequence[Slice], failed: Sequence[str] = ()
    ) -> dict[str, dict[str, Any]]:
        """The document of every node, by its name."""
        model, broken = self.model, Broken.of(self.model, failed)
        made = [documents.host_document(model, slices, i, broken) for i in range(len(model.hosts))]
        made += [
            documents.leaf_document(model, slices, i, broken) for i in range(len(model.leaves))
        ]
        made += [documents.spine_document(model, slices, i) for i in range(len(model.spines))]
        return {document["node"]: document for document in made}

    @contextlib.contextmanager
    def sliced(self, slices: Sequence[Slice]) -> Iterator[None]:
        """For the block, the switches route by source, in the form of `ip rule`."""
        made = self.documents(slices)
        for switch in self.switches:
            batch(self.nodes[switch], documents.linux(made[switch]))
        try:
            yield
        finally:
            for switch in self.switches:
                forget(self.nodes[switch], made[switch])

    # --- counters

    def count(self) -> None:
        """Begin to count, or begin anew, what each five-tuple sends on each link."""
        for leaf in self.model.leaves:
            counters.start(self.nodes[leaf.name], [port.name for port in leaf.uplinks])
        for spine in self.model.spines:
            counters.start(self.nodes[spine.name], [port.name for port in spine.downlinks])

    def counted(self) -> list[counters.Counted]:
        """All that left a switch towards another one since ``count``."""
        return [
            row for switch in self.switches for row in counters.counted(self.nodes[switch], switch)
        ]


def batch(node: Namespace, lines: Sequence[str]) -> None:
    """Run lines of `ip -batch`."""
    node.command(["ip", "-batch", "-"], text="\n".join(lines) + "\n")


def forget(node: Namespace, document: dict[str, Any]) -> None:
    """Undo what the lines of a document did."""
    for part in document["slices"]:
        for rule in part["rules"]:
            where = ["priority", str(rule["priority"]), "table", str(rule["table"])]
            node.command(["ip", "rule", "del", "iif", rule["ingress_port"], *where])
        for hop in part["nexthops"]:  # and the routes by it
            node.command(["ip", "nexthop", "del", "id", str(hop["id"])])
        for table in part["tables"]:
            node.command(["ip", "route", "flush", "table", str(table["id"])])
