# SPDX-License-Identifier: Apache-2.0
"""What the kernel says about links, addresses, routes, neighbours, FDB and rules.

The one module of core that knows pyroute2's rtnetlink; everybody else sees frozen dataclasses.
``Netlink`` answers questions, ``Events`` tells what changes, both for the network namespace of the
thread that opened them, and both for the namespaces at the far end of its devices, named by the
number ("nsid") the kernel gave them here. No other namespace is ever entered or opened: rtnetlink
answers for it by IFLA_TARGET_NETNSID and IFA_TARGET_NETNSID (Linux 4.20).
"""

import asyncio
import contextlib
import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator
from enum import IntEnum
from ipaddress import ip_address, ip_interface, ip_network
from pathlib import Path
from typing import Any, Final, Self

from pyroute2 import AsyncIPRoute
from pyroute2.netlink import (
    NLM_F_ACK,
    NLM_F_CREATE,
    NLM_F_DUMP,
    NLM_F_REPLACE,
    NLM_F_REQUEST,
    nlmsg,
)
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.rtnl import (
    RTM_DELADDR,
    RTM_DELLINK,
    RTM_DELNEIGH,
    RTM_DELNSID,
    RTM_DELROUTE,
    RTM_DELRULE,
    RTM_GETADDR,
    RTM_GETLINK,
    RTM_GETROUTE,
    RTM_NEWADDR,
    RTM_NEWLINK,
    RTM_NEWNEIGH,
    RTM_NEWROUTE,
    RTM_NEWRULE,
    ndmsg,
)
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.ifinfmsg.plugins.vxlan import vxlan
from pyroute2.netlink.rtnl.marshal import MarshalRtnl
from pyroute2.netlink.rtnl.rtmsg import rtmsg

from oncache.core.errors import HostError
from oncache.core.net import (
    Address,
    Df,
    Event,
    FdbEntry,
    IpAddress,
    IpInterface,
    IpNetwork,
    Item,
    Link,
    Namespace,
    Neighbour,
    NextHop,
    Overrun,
    Route,
    Rule,
    Snapshot,
    Tunnel,
)

__all__ = [
    "Address",
    "Df",
    "Event",
    "Events",
    "FdbEntry",
    "Link",
    "Namespace",
    "Neighbour",
    "Netlink",
    "NextHop",
    "Overrun",
    "Route",
    "Rule",
    "Snapshot",
    "Tunnel",
]

AF_UNSPEC: Final = 0
AF_BRIDGE: Final = 7
SOL_NETLINK: Final = 270
NETLINK_ADD_MEMBERSHIP: Final = 1
NETLINK_LISTEN_ALL_NSID: Final = 8
SO_RCVBUFFORCE: Final = 33
RECEIVE_BUFFER: Final = 8 << 20

IFF_UP: Final = 1
IFF_LOWER_UP: Final = 0x10000
IFA_F_SECONDARY: Final = 0x01
IFA_F_DADFAILED: Final = 0x08
IFA_F_TENTATIVE: Final = 0x40
RTM_F_CLONED: Final = 0x200
RTNH_F_ONLINK: Final = 4
RTN_UNICAST: Final = 1
RTM_NEWNEXTHOP: Final = 104
RTM_DELNEXTHOP: Final = 105
RTM_GETNEXTHOP: Final = 106
TOS_INHERIT: Final = 1
NAMED_NAMESPACES: Final = (Path("/run/netns"), Path("/var/run/docker/netns"))

# A namespace may be called any number from 0; ours has none.
OURS: Final = None


# --------------------------------------------------------------------- what pyroute2 gets wrong


class _TtlInherit(vxlan.flag):  # type: ignore[misc]
    """IFLA_VXLAN_TTL_INHERIT is set as a flag but reported as one byte, which may be 0; pyroute2
    reads it as a flag, that is, as always true."""

    def decode(self) -> None:
        super().decode()
        self.value = self.length <= 4 or self.data[self.offset + 4] != 0


