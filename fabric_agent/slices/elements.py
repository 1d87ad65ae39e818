# SPDX-License-Identifier: Apache-2.0
"""Names of what can fail, and what fails with it.

leaf0   spine0   host0      a switch or a server and all its ports
leaf0:u3   spine0:p1        the link of a port
host0:eth1                  a NIC
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from fabric_agent.slices.model import Fabric, Link, Port
from oncache.core.errors import ConfigError


@dataclass(frozen=True)
class Broken:
    """Ports and NICs that cannot be used, as indices."""

    uplinks: frozenset[tuple[int, int]] = frozenset()
    downlinks: frozenset[tuple[int, int]] = frozenset()
    nics: frozenset[int] = frozenset()

    @staticmethod
    def of(fabric: Fabric, names: Iterable[str]) -> Broken:
        """What fails with the named elements; ConfigError for a name that the fabric has not."""
        parts = [_part(fabric, name) for name in names]
        return Broken(
            frozenset().union(*(part.uplinks for part in parts)),
            frozenset().union(*(part.downlinks for part in parts)),
            frozenset().union(*(part.nics for part in parts)),
        )

    def link(self, link: Link) -> bool:
        """Is this link unusable?"""
        return (link.leaf, link.uplink) in self.uplinks or (
            link.spine,
            link.downlink,
        ) in self.downlinks


def _part(fabric: Fabric, name: str) -> Broken:
    element, _, port = name.partition(":")
    for index, leaf in enumerate(fabric.leaves):
        if leaf.name == element:
            ports = _ports(fabric, name, port, leaf.uplinks)
            nics = () if port else leaf.nics
            return _with_peers(fabric, Broken(_pairs(index, ports), nics=frozenset(nics)))
    for index, spine in enumerate(fabric.spines):
        if spine.name == element:
            ports = _ports(fabric, name, port, spine.downlinks)
            return _with_peers(fabric, Broken(downlinks=_pairs(index, ports)))
    if element in fabric.host_by_name:
        nics = fabric.hosts[fabric.host_by_name[element]].nics
        named = [nic for nic in nics if port in ("", fabric.nics[nic].device)]
        if named:
            return Broken(nics=frozenset(named))
    raise _unknown(fabric, name)


def _pairs(switch: int, ports: Iterable[int]) -> frozenset[tuple[int, int]]:
    return frozenset((switch, port) for port in ports)


def _ports(fabric: Fabric, name: str, port: str, ports: tuple[Port, ...]) -> list[int]:
    named = [index for index, each in enumerate(ports) if port in ("", each.name)]
    if not named:
        raise _unknown(fabric, name)
    return named


def _with_peers(fabric: Fabric, broken: Broken) -> Broken:
    """A cable has two ends. Behind an optical switch the far end stays usable."""
    if fabric.optics:
        return broken
    down = {
        (port.peer, port.peer_port)
        for leaf, uplink in broken.uplinks
        for port in [fabric.leaves[leaf].uplinks[uplink]]
    }
    up = {
        (port.peer, port.peer_port)
        for spine, downlink in broken.downlinks
        for port in [fabric.spines[spine].downlinks[downlink]]
    }
    return Broken(broken.uplinks | up, broken.downlinks | down, broken.nics)


def _unknown(fabric: Fabric, name: str) -> ConfigError:
    element, _, _ = name.partition(":")
    known = [leaf.name for leaf in fabric.leaves]
    known += [spine.name for spine in fabric.spines]
    known += list(fabric.host_by_name)
    if element in known:
        return ConfigError(f"{name}: {element} has no such port", hint=_ports_of(fabric, element))
    near = get_close_matches(element, known, n=1)
    return ConfigError(
        f"the fabric has no element {name}",
        hint=f"did you mean {near[0]}?" if near else "name a switch, a host, or SWITCH:PORT",
    )


def _ports_of(fabric: Fabric, element: str) -> str:
    names = [
        *(port.name for leaf in fabric.leaves if leaf.name == element for port in leaf.uplinks),
        *(
            port.name
            for spine in fabric.spines
            if spine.name == element
            for port in spine.downlinks
        ),
        *(
            fabric.nics[nic].device
            for host in fabric.hosts
            if host.name == element
            for nic in host.nics
        ),
    ]
    shown = ", ".join(names[:8])
    return f"it has {shown}{', …' if len(names) > 8 else ''}"
