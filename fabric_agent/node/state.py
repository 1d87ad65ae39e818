# SPDX-License-Identifier: Apache-2.0
"""What the agent knows of its host, and how an event changes that. Pure.

``apply`` compares what an event says with what was known, so that a neighbour that was merely
confirmed, or a link message without news, is no change. Changes pile up in ``State.changes`` until
``settled``; the plan makes invalidations of them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from ipaddress import ip_network
from typing import Final

from oncache.core.net import (
    Address,
    Event,
    FdbEntry,
    IpAddress,
    Link,
    Namespace,
    Neighbour,
    Overrun,
    Route,
    Rule,
    Snapshot,
)

POD_KINDS: Final = frozenset({"veth", "netkit"})
RTN_LOCAL_DELIVERY: Final = frozenset({2, 3, 4, 5})  # local, broadcast, anycast, multicast
LINK_LOCAL: Final = (ip_network("fe80::/10"), ip_network("ff00::/8"))


@dataclass(frozen=True)
class LinkChanged:
    """A device came, went, or became another: name, MAC, MTU, up, tunnel parameters, ..."""

    index: int


@dataclass(frozen=True)
class AddressesChanged:
    """A device got or lost an address."""

    index: int


@dataclass(frozen=True)
class NeighbourChanged:
    """Another MAC answers to the address (empty: none)."""

    index: int
    address: IpAddress
    before: bytes
    after: bytes


@dataclass(frozen=True)
class FdbChanged:
    """Frames to the MAC go elsewhere; ``remotes`` are the tunnel ends before and after. ``moved``:
    it was known, and still is."""

    mac: bytes
    remotes: frozenset[IpAddress]
    moved: bool


@dataclass(frozen=True)
class RoutingChanged:
    """A route or a rule; whose packets it concerns is not worked out."""


@dataclass(frozen=True)
class EventsLost:
    """Anything may have changed."""


Change = (
    LinkChanged | AddressesChanged | NeighbourChanged | FdbChanged | RoutingChanged | EventsLost
)


FdbKey = tuple[int, bytes, int]
Target = IpAddress | int


@dataclass(frozen=True)
class Inside:
    """Devices and addresses inside another namespace."""

    links: Mapping[int, Link] = field(default_factory=dict)
    addresses: tuple[Address, ...] = ()


@dataclass(frozen=True)
class State:
    """Our namespace by netlink, and the ones at the far end of its devices.

    News that was not read yet: ``dirty`` namespaces, ``doubtful`` devices, and if ``lost``, all of
    our own namespace. FDB: (bridge or tunnel, MAC, VLAN) -> tunnel ends, or a bridge's port.
    """

    links: Mapping[int, Link] = field(default_factory=dict)
    addresses: frozenset[Address] = frozenset()
    neighbours: Mapping[tuple[int, IpAddress], bytes] = field(default_factory=dict)
    fdb: Mapping[FdbKey, frozenset[Target]] = field(default_factory=dict)
    namespaces: Mapping[int, Inside] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)
    dirty: frozenset[int] = frozenset()
    doubtful: frozenset[int] = frozenset()
    lost: bool = False
    changes: frozenset[Change] = frozenset()

    def link(self, name: str) -> Link | None:
        """The device of this name."""
        return next((link for link in self.links.values() if link.name == name), None)

    def peer(self, link: Link) -> Link | None:
        """The far end of a pod's device, if it was read and still is its far end."""
        inside = self.namespaces.get(-1 if link.lower_nsid is None else link.lower_nsid)
        peer = inside.links.get(link.lower or 0) if inside else None
        return peer if peer is not None and peer.lower == link.index else None


# ------------------------------------------------------------------------------------- reading


def with_snapshot(state: State, snapshot: Snapshot) -> State:
    """Our own namespace as just read; what is known of the others has to be read again."""
    links = {link.index: link for link in snapshot.links}
    fdb: dict[FdbKey, frozenset[Target]] = {}
    for entry in snapshot.fdb:
        key, target = _fdb_place(links, entry)
        fdb[key] = fdb.get(key, frozenset()) | {target}
    return replace(
        state,
        links=links,
        addresses=frozenset(snapshot.addresses),
        neighbours={(entry.index, entry.address): entry.mac for entry in snapshot.neighbours},
        fdb=fdb,
        dirty=frozenset(state.namespaces),
        doubtful=frozenset(),
        lost=False,
    )


def with_namespace(
    state: State, nsid: int, links: Iterable[Link], addresses: Iterable[Address]
) -> State:
    """One namespace as just read."""
    inside = Inside({link.index: link for link in links}, tuple(addresses))
    return replace(state, namespaces={**state.namespaces, nsid: inside}, dirty=state.dirty - {nsid})


def with_names(state: State, names: Mapping[int, str]) -> State:
    """What namespaces are called; an empty name is one that was looked for in vain."""
    return replace(state, names=dict(names))


def pod_devices(state: State) -> list[Link]:
    """Devices that may be the host side of a pod: their far end is in another namespace, and they
    bear no network of their own, as one that leads to a network does."""
    routed = {
        address.index
        for address in state.addresses
        if address.universe and address.interface.network.num_addresses > 1
    }
    return [
        link
        for link in state.links.values()
        if link.kind in POD_KINDS and link.lower_nsid is not None and link.index not in routed
    ]


def far_ends(state: State) -> frozenset[int]:
    """The namespaces that may be pods."""
    return frozenset(link.lower_nsid for link in pod_devices(state) if link.lower_nsid is not None)


def without_forgotten(state: State) -> State:
    """Drop what is known of namespaces that are no pods any more."""
    near = far_ends(state)
    if near.issuperset(state.namespaces):
        return state
    known = {nsid: inside for nsid, inside in state.namespaces.items() if nsid in near}
    return replace(state, namespaces=known, dirty=state.dirty & near)