vxlan.ttl_inherit = _TtlInherit
vxlan.nla_map = tuple(
    (name, "ttl_inherit" if name == "IFLA_VXLAN_TTL_INHERIT" else kind)
    for name, kind in (
        *vxlan.nla_map,
        # Of Linux 6.8, which pyroute2 does not know yet.
        *(("IFLA_VXLAN_VNIFILTER", "none"), ("IFLA_VXLAN_LOCALBYPASS", "none")),
        ("IFLA_VXLAN_LABEL_POLICY", "uint32"),
    )
)
# pyroute2 takes the number for a text.
ifaddrmsg.nla_map = tuple(
    (name, "int32" if name == "IFA_TARGET_NETNSID" else kind) for name, kind in ifaddrmsg.nla_map
)
# Its attributes of a route end before this one, and what it does not know it drops in silence.
RTA_NH_ID: Final = 30
rtmsg.nla_map += (
    *((f"RTA_{number}", "none") for number in range(len(rtmsg.nla_map), RTA_NH_ID)),
    ("RTA_NH_ID", "uint32"),
)


class _NextHopMessage(nlmsg):  # type: ignore[misc]
    """struct nhmsg (include/uapi/linux/nexthop.h), which pyroute2 has not."""

    prefix = "NHA_"
    fields = (
        *(("family", "B"), ("scope", "B"), ("protocol", "B"), ("resvd", "B")),
        ("flags", "I"),
    )
    nla_map = (
        *(("NHA_UNSPEC", "none"), ("NHA_ID", "uint32"), ("NHA_GROUP", "cdata")),
        *(("NHA_GROUP_TYPE", "uint16"), ("NHA_BLACKHOLE", "flag"), ("NHA_OIF", "uint32")),
        ("NHA_GATEWAY", "ipaddr"),
    )


MarshalRtnl.msg_map |= {RTM_NEWNEXTHOP: _NextHopMessage, RTM_DELNEXTHOP: _NextHopMessage}


# -------------------------------------------------------------------------------------- decoding


def _mac(text: str | None) -> bytes:
    return bytes.fromhex(text.replace(":", "")) if text else b""


def _ip(text: str | None) -> IpAddress | None:
    return ip_address(text) if text else None


def _link(message: Any) -> Link:
    info = message.get_attr("IFLA_LINKINFO")
    kind = (info.get_attr("IFLA_INFO_KIND") or "") if info else ""
    data = info.get_attr("IFLA_INFO_DATA") if info else None
    lower = message.get_attr("IFLA_LINK") or None
    return Link(
        index=message["index"],
        name=message.get_attr("IFLA_IFNAME") or "",
        kind=kind,
        mac=_mac(message.get_attr("IFLA_ADDRESS")),
        mtu=message.get_attr("IFLA_MTU") or 0,
        up=bool(message["flags"] & IFF_UP),
        lower=_vxlan_lower(data) if kind == "vxlan" else lower,
        lower_nsid=message.get_attr("IFLA_LINK_NETNSID"),
        master=message.get_attr("IFLA_MASTER"),
        tunnel=_tunnel(data) if kind == "vxlan" and data is not None else None,
    )


def _vxlan_lower(data: Any) -> int | None:
    return (data.get_attr("IFLA_VXLAN_LINK") or None) if data is not None else None


def _tunnel(data: Any) -> Tunnel:
    def get(name: str) -> Any:
        return data.get_attr(f"IFLA_VXLAN_{name}")

    ports = get("PORT_RANGE") or {"low": 0, "high": 0}
    tos = get("TOS") or 0
    return Tunnel(
        vni=get("ID") or 0,
        port=get("PORT") or 0,
        port_min=ports["low"],
        port_max=ports["high"],
        tos=0 if tos == TOS_INHERIT else tos,
        tos_inherit=tos == TOS_INHERIT,
        ttl=get("TTL") or 0,
        ttl_inherit=bool(get("TTL_INHERIT")),
        df=Df(get("DF") or 0),
        udp_csum=bool(get("UDP_CSUM")),
        zero_csum6_tx=bool(get("UDP_ZERO_CSUM6_TX")),
        zero_csum6_rx=bool(get("UDP_ZERO_CSUM6_RX")),
        label_inherit=bool(get("LABEL_POLICY")),
        gbp=bool(get("GBP")),
        gpe=bool(get("GPE")),
        collect_metadata=bool(get("COLLECT_METADATA")),
        learning=bool(get("LEARNING")),
        local=_ip(get("LOCAL") or get("LOCAL6")),
        remote=_ip(get("GROUP") or get("GROUP6")),
    )


