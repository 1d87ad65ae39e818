# SPDX-License-Identifier: Apache-2.0
"""What each host and each switch must do for the slices: plain data, one document per node.

A document is complete and replaces the one before. Hosts: a table and a rule per NIC and slice,
next hops, source-port ranges, settings, files. Switches: rules that match the ingress port or the
outer source port - never the tunnel's address, which does not follow a host that sends by another
NIC. docs/slices.md lists the keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address
from typing import Any, Final

from fabric_agent.slices.elements import Broken
from fabric_agent.slices.model import Fabric, Link, Slice
from fabric_agent.slices.routing import backup, column, degraded
from oncache.core.errors import ConfigError

FORMAT: Final = 1

PROTOCOL: Final = 173  # of our routes, rules and next hops
PRIORITY: Final = 5173  # of our rules: before the main table
# Table and next-hop numbers: a bit that nobody else sets, the slice, the NIC or port.
NUMBERS: Final = 1 << 30
PER_SLICE: Final = 1 << 10
MOST_SLICES: Final = (1 << 20) - 1

PRIMARY: Final = 10  # metrics
BACKUP: Final = 20
UNREACHABLE: Final = 30

# Outer source ports, a share for each uplink of a leaf: above the range that Linux hands out by
# itself (32768-60999), within the one that RDMA uses (49152-65535).
FIRST_PORT: Final = 61440
PORTS: Final = 4096
TUNNEL_PORTS: Final = (4789, 4791)  # VXLAN, RoCE version 2

# Answers leave by the NIC that was asked, and are accepted there.
SETTINGS: Final = (("arp_ignore", "1"), ("arp_announce", "2"), ("rp_filter", "2"))

PORT_FILE: Final = "MultiQpSrcPort.cfg"
MOST_PAIRS: Final = 131_072  # that the collective library reads

Json = dict[str, Any]


def number(part: Slice, index: int) -> int:
    """Of a table or a next hop: ``index`` counts the node's NICs or ports."""
    if not 0 < part.number <= MOST_SLICES or not 0 <= index < PER_SLICE:
        raise ConfigError(
            f"{part.name}: number {part.number}.{index} is out of range",
            hint=f"slices are numbered up to {MOST_SLICES}, ports of a node up to {PER_SLICE - 1}",
        )
    return NUMBERS | part.number * PER_SLICE + index


def ports(uplinks: int, uplink: int) -> tuple[int, int]:
    """The first and last source port of an uplink of a leaf that has ``uplinks``."""
    width = PORTS // uplinks
    return FIRST_PORT + uplink * width, FIRST_PORT + (uplink + 1) * width - 1


def host_document(fabric: Fabric, slices: Sequence[Slice], host: int, broken: Broken) -> Json:
    """All that a host must do."""
    mine = [part for part in slices if not set(part.ranks).isdisjoint(fabric.hosts[host].nics)]
    return {
        "format": FORMAT,
        "node": fabric.hosts[host].name,
        "protocol": PROTOCOL,
        "slices": [_host_part(fabric, part, host, broken) for part in mine],
    }


def _host_part(fabric: Fabric, part: Slice, host: int, broken: Broken) -> Json:
    seats = list(_seats(fabric, part, host))
    return {
        "slice": part.name,
        "number": part.number,
        "contention_free": not degraded(part, broken),
        "nics": [_nic(fabric, part, *seat) for seat in seats],
        "settings": [
            {"name": f"net.ipv4.conf.{fabric.nics[seat[0]].device}.{name}", "value": value}
            for seat in seats
            for name, value in SETTINGS
        ],
        "nexthops": [_host_nexthop(fabric, part, seat[0]) for seat in seats],
        "tables": [_host_table(fabric, part, seats, seat, broken) for seat in seats],
        "rules": [
            {
                "priority": PRIORITY,
                "source": f"{fabric.nics[seat[0]].address.ip}/32",
                "table": number(part, _slot(fabric, seat[0])),
            }
            for seat in seats
        ],
        "ports": [row for seat in seats for row in _port_rows(fabric, part, seat, broken)],
    }


