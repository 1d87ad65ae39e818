# SPDX-License-Identifier: Apache-2.0
"""A VXLAN of our own for hosts that have no overlay, in the shape Flannel gives it.

One device per node, no learning: for every peer a route to its pods through the device, a
neighbour entry for the gateway of that route, and a forwarding entry from the neighbour's MAC to
the peer. MACs follow from node addresses, so nodes need not tell each other. They are also how our
device is known (an alias cannot be given at birth): one without such a MAC is never touched.
Removing the device removes everything that is on it.
"""

import logging
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface
from typing import Final

from oncache.core.config import BuiltinOverlay
from oncache.core.errors import HostError
from oncache.core.net import FdbEntry, Link, Neighbour, Route, Tunnel
from oncache.core.netlink import Netlink

log = logging.getLogger(__name__)

DEVICE: Final = "oncache0"
PROTOCOL: Final = 172  # of our routes, as in `ip route show proto 172`
OVERHEAD: Final = 50  # Ethernet, IPv4, UDP and VXLAN headers around an inner IP packet
MAC_PREFIX: Final = b"\x02\xac"  # locally administered
RT_TABLE_MAIN: Final = 254
RTN_UNICAST: Final = 1


@dataclass(frozen=True)
class Entries:
    """What leads to the peers."""

    routes: frozenset[Route] = frozenset()
    neighbours: frozenset[Neighbour] = frozenset()
    fdb: frozenset[FdbEntry] = frozenset()

    def without(self, other: "Entries") -> "Entries":
        """The entries that ``other`` has not."""
        return Entries(
            self.routes - other.routes, self.neighbours - other.neighbours, self.fdb - other.fdb
        )


def mac_of(node: IPv4Address) -> bytes:
    """MAC of the tunnel device of the node with this address."""
    return MAC_PREFIX + node.packed


def entries(overlay: BuiltinOverlay, index: int) -> Entries:
    """What device ``index`` needs to reach every peer."""
    gateways = [(peer, peer.pod_cidr.network_address) for peer in overlay.peers]
    return Entries(
        routes=frozenset(
            Route(peer.pod_cidr, RT_TABLE_MAIN, RTN_UNICAST, PROTOCOL, 0, gateway, index)
            for peer, gateway in gateways
        ),
        neighbours=frozenset(
            Neighbour(index, gateway, mac_of(peer.address)) for peer, gateway in gateways
        ),
        fdb=frozenset(
            FdbEntry(index, mac_of(peer.address), 0, peer.address) for peer in overlay.peers
        ),
    )


async def ensure(
    netlink: Netlink, overlay: BuiltinOverlay, uplink: Link, local: IPv4Address
) -> bool:
    """Have the device and its entries; True if the device was made now.

    ``local`` is this node's address on ``uplink``. HostError if a foreign device has our name.
    """
    tunnel = Tunnel(vni=overlay.vni, port=overlay.port, local=local)
    index = await _reuse(netlink, tunnel, uplink)
    made = index is None
    if index is None:
        await netlink.add_vxlan(DEVICE, tunnel, uplink.index, mac_of(local))
        log.info("overlay made device=%s vni=%d local=%s", DEVICE, overlay.vni, local)
        index = (await _find(netlink, DEVICE)).index
    await netlink.set_link(index, mtu=uplink.mtu - OVERHEAD, state="up")
    gateway = overlay.pod_cidr.network_address
    await netlink.replace_address(index, IPv4Interface(f"{gateway}/32"))
    await _replace(netlink, index, entries(overlay, index))
    return made


async def remove(netlink: Netlink) -> bool:
    """Remove the device if it is ours, and with it all its entries; False if it was not there."""
    for link in await netlink.links():
        if _is_ours(link):
            await netlink.delete_link(link.index)
            log.info("overlay removed device=%s", DEVICE)
            return True
    return False


def _is_ours(link: Link) -> bool:
    return link.name == DEVICE and link.kind == "vxlan" and link.mac.startswith(MAC_PREFIX)


async def _find(netlink: Netlink, name: str) -> Link:
    for link in await netlink.links():
        if link.name == name:
            return link
    raise HostError(f"device {name} vanished", hint="something else removes devices on this host")


async def _reuse(netlink: Netlink, wanted: Tunnel, uplink: Link) -> int | None:
    """Index of a device of ours that is as wanted; one of ours that is not is removed."""
    for link in await netlink.links():
        if link.name != DEVICE:
            continue
        if not _is_ours(link):
            raise HostError(
                f"a device {DEVICE} exists that is not ours",
                hint=f"rename or remove it, or adopt it with 'overlay: {{device: {DEVICE}}}'",
            )
        have = link.tunnel
        same = have is not None and (have.vni, have.port, have.local, link.lower) == (
            *(wanted.vni, wanted.port, wanted.local),
            uplink.index,
        )
        if same:
            return link.index
        await netlink.delete_link(link.index)
    return None


async def _present(netlink: Netlink, index: int) -> Entries:
    return Entries(
        routes=frozenset(
            route
            for route in await netlink.routes()
            if route.device == index and route.protocol == PROTOCOL
        ),
        neighbours=frozenset(
            entry
            for entry in await netlink.neighbours()
            if entry.index == index and entry.mac.startswith(MAC_PREFIX)
        ),
        fdb=frozenset(
            entry
            for entry in await netlink.fdb()
            if entry.index == index and entry.mac.startswith(MAC_PREFIX) and entry.remote
        ),
    )


async def _replace(netlink: Netlink, index: int, wanted: Entries) -> None:
    present = await _present(netlink, index)
    stale, missing = present.without(wanted), wanted.without(present)
    for route in stale.routes:
        await netlink.delete_route(route)
    for neighbour in stale.neighbours:
        await netlink.delete_neighbour(neighbour)
    for entry in stale.fdb:
        await netlink.delete_fdb(entry)
    for entry in missing.fdb:
        await netlink.replace_fdb(entry)
    for neighbour in missing.neighbours:
        await netlink.replace_neighbour(neighbour)
    for route in missing.routes:
        await netlink.replace_route(route, onlink=True)