def _address(message: Any) -> Address:
    text = message.get_attr("IFA_LOCAL") or message.get_attr("IFA_ADDRESS")
    flags = message.get_attr("IFA_FLAGS") or message["flags"]
    return Address(
        index=message["index"],
        interface=ip_interface(f"{text}/{message['prefixlen']}"),
        universe=message["scope"] == 0,
        primary=not flags & IFA_F_SECONDARY,
        usable=not flags & (IFA_F_TENTATIVE | IFA_F_DADFAILED),
    )


def _route(message: Any) -> Route | None:
    if message["family"] not in (socket.AF_INET, socket.AF_INET6):
        return None
    if message["flags"] & RTM_F_CLONED:
        return None
    everywhere = "0.0.0.0" if message["family"] == socket.AF_INET else "::"
    destination = message.get_attr("RTA_DST") or everywhere
    return Route(
        destination=ip_network(f"{destination}/{message['dst_len']}"),
        table=message.get_attr("RTA_TABLE") or message["table"],
        kind=message["type"],
        protocol=message["proto"],
        priority=message.get_attr("RTA_PRIORITY") or 0,
        gateway=_ip(message.get_attr("RTA_GATEWAY")),
        device=message.get_attr("RTA_OIF"),
        next_hop=message.get_attr("RTA_NH_ID"),
    )


def _next_hop(message: Any) -> NextHop | None:
    gateway, device = message.get_attr("NHA_GATEWAY"), message.get_attr("NHA_OIF")
    if gateway is None or device is None:
        return None  # a group, or one that leads nowhere
    return NextHop(message.get_attr("NHA_ID"), ip_address(gateway), device, message["protocol"])


def _neighbour(message: Any) -> Neighbour | FdbEntry | None:
    address = message.get_attr("NDA_DST")
    mac = _mac(message.get_attr("NDA_LLADDR"))
    if message["family"] == AF_BRIDGE:
        vlan = message.get_attr("NDA_VLAN") or 0
        return FdbEntry(message["ifindex"], mac, vlan, _ip(address))
    if not address:
        return None
    return Neighbour(message["ifindex"], ip_address(address), mac)


def _rule(message: Any) -> Rule:
    return Rule(
        family=message["family"],
        priority=message.get_attr("FRA_PRIORITY") or 0,
        table=message.get_attr("FRA_TABLE") or message["table"],
        fwmark=message.get_attr("FRA_FWMARK"),
        fwmask=message.get_attr("FRA_FWMASK"),
        source=_source(message),
        device=message.get_attr("FRA_IIFNAME"),
        ip_protocol=message.get_attr("FRA_IP_PROTO"),
        source_ports=_ports(message.get_attr("FRA_SPORT_RANGE")),
        ports=_ports(message.get_attr("FRA_DPORT_RANGE")),
        protocol=message.get_attr("FRA_PROTOCOL") or 0,
    )


def _source(message: Any) -> IpNetwork | None:
    address = message.get_attr("FRA_SRC")
    return ip_network(f"{address}/{message['src_len']}") if address else None


def _ports(ends: Any) -> tuple[int, int] | None:
    return (ends["start"], ends["end"]) if ends else None


def _namespace(message: Any) -> Namespace:
    return Namespace(message.get_attr("NETNSA_NSID"))


DECODERS: Final[dict[int, tuple[Callable[[Any], Item | None], bool]]] = {
    RTM_NEWLINK: (_link, False),
    RTM_DELLINK: (_link, True),
    RTM_NEWADDR: (_address, False),
    RTM_DELADDR: (_address, True),
    RTM_NEWROUTE: (_route, False),
    RTM_DELROUTE: (_route, True),
    RTM_NEWNEIGH: (_neighbour, False),
    RTM_DELNEIGH: (_neighbour, True),
    RTM_NEWRULE: (_rule, False),
    RTM_DELRULE: (_rule, True),
    RTM_DELNSID: (_namespace, True),
}


# ------------------------------------------------------------------------------------- questions


@contextlib.contextmanager
def _host_errors(what: str) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise HostError(f"not allowed to {what}", hint="run this as root") from error
    except NetlinkError as error:
        name = errno.errorcode.get(error.code, str(error.code))
        hint = "run this as root" if error.code == errno.EPERM else "the kernel's log may say why"
        raise HostError(f"cannot {what}: {name}", hint=hint) from error