def with_device(state: State, index: int, link: Link | None) -> State:
    """A device of ours as just read; None if there is none."""
    state = replace(state, doubtful=state.doubtful - {index})
    if link is not None:
        return apply(state, Event(link))
    known = state.links.get(index)
    return apply(state, Event(known, gone=True)) if known is not None else state


def unread(state: State) -> frozenset[int]:
    """The namespaces to read before a plan can be made."""
    near = far_ends(state)
    return (near - state.namespaces.keys()) | (state.dirty & near)


def all_doubtful(state: State) -> State:
    """The state of who did not watch for a while: single changes no longer count."""
    return replace(state, changes=frozenset({EventsLost()}))


def settled(state: State) -> State:
    """The state after its changes have been acted upon."""
    return replace(state, changes=frozenset()) if state.changes else state


# -------------------------------------------------------------------------------------- events


def apply(state: State, event: Event | Overrun) -> State:
    """The state after an event."""
    match event:
        case Overrun():
            return _noting(replace(state, lost=True), EventsLost())
        case Event(Link() as link, gone):
            return _link(state, link, gone)
        case Event(Address() as address, gone):
            return _address(state, address, gone)
        case Event(Neighbour() as entry, gone):
            return _neighbour(state, entry, gone)
        case Event(FdbEntry() as entry, gone):
            return _fdb(state, entry, gone)
        case Event(Route() as route):
            return _noting(state, RoutingChanged()) if _leads_on(route) else state
        case Event(Rule()):
            return _noting(state, RoutingChanged())
        case Event(Namespace(nsid), gone):
            return _namespace(state, nsid, gone)
    raise TypeError(f"not an event: {event!r}")


def _noting(state: State, *changes: Change) -> State:
    return replace(state, changes=state.changes.union(changes))


def _link(state: State, link: Link, gone: bool) -> State:
    if not gone and state.links.get(link.index) == link:
        return state
    links = {index: other for index, other in state.links.items() if index != link.index}
    doubtful = state.doubtful - {link.index}
    if gone:
        state = _forget_device(state, link.index)
        doubtful |= _whose_far_end(links.values(), link.index)
    else:
        links[link.index] = link
    return _noting(replace(state, links=links, doubtful=doubtful), LinkChanged(link.index))


def _whose_far_end(links: Iterable[Link], index: int) -> frozenset[int]:
    """Devices to read again: a veth says nothing when its far end moves to another namespace, but
    the far end leaves ours."""
    return frozenset(
        link.index
        for link in links
        if link.kind in POD_KINDS and link.lower == index and link.lower_nsid is None
    )


def _forget_device(state: State, index: int) -> State:
    # Everything on a device goes with it, not all of it with a message.
    return replace(
        state,
        addresses=frozenset(a for a in state.addresses if a.index != index),
        neighbours={key: mac for key, mac in state.neighbours.items() if key[0] != index},
        fdb={key: remotes for key, remotes in state.fdb.items() if key[0] != index},
    )


def _address(state: State, address: Address, gone: bool) -> State:
    same = {
        other
        for other in state.addresses
        if (other.index, other.interface) == (address.index, address.interface)
    }
    after = (state.addresses - same) | (frozenset() if gone else {address})
    if after == state.addresses:
        return state
    return _noting(replace(state, addresses=after), AddressesChanged(address.index))


def _neighbour(state: State, entry: Neighbour, gone: bool) -> State:
    key = (entry.index, entry.address)
    before, after = state.neighbours.get(key, b""), b"" if gone else entry.mac
    if before == after:
        return state
    known = {k: mac for k, mac in state.neighbours.items() if k != key}
    if after:
        known[key] = after
    changed = NeighbourChanged(entry.index, entry.address, before, after)
    return _noting(replace(state, neighbours=known), changed)


def _fdb_place(links: Mapping[int, Link], entry: FdbEntry) -> tuple[FdbKey, Target]:
    """A tunnel's entry by tunnel, a bridge's by bridge: there, the port is the answer."""
    if entry.remote is not None:
        return (entry.index, entry.mac, entry.vlan), entry.remote
    port = links.get(entry.index)
    bridge = port.master if port and port.master else entry.index
    return (bridge, entry.mac, entry.vlan), entry.index


def _fdb(state: State, entry: FdbEntry, gone: bool) -> State:
    key, target = _fdb_place(state.links, entry)
    before = state.fdb.get(key, frozenset())
    # Only frames to many may go to many places; else the new place is instead of the old one.
    many = not any(entry.mac) or entry.mac[0] & 1
    after = before - {target} if gone else before | {target} if many else frozenset({target})
    if before == after:
        return state
    known = {k: targets for k, targets in state.fdb.items() if k != key}
    if after:
        known[key] = after
    remotes = frozenset(end for end in before | after if not isinstance(end, int))
    return _noting(
        replace(state, fdb=known), FdbChanged(entry.mac, remotes, bool(before and after))
    )


def _namespace(state: State, nsid: int, gone: bool) -> State:
    if gone:
        names = {number: name for number, name in state.names.items() if number != nsid}
        known = {number: inside for number, inside in state.namespaces.items() if number != nsid}
        return replace(state, names=names, namespaces=known, dirty=state.dirty - {nsid})
    return replace(state, dirty=state.dirty | {nsid}) if nsid in state.namespaces else state


def _leads_on(route: Route) -> bool:
    """Whether a route may decide over a pod's packets: those that come with every address and
    device of the host do not."""
    if route.kind in RTN_LOCAL_DELIVERY:
        return False
    return not any(
        route.destination.version == scope.version and route.destination.network_address in scope
        for scope in LINK_LOCAL
    )