Seat = tuple[int, int, int]  # a NIC, the place of its leaf in the slice, its number on the leaf


def _seats(fabric: Fabric, part: Slice, host: int) -> Iterator[Seat]:
    for leaf, group in enumerate(part.nics):
        for local, nic in enumerate(group):
            if fabric.nics[nic].host == host:
                yield nic, leaf, local


def _slot(fabric: Fabric, nic: int) -> int:
    return fabric.hosts[fabric.nics[nic].host].nics.index(nic)


def _nic(fabric: Fabric, part: Slice, nic: int, leaf: int, local: int) -> Json:
    mine = fabric.nics[nic]
    other = backup(part, local)
    return {
        "device": mine.device,
        "address": str(mine.address),
        "gateway": str(mine.gateway),
        "rank": part.ranks.index(nic),
        "leaf": fabric.leaves[mine.leaf].name,
        "leaf_port": mine.leaf_port,
        "uplink": _uplink(fabric, part.links[leaf][local]) if part.links else None,
        "backup_uplink": None if other is None else _uplink(fabric, part.links[leaf][other]),
    }


def _uplink(fabric: Fabric, link: Link) -> Json:
    leaf = fabric.leaves[link.leaf]
    first, last = ports(len(leaf.uplinks), link.uplink)
    return {
        "port": leaf.uplinks[link.uplink].name,
        "spine": fabric.spines[link.spine].name,
        "source_ports": [first, last],
    }


def _host_nexthop(fabric: Fabric, part: Slice, nic: int) -> Json:
    mine = fabric.nics[nic]
    return {
        "id": number(part, _slot(fabric, nic)),
        "gateway": str(mine.gateway),
        "device": mine.device,
    }


def _host_table(
    fabric: Fabric, part: Slice, seats: Sequence[Seat], seat: Seat, broken: Broken
) -> Json:
    """To each leaf of the slice: by the NIC, else by another one of the slice, else not at all."""
    others = [other[0] for other in seats if other != seat and other[0] not in broken.nics]
    table = number(part, _slot(fabric, seat[0]))
    stand_in = number(part, _slot(fabric, others[0])) if others else None
    routes = [
        route
        for leaf in part.leaves(fabric)
        for route in _routes(str(fabric.leaves[leaf].prefix), table, stand_in)
    ]
    return {"id": table, "device": fabric.nics[seat[0]].device, "routes": routes}


def _routes(destination: str, primary: int | None, stand_in: int | None) -> Iterator[Json]:
    """A destination's routes: primary, backup where there is one, and the final unreachable."""
    for metric, nexthop in ((PRIMARY, primary), (BACKUP, stand_in)):
        if nexthop is not None:
            yield {"destination": destination, "nexthop": nexthop, "metric": metric}
    yield {"destination": destination, "type": "unreachable", "metric": UNREACHABLE}


def _port_rows(fabric: Fabric, part: Slice, seat: Seat, broken: Broken) -> Iterator[Json]:
    """Source ports by destination, destinations of the same uplink together."""
    nic, leaf, local = seat
    targets: dict[int, list[str]] = {}
    for target in range(len(part.nics) if part.links else 0):
        choice = column(part, broken, leaf, local, target) if target != leaf else None
        if choice is not None:
            prefix = fabric.leaves[fabric.nics[part.nics[target][0]].leaf].prefix
            targets.setdefault(choice, []).append(str(prefix))
    other = backup(part, local)
    for choice, destinations in targets.items():
        spare = other if other is not None and choice == local else None
        yield {
            "device": fabric.nics[nic].device,
            "source": str(fabric.nics[nic].address.ip),
            "destinations": destinations,
            "nexthop": number(part, _slot(fabric, nic)),
            "source_ports": _uplink(fabric, part.links[leaf][choice])["source_ports"],
            "backup_source_ports": None
            if spare is None
            else _uplink(fabric, part.links[leaf][spare])["source_ports"],
        }


def job_document(fabric: Fabric, part: Slice) -> Json:
    """Who is in a slice: once for all its hosts, because it grows with the slice."""
    return {
        "format": FORMAT,
        "slice": part.name,
        "number": part.number,
        "peers": [_peer(fabric, rank, nic) for rank, nic in enumerate(part.ranks)],
    }