class Netlink:
    """Questions to the kernel, as an asynchronous context manager; HostError when it refuses."""

    async def __aenter__(self) -> Self:
        self._stack = contextlib.AsyncExitStack()
        async with self._stack:
            self._ip: Any = await self._stack.enter_async_context(AsyncIPRoute())
            # Only a strict dump of addresses may name another namespace; some of pyroute2's other
            # dumps are refused by a strict socket.
            self._strict: Any = await self._stack.enter_async_context(
                AsyncIPRoute(strict_check=True)
            )
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    async def snapshot(self) -> Snapshot:
        """Read our own namespace."""
        return Snapshot(
            links=tuple(await self.links()),
            addresses=tuple(await self.addresses()),
            neighbours=tuple(await self.neighbours()),
            fdb=tuple(await self.fdb()),
        )

    async def links(self, nsid: int | None = OURS) -> list[Link]:
        """All devices; none if the namespace is gone."""
        request = ifinfmsg()
        return [_link(m) for m in await self._links(request, nsid, NLM_F_REQUEST | NLM_F_DUMP)]

    async def link(self, index: int, nsid: int | None = OURS) -> Link | None:
        """One device by its index, None if there is none."""
        request = ifinfmsg()
        request["index"] = index
        found = await self._links(request, nsid, NLM_F_REQUEST)
        return _link(found[0]) if found else None

    async def _links(self, request: Any, nsid: int | None, flags: int) -> list[Any]:
        if nsid is not OURS:
            request["attrs"] = [("IFLA_IF_NETNSID", nsid)]
        return await self._ask(self._ip, request, RTM_GETLINK, flags, "read the network devices")

    async def addresses(self, nsid: int | None = OURS) -> list[Address]:
        """All addresses on all devices; none if the namespace is gone."""
        request = ifaddrmsg()
        if nsid is not OURS:
            request["attrs"] = [("IFA_TARGET_NETNSID", nsid)]
        flags = NLM_F_REQUEST | NLM_F_DUMP
        found = await self._ask(self._strict, request, RTM_GETADDR, flags, "read the addresses")
        return [_address(message) for message in found]

    async def _ask(self, ip: Any, request: Any, kind: int, flags: int, what: str) -> list[Any]:
        with _host_errors(what):
            try:
                return [message async for message in await ip.nlm_request(request, kind, flags)]
            except NetlinkError as error:
                # EINVAL: no namespace of this number (any more).
                gone = errno.EINVAL if request["attrs"] else errno.ENODEV
                if error.code not in (errno.ENODEV, gone):
                    raise
                return []

    async def routes(self) -> list[Route]:
        """Routes of all tables and both families."""
        with _host_errors("read the routes"):
            found = [_route(message) async for message in await self._ip.route("dump")]
        return [route for route in found if route is not None]

    async def routes_of(self, protocol: int) -> list[Route]:
        """IPv4 routes of all tables that this RTPROT_* number made; the kernel picks them out."""
        request = rtmsg()
        request["family"], request["proto"] = socket.AF_INET, protocol
        flags = NLM_F_REQUEST | NLM_F_DUMP
        found = await self._ask(self._strict, request, RTM_GETROUTE, flags, "read the routes")
        return [route for route in map(_route, found) if route is not None]

    async def neighbours(self) -> list[Neighbour]:
        """ARP and neighbour discovery tables."""
        with _host_errors("read the neighbours"):
            found = [_neighbour(message) async for message in await self._ip.neigh("dump")]
        return [entry for entry in found if isinstance(entry, Neighbour)]

    async def fdb(self) -> list[FdbEntry]:
        """Forwarding entries of bridges and VXLAN devices."""
        with _host_errors("read the forwarding tables"):
            found = [_neighbour(message) async for message in await self._ip.fdb("dump")]
        return [entry for entry in found if isinstance(entry, FdbEntry)]

    async def rules(self) -> list[Rule]:
        """Routing rules of both families."""
        with _host_errors("read the routing rules"):
            return [_rule(message) async for message in await self._ip.rule("dump")]

    async def next_hops(self) -> list[NextHop]:
        """Next-hop objects that are a gateway behind a device."""
        flags = NLM_F_REQUEST | NLM_F_DUMP
        what = "read the next-hop objects"
        found = await self._ask(self._ip, _NextHopMessage(), RTM_GETNEXTHOP, flags, what)
        return [hop for hop in map(_next_hop, found) if hop is not None]

    async def ready_devices(self) -> dict[str, int]:
        """Name -> index of the devices that can send: up, and with a carrier."""
        flags = NLM_F_REQUEST | NLM_F_DUMP
        found = await self._links(ifinfmsg(), OURS, flags)
        both = IFF_UP | IFF_LOWER_UP
        ready = [message for message in found if message["flags"] & both == both]
        return {message.get_attr("IFLA_IFNAME"): message["index"] for message in ready}

    async def names(self, known: frozenset[str] = frozenset()) -> dict[int, str]:
        """Number -> name of the namespaces that have both here: those under /run/netns (CNI,
        iproute2) and Docker's. Names in ``known`` are not looked up again."""
        found: dict[int, str] = {}
        files = [path for folder in NAMED_NAMESPACES for path in _files(folder)]
        for path in (path for path in files if path.name not in known):
            with contextlib.suppress(OSError, NetlinkError):
                nsid = await self._nsid(path)
                if nsid is not None:
                    found.setdefault(nsid, path.name)
        return found

    async def add_vxlan(self, name: str, tunnel: Tunnel, lower: int, mac: bytes) -> None:
        """Make a VXLAN device above ``lower``; port, VNI, local address and learning of ``tunnel``
        count, the rest is the kernel's default."""
        with _host_errors(f"make the tunnel device {name}"):
            await self._ip.link(
                "add",
                ifname=name,
                kind="vxlan",
                address=mac.hex(":"),
                vxlan_id=tunnel.vni,
                vxlan_port=tunnel.port,
                vxlan_link=lower,
                vxlan_local=str(tunnel.local),
                vxlan_learning=tunnel.learning,
            )

    async def set_link(self, index: int, **changes: Any) -> None:
        """Change a device: ``mtu``, ``state`` ("up" or "down")."""
        with _host_errors(f"change network device {index}"):
            await self._ip.link("set", index=index, **changes)

    async def delete_link(self, index: int) -> None:
        """Remove a device with everything on it; no error if it is gone."""
        with _host_errors(f"remove network device {index}"):
            await _unless_gone(self._ip.link("del", index=index))

    async def replace_address(self, index: int, interface: IpInterface) -> None:
        """Have the address on the device."""
        length = interface.network.prefixlen
        with _host_errors(f"set address {interface}"):
            await self._ip.addr("replace", index=index, address=str(interface.ip), prefixlen=length)

    async def replace_neighbour(self, entry: Neighbour) -> None:
        """Have a permanent neighbour entry."""
        with _host_errors(f"set the neighbour {entry.address}"):
            await self._ip.neigh("replace", state="permanent", **_neighbour_fields(entry))

    async def delete_neighbour(self, entry: Neighbour) -> None:
        """Have no neighbour entry for the address."""
        with _host_errors(f"remove the neighbour {entry.address}"):
            await _unless_gone(self._ip.neigh("del", **_neighbour_fields(entry)))

    async def replace_fdb(self, entry: FdbEntry) -> None:
        """Have a permanent forwarding entry on a VXLAN device."""
        with _host_errors(f"set the forwarding entry {entry.mac.hex(':')}"):
            await self._ip.fdb("replace", **_fdb_fields(entry))

    async def delete_fdb(self, entry: FdbEntry) -> None:
        """Have no such forwarding entry on a VXLAN device."""
        with _host_errors(f"remove the forwarding entry {entry.mac.hex(':')}"):
            await _unless_gone(self._ip.fdb("del", **_fdb_fields(entry)))

    async def replace_next_hop(self, hop: NextHop) -> None:
        """Have the next-hop object; routes that name it take the new way in the same step."""
        message = _NextHopMessage()
        message["family"] = socket.AF_INET if hop.gateway.version == 4 else socket.AF_INET6
        message["protocol"] = hop.protocol
        message["attrs"] = [
            *(("NHA_ID", hop.id), ("NHA_OIF", hop.device)),
            ("NHA_GATEWAY", str(hop.gateway)),
        ]
        flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE
        with _host_errors(f"set the next hop {hop.gateway}"):
            await self._send(message, RTM_NEWNEXTHOP, flags)

    async def delete_next_hop(self, hop: NextHop) -> None:
        """Have no such next-hop object, nor routes that name it."""
        message = _NextHopMessage()
        message["attrs"] = [("NHA_ID", hop.id)]
        with _host_errors(f"remove the next hop {hop.gateway}"):
            await _unless_gone(self._send(message, RTM_DELNEXTHOP, NLM_F_REQUEST | NLM_F_ACK))

    async def _send(self, message: Any, kind: int, flags: int) -> None:
        async for _ in await self._ip.nlm_request(message, kind, flags):
            pass

    async def add_rule(self, rule: Rule) -> None:
        """Have the rule; no error if it is there."""
        with _host_errors(f"set the routing rule {rule.priority}"):
            try:
                await self._ip.rule("add", **_rule_fields(rule))
            except NetlinkError as error:
                if error.code != errno.EEXIST:
                    raise

    async def delete_rule(self, rule: Rule) -> None:
        """Have no such rule."""
        with _host_errors(f"remove the routing rule {rule.priority}"):
            await _unless_gone(self._ip.rule("del", **_rule_fields(rule)))

    async def replace_route(self, route: Route, *, onlink: bool = False) -> None:
        """Have the route; ``onlink``: the gateway need not be in a network of ours."""
        with _host_errors(f"set the route to {route.destination}"):
            fields = _route_fields(route) | ({"flags": RTNH_F_ONLINK} if onlink else {})
            await self._ip.route("replace", **fields)

    async def delete_route(self, route: Route) -> None:
        """Have no such route."""
        fields = _route_fields(route)
        # The kernel refuses a next hop that is gone, although then the route is gone with it.
        fields.pop("nh_id", None)
        with _host_errors(f"remove the route to {route.destination}"):
            await _unless_gone(self._ip.route("del", **fields))

    async def _nsid(self, path: Path) -> int | None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            answer = await self._ip.get_netnsid(fd=descriptor)
        finally:
            os.close(descriptor)
        number = answer["nsid"] if answer else None
        return number if number is not None and 0 <= number < 1 << 31 else None


