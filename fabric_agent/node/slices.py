# SPDX-License-Identifier: Apache-2.0
"""A node's part in slices: from its document to rules, tables and next hops, and how to get there.

Pure. The document is ``fabric_agent.slices.hosts``'s; a switch's is understood too, by its ingress
ports. Ours in the kernel is what bears our protocol number and a number of our range; nothing else
is looked at or touched.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from ipaddress import IPv4Address, IPv4Network
from typing import Any, Final, TypeVar

from fabric_agent.slices.hosts import FORMAT, NUMBERS, PROTOCOL
from oncache.core.config import Section
from oncache.core.errors import ConfigError
from oncache.core.net import NextHop, Route, Rule

T = TypeVar("T", IPv4Address, IPv4Network, int)
Item = NextHop | Route | Rule

RTN_UNICAST: Final = 1
RTN_UNREACHABLE: Final = 7
RP_FILTER_STRICT: Final = 1


@dataclass(frozen=True)
class Way:
    """A next hop by the name of its device, which may be missing or down just now."""

    id: int
    gateway: IPv4Address
    device: str


@dataclass(frozen=True)
class Setting:
    """A setting of a device that the slices rely on, such as ``ipv4.conf.eth0.arp_ignore``."""

    device: str
    name: str
    value: int

    def held_by(self, device: int, everywhere: int) -> bool:
        """Do these values, the device's and that of ``all``, serve? The kernel takes the higher."""
        effective = max(device, everywhere)
        if self.name == "rp_filter":
            return effective != RP_FILTER_STRICT
        return effective >= self.value


@dataclass(frozen=True)
class Desired:
    """What a document asks for."""

    ways: tuple[Way, ...] = ()
    routes: tuple[Route, ...] = ()
    rules: tuple[Rule, ...] = ()
    settings: tuple[Setting, ...] = ()


@dataclass(frozen=True)
class Kernel:
    """Our next hops, routes and rules, as they are or as they should be. Of a route by a next-hop
    object only the object's id counts."""

    hops: frozenset[NextHop] = frozenset()
    routes: frozenset[Route] = frozenset()
    rules: frozenset[Rule] = frozenset()


class Act(StrEnum):
    SET = "set"
    REMOVE = "remove"


@dataclass(frozen=True)
class Step:
    """One message to the kernel; to set replaces what bears the same number or key."""

    act: Act
    item: Item


# ------------------------------------------------------------------------------------- documents


def read(document: Mapping[str, Any]) -> Desired:
    """Check a node's document completely; ConfigError names the entry that is wrong."""
    top = Section("", dict(document))
    if top.take("format", _integer) != FORMAT:
        raise ConfigError(
            f"format {document['format']}, this version knows {FORMAT}",
            hint="upgrade this agent, or the controller",
        )
    ways: list[Way] = []
    routes: list[Route] = []
    rules: list[Rule] = []
    settings: list[Setting] = []
    for part in _entries(top, "slices"):
        ways += map(_way, _entries(part, "nexthops"))
        for table in _entries(part, "tables"):
            routes += _table(table)
        rules += map(_rule, _entries(part, "rules"))
        settings += map(_setting, _entries(part, "settings") if "settings" in part else ())
    desired = Desired(tuple(ways), tuple(routes), tuple(rules), tuple(dict.fromkeys(settings)))
    _refuse_contradictions(desired)
    return desired


def _way(entry: Section) -> Way:
    return Way(
        entry.take("id", _number),
        entry.take("gateway", _parsed(IPv4Address, "an address")),
        entry.take("device", _text),
    )


def _table(entry: Section) -> Iterator[Route]:
    number = entry.take("id", _number)
    for route in _entries(entry, "routes"):
        hop = route.take("nexthop", _number) if "nexthop" in route else None
        yield Route(
            destination=route.take("destination", _parsed(IPv4Network, "a network")),
            table=number,
            kind=RTN_UNREACHABLE if hop is None else RTN_UNICAST,
            protocol=PROTOCOL,
            priority=route.take("metric", _integer),
            gateway=None,
            device=None,
            next_hop=hop,
        )


def _rule(entry: Section) -> Rule:
    by_port = "ingress_port" in entry
    return Rule(
        family=socket.AF_INET,
        priority=entry.take("priority", _integer),
        table=entry.take("table", _number),
        fwmark=None,
        fwmask=None,
        source=None if by_port else entry.take("source", _parsed(IPv4Network, "a network")),
        device=entry.take("ingress_port", _text) if by_port else None,
        protocol=PROTOCOL,
    )