def _peer(fabric: Fabric, rank: int, nic: int) -> Json:
    mine = fabric.nics[nic]
    return {
        "rank": rank,
        "host": fabric.hosts[mine.host].name,
        "slot": _slot(fabric, nic),
        "address": str(mine.address.ip),
        "prefix": str(fabric.leaves[mine.leaf].prefix),
    }


def files(document: Json, job: Json, directory: str) -> dict[str, str]:
    """The files of a slice on a host, by name, from the host's document and the slice's: the rank
    file, the source ports of pairs for RDMA collectives, and the environment that goes with them,
    all meant for ``directory``. ConfigError for a host that has no part of the slice, or for more
    pairs than the library reads."""
    part = next((part for part in document["slices"] if part["slice"] == job["slice"]), None)
    if part is None:
        raise ConfigError(
            f"{document['node']} has no part of slice {job['slice']}",
            hint="'fabric-agent slices show' lists the hosts of a slice",
        )
    return {
        "ranks": rank_file(job["peers"]),
        PORT_FILE: port_file(part, job["peers"]),
        "environment": environment(part, directory),
    }


def rank_file(peers: Sequence[Json]) -> str:
    """``rank 0=host0 slot=1``: the slot counts the server's NICs."""
    return "".join(f"rank {p['rank']}={p['host']} slot={p['slot']}\n" for p in peers)


def port_file(part: Json, peers: Sequence[Json]) -> str:
    """``source,destination=port`` for each pair that crosses the fabric."""
    by_prefix: dict[str, list[str]] = {}
    for peer in peers:
        by_prefix.setdefault(peer["prefix"], []).append(peer["address"])
    lines = [
        f"{row['source']},{address}={row['source_ports'][0]}\n"
        for row in part["ports"]
        for prefix in row["destinations"]
        for address in by_prefix.get(prefix, ())
    ]
    if len(lines) > MOST_PAIRS:
        raise ConfigError(
            f"{part['slice']}: {len(lines)} pairs of addresses, {PORT_FILE} holds {MOST_PAIRS}",
            hint="ask for a smaller slice, or match the ingress port on the leaves",
        )
    return "".join(lines)


def environment(part: Json, directory: str) -> str:
    """For the collective libraries: one queue pair a connection, each NIC its own rail."""
    devices = ",".join(nic["device"] for nic in part["nics"])
    return (
        f"NCCL_SOCKET_IFNAME={devices}\n"
        "NCCL_CROSS_NIC=0\n"
        "NCCL_IB_QPS_PER_CONNECTION=1\n"
        "NCCL_IB_SPLIT_DATA_ON_QPS=0\n"
        f"HCCL_RDMA_QP_PORT_CONFIG_PATH={directory}\n"
    )


def leaf_document(fabric: Fabric, slices: Sequence[Slice], leaf: int, broken: Broken) -> Json:
    """Rules of a leaf that routes by source: a NIC's flows take its uplink."""
    parts = []
    for part in slices:
        places = part.leaves(fabric)
        if part.links and leaf in places:
            parts.append(_leaf_part(fabric, part, places.index(leaf), broken))
    return _switch(fabric.leaves[leaf].name, parts)


def spine_document(fabric: Fabric, slices: Sequence[Slice], spine: int) -> Json:
    """Rules of a spine: what came by a slice's link leaves by a link of the same virtual spine."""
    parts = []
    for part in slices:
        columns = [place for place in range(part.width) if part.links[0][place].spine == spine]
        if columns:
            parts.append(_spine_part(fabric, part, columns))
    return _switch(fabric.spines[spine].name, parts)


def _switch(name: str, parts: list[Json]) -> Json:
    return {"format": FORMAT, "node": name, "protocol": PROTOCOL, "slices": parts}