async def _unless_gone(request: Any) -> None:
    try:
        await request
    except NetlinkError as error:
        if error.code not in (errno.ENODEV, errno.ENOENT, errno.ESRCH):
            raise


def _neighbour_fields(entry: Neighbour) -> dict[str, Any]:
    return {"dst": str(entry.address), "lladdr": entry.mac.hex(":"), "ifindex": entry.index}


def _fdb_fields(entry: FdbEntry) -> dict[str, Any]:
    # For "replace" pyroute2 leaves out what it adds for "add", and the kernel refuses.
    return {
        "ifindex": entry.index,
        "lladdr": entry.mac.hex(":"),
        "dst": str(entry.remote),
        "flags": ndmsg.flags["self"],
        "state": ndmsg.states["noarp"] | ndmsg.states["permanent"],
    }


def _route_fields(route: Route) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "dst": str(route.destination),
        "table": route.table,
        "proto": route.protocol,
        "priority": route.priority,
    }
    if route.kind != RTN_UNICAST:
        return fields | {"type": route.kind}
    if route.next_hop is not None:
        return fields | {"nh_id": route.next_hop}
    return fields | {"gateway": str(route.gateway), "oif": route.device}


def _rule_fields(rule: Rule) -> dict[str, Any]:
    fields = {
        "family": rule.family,
        "priority": rule.priority,
        "table": rule.table,
        "protocol": rule.protocol,
        "fwmark": rule.fwmark,
        "fwmask": rule.fwmask,
        "iifname": rule.device,
        "ip_proto": rule.ip_protocol,
        "sport_range": _range(rule.source_ports),
        "dport_range": _range(rule.ports),
    }
    if rule.source is not None:
        fields |= {"src": str(rule.source.network_address), "src_len": rule.source.prefixlen}
    return {name: value for name, value in fields.items() if value is not None}


