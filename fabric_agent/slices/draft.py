# SPDX-License-Identifier: Apache-2.0
"""A fabric under construction: every cable, name and address is checked as it is added."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from itertools import pairwise

from fabric_agent.slices.model import Fabric, Host, Leaf, Nic, Port, Spine
from oncache.core.errors import ConfigError

Ends = tuple[IPv4Address | None, IPv4Address | None]


@dataclass
class Switch:
    """``path`` is the entry of the file that it comes from."""

    name: str
    index: int
    path: str
    most_ports: int | None
    ports: list[Port] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def claim(self, path: str, port: str) -> None:
        """A port has one cable, and a switch has no more ports than it has."""
        if port in self.names:
            raise ConfigError(
                f"{path}: port {port} of {self.name} has a cable already",
                hint="give every cable its own port",
            )
        if self.most_ports is not None and len(self.names) >= self.most_ports:
            raise ConfigError(
                f"{path}: {self.name} has {self.most_ports} ports, this is one cable more",
                hint=f"correct {self.path}.ports or remove cables",
            )
        self.names.add(port)


@dataclass
class LeafSwitch(Switch):
    prefix: IPv4Network = field(kw_only=True)
    nics: list[int] = field(default_factory=list)


@dataclass
class Draft:
    leaves: dict[str, LeafSwitch] = field(default_factory=dict)
    spines: dict[str, Switch] = field(default_factory=dict)
    optics: tuple[str, ...] = ()
    hosts: dict[str, list[int]] = field(default_factory=dict)
    nics: list[Nic] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    owners: dict[IPv4Address, str] = field(default_factory=dict)
    link_addresses: dict[IPv4Address, str] = field(default_factory=dict)

    def name(self, path: str, name: str) -> str:
        """A name is used once in the whole fabric."""
        if name in self.names:
            raise ConfigError(f"{path}: {name} is there twice", hint="give it another name")
        self.names.add(name)
        return name

    def address(self, path: str, address: IPv4Address, owner: str) -> None:
        if address in self.owners:
            raise ConfigError(
                f"{path}: {address} of {owner} belongs to {self.owners[address]} already",
                hint="give every port its own address",
            )
        self.owners[address] = owner

    def cable(
        self, path: str, leaf: LeafSwitch, spine: Switch, names: tuple[str, str], ends: Ends
    ) -> None:
        """A link; ``names`` and ``ends`` are ports and addresses of leaf and spine."""
        leaf.claim(path, names[0])
        spine.claim(path, names[1])
        for address, switch, port in zip(ends, (leaf, spine), names, strict=True):
            if address is not None:
                self.address(path, address, f"{switch.name}:{port}")
                self.link_addresses[address] = path
        up, down = len(leaf.ports), len(spine.ports)
        leaf.ports.append(Port(names[0], ends[0], spine.index, down))
        spine.ports.append(Port(names[1], ends[1], leaf.index, up))

    def fibre(self, path: str, switch: Switch, optical: int, name: str) -> None:
        """A port that ends at an optical switch."""
        switch.claim(path, name)
        switch.ports.append(Port(name, None, optical, 0))

    def nic(self, path: str, host: str, device: str, leaf: LeafSwitch, leaf_port: str,
            address: IPv4Interface, gateway: IPv4Address) -> None:  # fmt: skip
        leaf.claim(path, leaf_port)
        for value, owner in (
            (address.ip, f"{host}:{device}"),
            (gateway, f"{leaf.name}:{leaf_port}"),
        ):
            if value not in leaf.prefix:
                raise ConfigError(
                    f"{path}: {value} of {owner} is outside {leaf.prefix} of {leaf.name}",
                    hint="a NIC has an address of its leaf",
                )
            self.address(path, value, owner)
        nics = self.hosts[host]
        if any(self.nics[nic].device == device for nic in nics):
            raise ConfigError(f"{path}: {host} has two NICs {device}", hint="rename one")
        index = list(self.hosts).index(host) if not nics else self.nics[nics[0]].host
        self.nics.append(
            Nic(device, index, leaf.index, len(leaf.nics), leaf_port, address, gateway)
        )
        nics.append(len(self.nics) - 1)
        leaf.nics.append(len(self.nics) - 1)

    def done(self) -> Fabric:
        """The finished fabric, when nothing in it is impossible."""
        self._refuse_lonely()
        self._refuse_overlaps()
        return Fabric(
            leaves=tuple(
                Leaf(leaf.name, leaf.prefix, tuple(leaf.ports), tuple(leaf.nics))
                for leaf in self.leaves.values()
            ),
            spines=tuple(Spine(spine.name, tuple(spine.ports)) for spine in self.spines.values()),
            hosts=tuple(Host(name, tuple(nics)) for name, nics in self.hosts.items()),
            nics=tuple(self.nics),
            optics=self.optics,
        )

    def _refuse_lonely(self) -> None:
        for switch in [*self.leaves.values(), *self.spines.values()]:
            if not switch.ports:
                raise ConfigError(
                    f"{switch.path}: {switch.name} has no link", hint="cable it or remove it"
                )
        if not self.nics:
            raise ConfigError("hosts: there is no NIC", hint="add a host")

    def _refuse_overlaps(self) -> None:
        leaves = sorted(self.leaves.values(), key=lambda leaf: leaf.prefix)
        for one, other in pairwise(leaves):
            if one.prefix.overlaps(other.prefix):
                raise ConfigError(
                    f"{other.path}: {other.prefix} of {other.name} overlaps {one.prefix} "
                    f"of {one.name}",
                    hint="give every leaf its own prefix",
                )
        first = [leaf.prefix.network_address for leaf in leaves]
        for address, path in self.link_addresses.items():
            below = leaves[bisect_right(first, address) - 1]
            if address in below.prefix:
                raise ConfigError(
                    f"{path}: {address} lies in {below.prefix}, the prefix of {below.name}",
                    hint="number links outside the leaves' prefixes",
                )