def _leaf_part(fabric: Fabric, part: Slice, place: int, broken: Broken) -> Json:
    row = part.links[place]
    prefixes = [str(fabric.leaves[leaf].prefix) for leaf in part.leaves(fabric)]
    uplinks = fabric.leaves[row[0].leaf].uplinks
    tables, rules = [], []
    for local, nic in enumerate(part.nics[place]):
        routes: list[Json] = []
        for target, prefix in enumerate(prefixes):
            if target == place:
                continue
            choice = column(part, broken, place, local, target)
            spare = backup(part, local) if choice == local else None
            primary, stand_in = (
                None if index is None else number(part, index) for index in (choice, spare)
            )
            routes += _routes(prefix, primary, stand_in)
        tables.append({"id": number(part, local), "routes": routes})
        first, last = ports(len(uplinks), row[local].uplink)
        rules.append(
            {
                "priority": PRIORITY,
                "table": number(part, local),
                "ingress_port": fabric.nics[nic].leaf_port,
                "source_ports": [first, last],
            }
        )
    nexthops = [
        _switch_nexthop(
            number(part, index),
            uplinks[link.uplink].name,
            fabric.spines[link.spine].downlinks[link.downlink].address,
        )
        for index, link in enumerate(row)
    ]
    return _part(part, nexthops, tables, rules)


def _spine_part(fabric: Fabric, part: Slice, columns: Sequence[int]) -> Json:
    leaves = part.leaves(fabric)
    nexthops, tables, rules = [], [], []
    for place in columns:
        routes: list[Json] = []
        for leaf, row in zip(leaves, part.links, strict=True):
            link = row[place]
            port = fabric.spines[link.spine].downlinks[link.downlink]
            far = fabric.leaves[leaf].uplinks[link.uplink].address
            nexthops.append(_switch_nexthop(number(part, link.downlink), port.name, far))
            routes += _routes(str(fabric.leaves[leaf].prefix), nexthops[-1]["id"], None)
            rules.append(
                {"priority": PRIORITY, "table": number(part, place), "ingress_port": port.name}
            )
        tables.append({"id": number(part, place), "routes": routes})
    return _part(part, nexthops, tables, rules)


def _switch_nexthop(identity: int, port: str, gateway: IPv4Address | None) -> Json:
    return {"id": identity, "gateway": None if gateway is None else str(gateway), "device": port}


def _part(part: Slice, nexthops: list[Json], tables: list[Json], rules: list[Json]) -> Json:
    return {
        "slice": part.name,
        "number": part.number,
        "nexthops": nexthops,
        "tables": tables,
        "rules": rules,
    }


def linux(document: Json, *, match: str = "ingress_port") -> list[str]:
    """A switch's document as the lines that ``ip -batch`` reads, in the order that never lets a
    packet fall through: next hops, routes, rules. ``match`` is "ingress_port" or "source_ports"; a
    rule that has not the latter keeps the former."""
    lines: list[str] = []
    for part in document["slices"]:
        for hop in part["nexthops"]:
            via = f" via {hop['gateway']}" if hop["gateway"] else ""
            link = " onlink" if via else ""
            lines.append(
                f"nexthop replace id {hop['id']}{via} dev {hop['device']}{link} "
                f"protocol {document['protocol']}"
            )
        for table in part["tables"]:
            lines += [_route_line(document, table["id"], route) for route in table["routes"]]
        for rule in part["rules"]:
            lines += _rule_lines(document, rule, match)
    return lines


def _route_line(document: Json, table: int, route: Json) -> str:
    kind = "unreachable " if "nexthop" not in route else ""
    by = f" nhid {route['nexthop']}" if "nexthop" in route else ""
    return (
        f"route replace {kind}{route['destination']}{by} table {table} "
        f"metric {route['metric']} protocol {document['protocol']}"
    )


def _rule_lines(document: Json, rule: Json, match: str) -> list[str]:
    end = f"lookup {rule['table']} priority {rule['priority']} protocol {document['protocol']}"
    if match not in rule:
        return [f"rule add iif {rule['ingress_port']} {end}"]
    if match == "ingress_port":
        return [f"rule add iif {rule[match]} {end}"]
    first, last = rule["source_ports"]
    return [
        f"rule add ipproto udp sport {first}-{last} dport {port} {end}" for port in TUNNEL_PORTS
    ]