def _range(ends: tuple[int, int] | None) -> dict[str, int] | None:
    return None if ends is None else {"start": ends[0], "end": ends[1]}


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


# ---------------------------------------------------------------------------------------- events


class Group(IntEnum):
    """Multicast groups of rtnetlink (enum rtnetlink_groups)."""

    LINK = 1
    NEIGH = 3
    IPV4_IFADDR = 5
    IPV4_ROUTE = 7
    IPV4_RULE = 8
    IPV6_IFADDR = 9
    IPV6_ROUTE = 11
    IPV6_RULE = 19
    NSID = 28


FAR_GROUPS: Final = (Group.LINK, Group.IPV4_IFADDR, Group.IPV6_IFADDR)
WITH_FAMILY: Final = struct.Struct("=IHHIIB")
DRAIN_LIMIT: Final = 256


class Events:
    """Changes as they happen: of our own namespace everything; of those in ``followed`` (numbers,
    set by the reader of the events) only that there was one.

    Asynchronous context manager. Open it before reading a snapshot, and follow a namespace before
    reading it, and no change can fall between the two. There are two sockets because one that
    hears every namespace would also hear every pod's neighbours and routes. Between the two there
    is no order, and numbers are used again; hence what a far message says is never believed.
    """

    followed: frozenset[int] = frozenset()

    async def __aenter__(self) -> Self:
        self._marshal = MarshalRtnl()
        with contextlib.ExitStack() as stack:
            self._own = stack.enter_context(_listen(tuple(Group), everywhere=False))
            self._far = stack.enter_context(_listen(FAR_GROUPS, everywhere=True))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._stack.close()

    async def batch(self) -> list[Event | Overrun]:
        """At least one event; those of our own namespace are in the kernel's order."""
        while True:
            events = [*self._own_events(), *self._far_events()]
            if events:
                return events
            await self._readable()

    async def _readable(self) -> None:
        # Watched only while somebody waits: a loop that watches a socket nobody reads spins.
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        for listener in (self._own, self._far):
            loop.add_reader(listener, ready.set)
        try:
            await ready.wait()
        finally:
            for listener in (self._own, self._far):
                loop.remove_reader(listener)

    def _own_events(self) -> Iterator[Event | Overrun]:
        for message in _drain(self._own):
            if isinstance(message, Overrun):
                yield message
            elif _wanted(message[0]):
                yield from self._decode(message[0])

    def _far_events(self) -> list[Event | Overrun]:
        # Our own namespace may have a number here too: it is never among the followed.
        found: dict[Event | Overrun, None] = {}
        for message in _drain(self._far):
            if isinstance(message, Overrun):
                found[message] = None
            elif (nsid := _nsid(message[1])) is not None and nsid in self.followed:
                found[Event(Namespace(nsid))] = None
        return list(found)

    def _decode(self, data: bytes) -> Iterator[Event]:
        for message in self._marshal.parse(data):
            decoder = DECODERS.get(message["header"]["type"])
            item = decoder[0](message) if decoder else None
            if decoder and item is not None:
                yield Event(item, decoder[1])