def _setting(entry: Section) -> Setting:
    name = entry.take("name", _text)
    before, _, last = name.rpartition(".")
    start = "net.ipv4.conf."
    if not before.startswith(start):
        raise ConfigError(f"{entry.name('name')} is {name!r}", hint=f"it must begin with {start}")
    value = entry.take("value", _parsed(int, "a number"))
    return Setting(before.removeprefix(start), last, value)


def _refuse_contradictions(desired: Desired) -> None:
    known = {way.id: way for way in desired.ways}
    for way in desired.ways:
        if known[way.id] != way:
            raise ConfigError(f"next hop {way.id} is given twice", hint="ask the controller anew")
    for route in desired.routes:
        if route.next_hop is not None and route.next_hop not in known:
            raise ConfigError(
                f"the route to {route.destination} has no next hop {route.next_hop}",
                hint="ask the controller anew",
            )


def _entries(section: Section, key: str) -> list[Section]:
    entries = section.take(key, _list)
    named = [(f"{section.name(key)}[{index}]", entry) for index, entry in enumerate(entries)]
    return [Section(path, _checked(path, entry, dict, "a table")) for path, entry in named]


def _checked(path: str, raw: Any, kind: type, wanted: str) -> Any:
    if not isinstance(raw, kind) or isinstance(raw, bool):
        raise ConfigError(f"{path} is {raw!r}", hint=f"it must be {wanted}")
    return raw


def _list(path: str, raw: Any) -> list[Any]:
    return list(_checked(path, raw, list, "a list"))


def _text(path: str, raw: Any) -> str:
    return str(_checked(path, raw, str, "a word"))


def _integer(path: str, raw: Any) -> int:
    return int(_checked(path, raw, int, "a whole number"))


def _number(path: str, raw: Any) -> int:
    number = _integer(path, raw)
    if not NUMBERS <= number < 2 * NUMBERS:
        raise ConfigError(
            f"{path} is {number}", hint=f"our tables and next hops are numbered from {NUMBERS}"
        )
    return number


def _parsed(kind: Callable[[str], T], wanted: str) -> Callable[[str, Any], T]:
    def parse(path: str, raw: Any) -> T:
        try:
            return kind(_text(path, raw))
        except ValueError as error:
            raise ConfigError(f"{path} is {raw!r}", hint=f"it must be {wanted}") from error

    return parse


# ---------------------------------------------------------------------------------------- kernel


def wanted(desired: Desired, ready: Mapping[str, int]) -> Kernel:
    """What the kernel can hold now: ``ready`` are the devices that can send, by name.

    The kernel removes a next hop, and the routes by it, with its device's carrier; what is left
    leads by the backup, or nowhere. They are wanted again when the device is.
    """
    hops = frozenset(
        NextHop(way.id, way.gateway, ready[way.device], PROTOCOL)
        for way in desired.ways
        if way.device in ready
    )
    there = {hop.id for hop in hops} | {None}
    routes = frozenset(route for route in desired.routes if route.next_hop in there)
    return Kernel(hops, routes, frozenset(desired.rules))


def ours(hops: Iterable[NextHop], routes: Iterable[Route], rules: Iterable[Rule]) -> Kernel:
    """Our part of what was read."""
    return Kernel(
        frozenset(hop for hop in hops if hop.protocol == PROTOCOL and _in_range(hop.id)),
        frozenset(
            replace(route, gateway=None, device=None)
            for route in routes
            if route.protocol == PROTOCOL and _in_range(route.table)
        ),
        frozenset(rule for rule in rules if rule.protocol == PROTOCOL and _in_range(rule.table)),
    )


def _in_range(number: int) -> bool:
    return NUMBERS <= number < 2 * NUMBERS


def steps(want: Kernel, have: Kernel) -> list[Step]:
    """The messages that lead from ``have`` to ``want``.

    In an order in which no packet falls through: a rule comes after its table is whole and goes
    before its routes do; in a table the unreachable comes first and goes last.
    """
    keys = {_key(route) for route in want.routes}
    made: list[Item] = [
        *(want.hops - have.hops),
        *_by_metric(want.routes - have.routes, last_first=True),
        *(want.rules - have.rules),
    ]
    gone: list[Item] = [
        *(have.rules - want.rules),
        *(route for route in _by_metric(have.routes - want.routes) if _key(route) not in keys),
        *(hop for hop in have.hops if hop.id not in {each.id for each in want.hops}),
    ]
    return [*(Step(Act.SET, item) for item in made), *(Step(Act.REMOVE, item) for item in gone)]


def _key(route: Route) -> tuple[object, ...]:
    return route.table, route.destination, route.priority


def _by_metric(routes: Iterable[Route], *, last_first: bool = False) -> list[Route]:
    return sorted(routes, key=lambda route: route.priority, reverse=last_first)
