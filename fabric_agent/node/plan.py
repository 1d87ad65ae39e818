# SPDX-License-Identifier: Apache-2.0
"""What should be, compared with what the kernel has: a list of actions. Pure.

Nothing here knows how an action is done, but for one thing: those in ``SLOW`` wait for every CPU
of the host (some 10 ms each) and can be done one by one, between other work.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from fabric_agent.node import state as states
from fabric_agent.node.state import (
    AddressesChanged,
    Change,
    EventsLost,
    FdbChanged,
    LinkChanged,
    NeighbourChanged,
    RoutingChanged,
    State,
)
from oncache.core.net import Address, IpAddress, Link
from oncache.plane import PathRow, PodEntry, Settings


@dataclass(frozen=True)
class Desired:
    """What the plane should be like; ``pods`` by the index of their device."""

    settings: Settings
    peers: frozenset[IpAddress] = frozenset()
    pods: Mapping[int, PodEntry] = field(default_factory=dict)


@dataclass(frozen=True)
class Actual:
    """What the kernel says: maps, and devices that have our programs. ``pinned`` devices may be
    gone."""

    settings: Settings | None = None
    peers: frozenset[IpAddress] = frozenset()
    pods: Mapping[int, PodEntry] = field(default_factory=dict)
    attached_uplinks: frozenset[int] = frozenset()
    attached_pods: frozenset[int] = frozenset()
    pinned: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Configure:
    settings: Settings


@dataclass(frozen=True)
class SetPeers:
    peers: frozenset[IpAddress]


@dataclass(frozen=True)
class AttachUplink:
    ifindex: int


@dataclass(frozen=True)
class Detach:
    ifindex: int


@dataclass(frozen=True)
class ClearPod:
    index: int


@dataclass(frozen=True)
class SetPod:
    index: int
    entry: PodEntry


@dataclass(frozen=True)
class AttachPod:
    ifindex: int


@dataclass(frozen=True)
class InvalidateAll:
    pass


@dataclass(frozen=True)
class InvalidatePod:
    index: int


@dataclass(frozen=True)
class InvalidatePath:
    index: int


Action = (
    Configure
    | SetPeers
    | AttachUplink
    | Detach
    | ClearPod
    | SetPod
    | AttachPod
    | InvalidateAll
    | InvalidatePod
    | InvalidatePath
)

NO_NAME: Final = ""
SLOW: Final = (Detach, AttachPod)


def with_old_programs(actual: Actual) -> Actual:
    """The same, but programs on the hooks are another process's and have to be replaced."""
    return replace(actual, attached_uplinks=frozenset(), attached_pods=frozenset())


# ------------------------------------------------------------------------------------- desired


def pods(state: State, uplink: int) -> dict[int, PodEntry]:
    """The pods of this host, by the index of their host side device.

    Left alone are devices that lead to a network rather than to a pod, pods without an address yet,
    and pods that claim the same address.
    """
    entries = {
        link.index: entry
        for link in states.pod_devices(state)
        if link.index != uplink and (entry := _pod(state, link)) is not None
    }
    claims = Counter(address for entry in entries.values() for address in entry.addresses)
    return {
        index: entry
        for index, entry in entries.items()
        if all(claims[address] == 1 for address in entry.addresses)
    }


def _pod(state: State, link: Link) -> PodEntry | None:
    peer = state.peer(link)
    if peer is None or link.lower_nsid is None:
        return None
    inside = state.namespaces[link.lower_nsid]
    addresses = one_of_each(a for a in inside.addresses if a.index == peer.index)
    if not addresses:
        return None
    name = state.names.get(link.lower_nsid) or link.name
    return PodEntry(ifindex=link.index, mac=peer.mac, addresses=addresses, name=name)


def one_of_each(addresses: Iterable[Address]) -> tuple[IpAddress, ...]:
    """At most one IPv4 and one IPv6 address: primary before secondary, then the lowest."""
    usable = sorted(
        (a for a in addresses if a.universe and a.usable),
        key=lambda a: (a.ip.version, not a.primary, int(a.ip)),
    )
    first = {a.ip.version: a.ip for a in reversed(usable)}
    return tuple(first[version] for version in sorted(first))


def peers(state: State, tunnel: int) -> frozenset[IpAddress]:
    """The nodes that the tunnel device sends to: its forwarding entries and its default remote."""
    ends = {
        target
        for (index, _, _), targets in state.fdb.items()
        if index == tunnel
        for target in targets
        if not isinstance(target, int)
    }
    device = state.links.get(tunnel)
    if device and device.tunnel and device.tunnel.remote:
        ends.add(device.tunnel.remote)
    return frozenset(end for end in ends if not end.is_multicast)


# ---------------------------------------------------------------------------------------- diff