Ancillary = list[tuple[int, int, bytes]]


def _drain(listener: socket.socket) -> Iterator[tuple[bytes, Ancillary] | Overrun]:
    for _ in range(DRAIN_LIMIT):
        try:
            data, ancillary, _, _ = listener.recvmsg(1 << 16, 64)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise
            yield Overrun()
        else:
            yield data, ancillary


def _listen(groups: tuple[Group, ...], *, everywhere: bool) -> socket.socket:
    with _host_errors("listen to the kernel's network events"), contextlib.ExitStack() as stack:
        kind = socket.SOCK_RAW | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        listener = stack.enter_context(socket.socket(socket.AF_NETLINK, kind, socket.NETLINK_ROUTE))
        listener.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BUFFER)
        if everywhere:
            listener.setsockopt(SOL_NETLINK, NETLINK_LISTEN_ALL_NSID, 1)
        listener.bind((0, 0))
        for group in groups:
            listener.setsockopt(SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, group)
        stack.pop_all()
        return listener


def _nsid(ancillary: Ancillary) -> int | None:
    for level, kind, data in ancillary:
        if level == SOL_NETLINK and kind == NETLINK_LISTEN_ALL_NSID:
            return int(struct.unpack("=i", data[:4])[0])
    return None


def _wanted(data: bytes) -> bool:
    """Look before decoding, which costs a third of a millisecond: is it of a kind we use?

    A link message of family AF_BRIDGE describes a bridge port, incompletely; its RTM_DELLINK says
    that the device left the bridge, not that it is gone.
    """
    if len(data) < WITH_FAMILY.size:
        return False
    _, kind, _, _, _, family = WITH_FAMILY.unpack_from(data)
    if kind in (RTM_NEWLINK, RTM_DELLINK):
        return bool(family == AF_UNSPEC)
    return kind in DECODERS