def diff(desired: Desired, actual: Actual, limit: int) -> list[Action]:
    """The actions that make ``actual`` like ``desired``; ``limit`` is the number of pod slots.

    Pods keep their slot as long as their device lives; those that find none are left out.
    """
    wanted, slots = _placed(desired.pods, actual.pods, limit)
    uplink = desired.settings.uplink
    stale = actual.pinned - wanted.keys() - {uplink}
    actions: list[Action] = []
    if actual.settings != desired.settings:
        actions.append(Configure(desired.settings))
    if actual.peers != desired.peers:
        actions.append(SetPeers(desired.peers))
    actions += [ClearPod(index) for index in sorted(actual.pods.keys() - slots.keys())]
    if uplink not in actual.attached_uplinks:
        actions.append(AttachUplink(uplink))
    for index, entry in sorted(slots.items()):
        held = actual.pods.get(index)
        if held is None or not _same(held, entry):
            actions.append(SetPod(index, entry))
    actions += [Detach(ifindex) for ifindex in sorted(stale)]
    actions += [AttachPod(i) for i in sorted(wanted.keys() - actual.attached_pods)]
    return actions


def without_slow(actions: Iterable[Action]) -> tuple[list[Action], list[Detach | AttachPod]]:
    """The actions to do at once, and those that may follow one by one."""
    quick: list[Action] = []
    slow: list[Detach | AttachPod] = []
    for action in actions:
        if isinstance(action, SLOW):
            slow.append(action)
        else:
            quick.append(action)
    return quick, slow


def _same(held: PodEntry, entry: PodEntry) -> bool:
    # The kernel does not keep names.
    return replace(held, name=NO_NAME) == replace(entry, name=NO_NAME)


def _placed(
    wanted: Mapping[int, PodEntry], held: Mapping[int, PodEntry], limit: int
) -> tuple[dict[int, PodEntry], dict[int, PodEntry]]:
    """The pods that have a slot, by device and by slot."""
    slot_of = {entry.ifindex: index for index, entry in held.items() if entry.ifindex in wanted}
    used = set(slot_of.values())
    free = [index for index in range(limit) if index not in used]
    slot_of |= zip(sorted(wanted.keys() - slot_of.keys()), free, strict=False)
    placed = {ifindex: wanted[ifindex] for ifindex in slot_of}
    return placed, {index: wanted[ifindex] for ifindex, index in slot_of.items()}


# ------------------------------------------------------------------------------- invalidations


def needs_paths(changes: Iterable[Change]) -> bool:
    """Whether ``invalidations`` has to see the paths, which cost a dump."""
    return any(isinstance(change, NeighbourChanged | FdbChanged) for change in changes)


def invalidations(
    state: State,
    settings: Settings,
    held: Mapping[int, PodEntry],
    paths: Sequence[PathRow],
) -> list[Action]:
    """What the state's changes have made doubtful; ``held`` are the pods by slot.

    All entries, if routing or the path of many changed; else single pods and paths.
    """
    found = {
        action
        for change in state.changes
        for action in _doubtful(change, state, settings, held, paths)
    }
    if InvalidateAll() in found:
        return [InvalidateAll()]
    return sorted(found, key=repr)


def _doubtful(
    change: Change,
    state: State,
    settings: Settings,
    held: Mapping[int, PodEntry],
    paths: Sequence[PathRow],
) -> Iterator[Action]:
    match change:
        case RoutingChanged() | EventsLost():
            yield InvalidateAll()
        case LinkChanged(index) | AddressesChanged(index):
            if index in _shared_devices(state, settings, held):
                yield InvalidateAll()
            yield from (InvalidatePod(i) for i, pod in held.items() if pod.ifindex == index)
        case NeighbourChanged(_, address, before, after):
            yield from _through(paths, frozenset({address}), before, but=after)
            yield from (InvalidatePod(i) for i, pod in held.items() if address in pod.addresses)
        case FdbChanged(mac, remotes, moved):
            yield from _through(paths, remotes, mac)
            yield from (InvalidatePod(i) for i, pod in held.items() if moved and pod.mac == mac)


def _shared_devices(
    state: State, settings: Settings, held: Mapping[int, PodEntry]
) -> frozenset[int]:
    """Uplink, tunnel, and the bridges of the pods."""
    ports = [state.links.get(pod.ifindex) for pod in held.values()]
    bridges = {port.master for port in ports if port is not None and port.master is not None}
    return frozenset({settings.uplink, settings.tunnel, *bridges})


def _through(
    paths: Sequence[PathRow], remotes: frozenset[IpAddress], mac: bytes, *, but: bytes = b""
) -> Iterator[Action]:
    """Paths to these tunnel ends, or that bear the MAC outside or inside; not those to a tunnel end
    whose next hop has MAC ``but``, which is what it should be."""
    for path in paths:
        astray = path.remote in remotes and path.next_hop_mac != but.hex(":")
        if astray or mac.hex(":") in (path.next_hop_mac, path.inner_destination_mac):
            yield InvalidatePath(path.index)
